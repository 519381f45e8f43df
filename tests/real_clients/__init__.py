"""Real clients: evaluation and load tools, unmodified and in environments of their own, with a service on this machine."""
