"""Chat: a conversation on the terminal with the model of a bundle or of a service."""
