"""Decode benchmark: the speedup of drafts over plain decoding, on given prompts or with given acceptance rates."""
