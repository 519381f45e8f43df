"""Bench: measurements of step costs, decoding speed, load and other runtimes."""
