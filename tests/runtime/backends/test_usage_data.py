"""Usage data: ONNX Runtime neither stores nor sends any in a process that uses this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_GENERATE = """
import sys
from spaceport.runtime import Decoding, Runtime
with Runtime.open(sys.argv[1], max_seq_len=64, threads=1, step_costs="standard") as runtime:
    print(len(runtime.generate("The harbour", Decoding(max_tokens=4)).tokens))
"""


@pytest.mark.slow
def test_onnxruntime_leaves_no_file_in_the_home_of_a_process_that_generates(tiny_bundle: Path, tmp_path: Path) -> None:
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "PATH", "LD_PRELOAD") if name in os.environ}
    # ONNX Runtime collects nothing where it finds the variables of a test or a CI system, so the process gets none.
    process = subprocess.run(
        [sys.executable, "-c", _GENERATE, str(tiny_bundle)],
        env={**kept, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (process.stdout, process.returncode) == ("4\n", 0), process.stderr
    assert [file for file in tmp_path.rglob("*") if file.is_file() and "spaceport" not in file.parts] == []


def test_a_choice_of_the_user_is_kept() -> None:
    program = "import os, spaceport; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    for given, expected in (({}, "1"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0")):
        environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
        found = subprocess.run([sys.executable, "-c", program], env={**environment, **given}, capture_output=True)
        assert found.stdout.decode().strip() == expected
