"""Isolation: work that may take too long, in a process that can be killed."""
