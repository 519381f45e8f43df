"""Spaceport: self-speculative decoding for language models on ONNX Runtime and TensorRT."""

import logging

logging.getLogger("spaceport").addHandler(logging.NullHandler())  # silent unless a program configures logging

__version__ = "0.1.0"
