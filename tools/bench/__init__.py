"""Bench: tables of speed, the plain way beside the drafted one."""
