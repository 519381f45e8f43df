"""Spaceport: self-speculative decoding for language models on ONNX Runtime and TensorRT."""

__version__ = "0.1.0"
