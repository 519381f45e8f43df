"""Native operators for ONNX Runtime on CPUs: their C++ sources, how weights are packed, and what they compute."""
