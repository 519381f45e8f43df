"""Decode: one step of every request over an engine: plan, run, verify, keep."""
