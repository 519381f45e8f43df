"""Page: what browsers draw of a generation: the style and the modules of reports and of the page of a service."""
