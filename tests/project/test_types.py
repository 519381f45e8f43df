"""Types: mypy finds nothing in the package."""

import subprocess
import sys

import pytest

from support.paths import ROOT


@pytest.mark.slow
@pytest.mark.torch
def test_the_package_has_the_types_that_it_states() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
