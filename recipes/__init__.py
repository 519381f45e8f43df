"""Recipes: the commands that train the demo model and the chat model's adapter; not part of the wheel."""
