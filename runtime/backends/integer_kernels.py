"""Integer kernels: whether ONNX Runtime multiplies 8-bit integers exactly on this CPU."""

from __future__ import annotations

import base64
from functools import cache

import numpy as np
import onnxruntime as ort

# Without VNNI, the default kernels of x86 CPUs add two products in 16 bits, where large sums saturate. This session option
# selects other kernels, which are slower: 36 rows of a 107M model take four times as long.
EXACT_SETTING = ("session.x64quantprecision", "1")

# MatMulIntegerToFloat of a [rows, 64] by a constant [64, 32] of 127, with scales 1 and the zero point 0 (docs/int8.md).
_MODEL = (
    "CAoSCXNwYWNlcG9ydDrfAQozCgVzaGFwZRIBdyIPQ29uc3RhbnRPZlNoYXBlKhYKBXZhbHVlKgoIARADKgF/QgF2oAEECj4KAWEK"
    "AXcKA29uZQoDb25lCgR6ZXJvEgF5IhRNYXRNdWxJbnRlZ2VyVG9GbG9hdDoNY29tLm1pY3Jvc29mdBIBZyodCAIQB0IFc2hhcGVK"
    "EEAAAAAAAAAAIAAAAAAAAAAqDRABQgNvbmVKBAAAgD8qCxACQgR6ZXJvSgEAWhQKAWESDwoNCAISCQoDEgFyCgIIQGIUCgF5Eg8K"
    "DQgBEgkKAxIBcgoCCCBCBAoAEBVCEQoNY29tLm1pY3Jvc29mdBAB"
)
INPUTS, OUTPUTS, WEIGHT = 64, 32, 127
_LARGEST = 255


@cache
def is_exact(setting: bool) -> bool:
    """Whether sums of the largest products are exact, in a session with or without the setting."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if setting:
        options.add_session_config_entry(*EXACT_SETTING)
    session = ort.InferenceSession(base64.b64decode(_MODEL), options, providers=["CPUExecutionProvider"])
    for rows in (1, 2, 33):  # kernels differ by the number of rows
        (found,) = session.run(None, {"a": np.full((rows, INPUTS), _LARGEST, np.uint8)})
        if not np.array_equal(found, np.full((rows, OUTPUTS), float(INPUTS * _LARGEST * WEIGHT), np.float32)):
            return False
    return True
