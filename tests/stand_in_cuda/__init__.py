"""ONNX Runtime's CUDA provider on CUDA libraries without a GPU: `python -m stand_in_cuda.libraries` installs and builds them."""
