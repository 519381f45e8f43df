"""Damaged inputs end in an error or in outputs of the usual shape, never in a crash."""

import subprocess
import sys

import pytest

from support.native_operators import library
from support.paths import ROOT

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")


@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.nightly)])
def test_no_damage_of_one_input_ends_the_process(count: int) -> None:
    command = [sys.executable, "-m", "support.damaged_inputs", "0", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "tests")
    *_, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0, f"{last}\n{done.stderr[-4000:]}"
    assert "errors" in last
    assert "outputs" in last
