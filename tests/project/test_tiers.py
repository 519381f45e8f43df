"""Tiers: the fast tier imports no torch, and no test runs in it by mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS
from support.tiers import NO_TORCH, imports_torch


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", True),
        ("from transformers.cache_utils import Cache", True),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", True),
        ("class A:\n    import torch", True),
        ("from support.families import FAMILIES", True),
        ("from support import families", True),
        ("import spaceport.tools.tune.packed_model", True),  # through tools/tune/packing.py
        ("def f():\n    import torch", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("from support.hash_engine import HashEngine\nfrom spaceport.runtime.decode.step import step", False),
        ("import torchless", False),
    ],
)
def test_a_file_that_imports_torch_is_found_by_what_it_says(source: str, expected: bool, tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(source)
    assert imports_torch(file) is expected


def test_where_torch_is_forbidden_its_import_fails_and_says_what_to_do() -> None:
    environment = os.environ | {"PYTHONPATH": str(NO_TORCH)}
    for module in ("torch", "transformers", "torch.nn"):
        command = [sys.executable, "-c", f"import {module}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "the fast tier imports neither torch nor transformers: mark the test with" in done.stderr


def test_the_fast_tier_leaves_out_what_needs_torch_or_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text("utf-8"))
    (tmp_path / "test_heavy.py").write_text("import torch")
    (tmp_path / "test_light.py").write_text(
        "import sys, pytest\n"
        "def test_bundle(tiny_bundle): ...\n"
        "@pytest.mark.torch\ndef test_marked(): ...\n"
        "def test_forgotten(): import torch\n"
        "def test_light(): assert 'torch' not in sys.modules\n"
    )
    options = ["--fast", "-n0", "-rA", "-c", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed, 2 deselected" in done.stdout.splitlines()[-1], done.stdout
    assert "RuntimeError: the fast tier imports neither torch nor transformers" in done.stdout
    assert "test_heavy" not in done.stdout
