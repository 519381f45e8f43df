"""Graphs: what a compiled model looks like, apart from any file format and any session."""
