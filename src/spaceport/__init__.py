"""Spaceport: exports, compiles and runs language models that draft for themselves and fork."""

__version__ = "0.1.0"
