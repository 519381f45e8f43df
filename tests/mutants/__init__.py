"""Mutants: small faults put into the product, to see that the tests notice them."""
