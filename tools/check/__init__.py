"""Check: a bundle's engines held against the reference."""
