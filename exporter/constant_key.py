"""Constant key: identify a constant of a traced graph by its content."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import onnx_ir as ir

Key = tuple[tuple[int, ...], bytes]  # shape and SHA-256 of the content


class WeightNotFound(ValueError):
    """The graph does not use a quantized weight unchanged; the message names its layer."""


def key_of(tensor: ir.TensorProtocol) -> Key:
    """The key of a constant: its shape and the digest of its content."""
    content = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
    return tuple(tensor.shape.numpy()), sha256(content.data).digest()
