"""Sampling: which token a row of logits stands for, and how probable tokens are."""
