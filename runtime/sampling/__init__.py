"""Sampling: selects tokens from logits, and computes log probabilities."""
