"""Graphs: transformers models as PyTorch modules with the inputs and outputs of exported graphs."""
