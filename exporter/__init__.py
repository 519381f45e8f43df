"""Exporter: a checkpoint as a bundle, a bundle as engines."""
