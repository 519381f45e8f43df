"""A machine with a GPU and without a network: what it lacks is packed in one folder, and runs there with one command."""
