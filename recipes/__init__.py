"""Recipes: the commands that train the demo model and the adapters, and fetch a coding model; not part of the wheel."""
