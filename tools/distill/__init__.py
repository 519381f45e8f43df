"""Distill: prompts to training data, the model's own greedy answers."""
