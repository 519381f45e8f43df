"""ONNX Runtime's CUDA provider on CUDA libraries without a GPU: `python -m stand_in_cuda` installs and builds them."""
