"""Decode: decode steps of requests on an engine: plan, run, verify, keep."""
