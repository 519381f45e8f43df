"""Serve: bundles behind an OpenAI-compatible HTTP service."""
