"""Decode benchmark: whether drafts pay, on given prompts or with given acceptance rates."""
