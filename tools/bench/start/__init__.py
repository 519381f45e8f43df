"""Start: how long a service takes from the start of its process to its first token."""
