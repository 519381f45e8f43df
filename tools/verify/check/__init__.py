"""Check: what a bundle's engine is tried on before anyone trusts it."""
