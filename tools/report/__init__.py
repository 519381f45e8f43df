"""Report: an HTML page and a picture of a generation, made from its trace."""
