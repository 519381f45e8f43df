"""Runtime: a bundle as text."""
