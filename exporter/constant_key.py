"""Constant key: how a constant of a traced graph is known again: by its content."""

from __future__ import annotations

from hashlib import sha256

import onnx_ir as ir

Key = tuple[tuple[int, ...], bytes]  # shape and digest of a constant


class WeightNotFound(ValueError):
    """A rounded weight that the graph does not use as it is; the message names its layer."""


def key_of(tensor: ir.TensorProtocol) -> Key:
    """What tells a constant from others: its shape and the digest of its content."""
    return tuple(tensor.shape.numpy()), sha256(tensor.tobytes()).digest()
