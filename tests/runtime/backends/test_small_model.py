"""Small model: ONNX Runtime reads models that are written without the package onnx."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from spaceport.runtime.backends.small_model import ORT_DOMAIN, model, node


def test_a_model_is_written_as_onnx_runtime_reads_it() -> None:
    product = node("MatMulNBits", ("a", "w", "s"), "y", domain=ORT_DOMAIN, K=32, N=300, bits=4, block_size=16)
    tensors = {"w": np.full((300, 2, 8), 0x99, np.uint8), "s": np.full(600, 0.5, np.float32)}
    content = model([product], tensors, ("a", np.float32, 32), ("y", np.float32, 300))
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"a": np.ones((2, 32), np.float32)})
    assert found.tolist() == [[32 * 0.5] * 300] * 2
    assert [(value.name, value.shape) for value in session.get_inputs()] == [("a", ["rows", 32])]
