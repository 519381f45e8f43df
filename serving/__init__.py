"""Bundles behind an OpenAI-compatible HTTP service."""
