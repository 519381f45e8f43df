"""Pins: the versions of all packages that are compared or that convert checkpoints."""

from __future__ import annotations

TORCH = "torch==2.13.0"  # a CPU build satisfies it; an open range may fetch gigabytes of CUDA libraries
GENAI = ("onnxruntime-genai==0.18.0", "onnxruntime==1.31.1")
CTRANSLATE2 = "ctranslate2==4.8.5"
OPENVINO_TOKENIZERS = "openvino-tokenizers==2026.4.1.0"

# Environment -> requirements. `convert` converts checkpoints for the others.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "onnxruntime-genai": GENAI,
    "openvino-genai": ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", OPENVINO_TOKENIZERS),
    "ctranslate2": (CTRANSLATE2,),
    "transformers": (TORCH, "transformers==5.23.0", "accelerate==1.15.0", "safetensors==0.8.0"),
    "llama.cpp": ("llama-cpp-python==0.3.36",),
    "llama.cpp-server": ("llama-cpp-python[server]==0.3.36",),
    "convert": (
        *(TORCH, "transformers==5.5.4", "accelerate==1.15.0", "safetensors==0.8.0", "sentencepiece==0.2.3"),
        *(*GENAI, "onnx==1.23.2", "onnx-ir==1.1.0"),
        *("optimum-intel==2.2.0", "nncf==3.4.0", OPENVINO_TOKENIZERS),
        CTRANSLATE2,
    ),
}
# Uninstalled afterwards: no text model needs it, and a build for another torch version breaks transformers.
UNWANTED: dict[str, tuple[str, ...]] = {"convert": ("torchvision",)}
# Environment variables of an installation. The AMX kernels of this llama.cpp crash (segmentation fault in llama_decode, on
# an Emerald Rapids CPU, Q4_1); all other extensions of the CPU are used.
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
BUILD: dict[str, dict[str, str]] = {
    name: {"CMAKE_ARGS": f"-DCMAKE_C_FLAGS='{_NO_AMX}' -DCMAKE_CXX_FLAGS='{_NO_AMX}'"}
    for name in ("llama.cpp", "llama.cpp-server")
}
