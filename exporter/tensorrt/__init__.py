"""TensorRT: a bundle's graph as engines of TensorRT and TensorRT-RTX."""
