"""Compare: one checkpoint in Spaceport and in other runtimes, each in its own environment and process."""
