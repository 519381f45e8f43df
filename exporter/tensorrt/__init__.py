"""TensorRT: build TensorRT and TensorRT-RTX engines from the graph of a bundle."""
