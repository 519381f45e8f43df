"""Verify: whether a bundle computes and decodes what its checkpoint does."""
