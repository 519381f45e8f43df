"""Serve: load on OpenAI-compatible services, by clients that read, leave, or read slowly."""
