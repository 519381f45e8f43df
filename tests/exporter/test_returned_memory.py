"""Large arrays are returned to the system when they are freed, also between small ones that stay."""

from __future__ import annotations

import subprocess
import sys

import pytest

GAPS = """
import sys
from pathlib import Path
import numpy as np
from spaceport.exporter.returned_memory import return_large_arrays

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

if sys.argv[1] == "returned":
    return_large_arrays()
np.ones(30 << 20, np.uint8)  # raises the limit of glibc when it is freed
before, small = anonymous(), []
for count in range(8):
    large = [np.ones((5 << 20) + (count << 18), np.uint8) for _ in range(4)]
    small.append(np.ones(100_000, np.uint8))
    del large
print(anonymous() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_arrays_leave_no_gaps() -> None:
    command = [sys.executable, "-c", GAPS, "returned"]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) < 4_000_000
