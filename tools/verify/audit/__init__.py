"""Audit: whether a bundle's drafted texts are its plain texts, on one engine."""
