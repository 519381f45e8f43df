"""Exporter: export a checkpoint as a bundle, and build TensorRT engines from a bundle."""
