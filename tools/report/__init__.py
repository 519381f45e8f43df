"""Report: a generation as a page, from its trace."""
