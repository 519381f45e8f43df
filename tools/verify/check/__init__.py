"""Check: comparison of a bundle's engines with each other and with the PyTorch model."""
