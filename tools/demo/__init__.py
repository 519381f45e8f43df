"""Demo model: what its data are made of, where its training starts and what it can do."""
