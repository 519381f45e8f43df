"""Recipes: the commands that train the demo model and the chat model's adapter, and fetch a coding model; not part of the wheel."""
