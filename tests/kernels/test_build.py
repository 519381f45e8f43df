"""The library is compiled with what is there, and needs no C++ library where it runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from spaceport.kernels import build
from spaceport.kernels.native_library import VERSION, fault, instruction_set, instruction_sets, register, version
from support.native_operators import available_sets, forced, library
from support.paths import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
EXPORTED = {"RegisterCustomOps", "spaceport_instruction_set", "spaceport_instruction_sets", "spaceport_kernels_version"}


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (None, r"no C\+\+ compiler found: install g\+\+ or clang, or pip install ziglang"),
        ("riscv64", "no kernels for riscv64: expected one of x86_64, aarch64"),
    ],
)
def test_a_missing_compiler_and_a_machine_without_kernels_are_named(
    machine: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(build.BuildError, match=message):
        build.build(tmp_path / "library.so", ["g++"] if machine else None, machine)


def test_machines_have_one_name_each() -> None:
    names = [build.machine_name(name) for name in ("AMD64", "x86_64", "arm64", "aarch64")]
    assert names == ["x86_64"] * 2 + ["aarch64"] * 2


@pytest.mark.skipif(library() is None or shutil.which("nm") is None, reason="no C++ compiler")
def test_the_library_needs_the_c_library_only_and_shows_four_functions() -> None:
    listed = subprocess.run(["nm", "-D", str(library())], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r" T (\w+)", listed)) == EXPORTED
    assert not [line for line in listed.splitlines() if re.search(r"_Z|GLIBCXX|CXXABI", line)]


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_the_library_has_its_version_and_the_instruction_sets_of_the_processor() -> None:
    path = library()
    assert path is not None
    assert (version(path), fault(path), set(instruction_sets(path))) == (VERSION, None, set(available_sets()))
    for name in available_sets():
        with forced(name):
            assert instruction_set(path) == name
    assert instruction_set(path) in available_sets()
    with forced("sse9"):
        assert instruction_set(path) == ""
        with pytest.raises(ValueError, match=r"^SPACEPORT_KERNELS is sse9: this processor has .*portable; name"):
            register(onnxruntime.SessionOptions(), path)
    newer = rf"have version {VERSION}, expected {VERSION + 1} or newer: install Spaceport"
    with pytest.raises(ValueError, match=newer):
        register(onnxruntime.SessionOptions(), path, VERSION + 1)


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_bytes(b"not a library")
    assert re.match(r"the native operators in .*library.so cannot be loaded: ", str(fault(tmp_path / "library.so")))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("wanted", [*re.findall(r'"(onnxruntime>=[\d.]+);', PYPROJECT), "onnxruntime"])
def test_the_oldest_and_the_newest_runtime_load_the_library(wanted: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--retries", "1", "--target", str(tmp_path)]
    installed = subprocess.run([*pip, wanted.replace(">=", "==")], capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"pip got no {wanted}: {installed.stderr.strip().splitlines()[-1]}")
    path = f"{tmp_path}{os.pathsep}{os.pathsep.join(sys.path)}"
    settings = os.environ | {"PYTHONPATH": path, "TESTED_KERNELS": str(library())}
    where = "import onnxruntime; print(onnxruntime.__version__, onnxruntime.__file__)"
    said = subprocess.run(
        [sys.executable, "-c", where], env=settings, capture_output=True, text=True, check=True
    ).stdout
    assert str(tmp_path) in said
    tests = [
        str(Path(__file__).with_name(name)) for name in ("test_attend.py", "test_products.py", "test_whole_steps.py")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *tests]
    ran = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{said}{ran.stdout[-4000:]}{ran.stderr[-1000:]}"
