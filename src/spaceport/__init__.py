"""Spaceport: self-speculative decoding for language models on ONNX Runtime and TensorRT."""

import logging
import os

# ONNX Runtime reads it when it is imported. Without it, version 1.29 and later store an id of the machine and send names
# and hashes of models to its maker.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

logging.getLogger("spaceport").addHandler(logging.NullHandler())  # silent unless a program configures logging

__version__ = "0.1.0"
