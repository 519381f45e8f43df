"""Trace: what each step of a request did, recorded, written and read back."""
