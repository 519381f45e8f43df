"""Integer kernels: whether ONNX Runtime multiplies 8-bit integers exactly on this CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from spaceport.runtime.backends.small_model import ORT_DOMAIN, model, node

# Without VNNI, the default kernels of x86 CPUs add two products in 16 bits, where large sums saturate. This session option
# selects other kernels: on AVX2 CPUs they take 1.5 times as long for one row and 1.07 times for 36. With VNNI, where no
# product needs them, they take 2.3 times as long for nine rows (docs/int8.md).
EXACT_SETTING = ("session.x64quantprecision", "1")

INPUTS, OUTPUTS, WEIGHT = 64, 32, 127
_LARGEST = 255


@cache
def is_exact(setting: bool) -> bool:
    """Whether sums of the largest products are exact, in a session with or without the setting."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if setting:
        options.add_session_config_entry(*EXACT_SETTING)
    session = ort.InferenceSession(_largest_products(), options, providers=["CPUExecutionProvider"])
    for rows in (1, 2, 33):  # kernels differ by the number of rows
        (found,) = session.run(None, {"a": np.full((rows, INPUTS), _LARGEST, np.uint8)})
        if not np.array_equal(found, np.full((rows, OUTPUTS), float(INPUTS * _LARGEST * WEIGHT), np.float32)):
            return False
    return True


def _largest_products() -> bytes:
    """A model that multiplies rows of 8-bit numbers with a weight whose numbers are all the largest."""
    product = node("MatMulIntegerToFloat", ("a", "w", "one", "one", "zero"), "y", domain=ORT_DOMAIN)
    weight = np.full((INPUTS, OUTPUTS), WEIGHT, np.int8)
    tensors: dict[str, NDArray[Any]] = {"w": weight, "one": np.array(1, np.float32), "zero": np.array(0, np.uint8)}
    return model([product], tensors, ("a", np.uint8, INPUTS), ("y", np.float32, OUTPUTS))
