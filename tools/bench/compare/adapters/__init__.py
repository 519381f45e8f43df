"""Adapters: one script for each runtime that is compared, run by the interpreter of that runtime's own environment."""
