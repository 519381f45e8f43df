"""Adapters: one module per runtime, run by the Python interpreter of that runtime's environment."""
