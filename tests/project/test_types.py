"""Types: mypy finds nothing in the package."""

import subprocess
import sys

import pytest

from support.cache import cache_folder
from support.paths import ROOT, package


@pytest.mark.slow
@pytest.mark.torch
def test_the_package_has_the_types_that_it_states() -> None:
    package()
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(cache_folder() / "mypy")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
