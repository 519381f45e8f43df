"""Acceptance: how many of its own drafts a model would accept, from training to serving."""
