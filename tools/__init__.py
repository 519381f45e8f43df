"""Tools: what people run."""
