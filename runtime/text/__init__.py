"""Text: prompts to tokens, tokens to text."""
