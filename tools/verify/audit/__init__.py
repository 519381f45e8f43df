"""Audit: whether speculative decoding of a bundle generates the same tokens as plain decoding, on one engine."""
