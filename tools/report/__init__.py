"""Report: an HTML page of a generation, made from its trace."""
