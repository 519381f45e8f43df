"""The setup of the tests of ONNX Runtime's CUDA provider: python -m stand_in_cuda."""

from __future__ import annotations

import sys

from stand_in_cuda.libraries import FOLDER, prepare
from support.programs import Missing

if __name__ == "__main__":
    try:
        prepare()
    except Missing as reason:
        sys.exit(f"stand_in_cuda: {reason}")
    print(f"stand_in_cuda: ONNX Runtime with CUDA is in {FOLDER}")
