"""All instruction sets compute the same bytes, also those of processors of another kind, in an emulator."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from spaceport.kernels.build import SETS, SOURCES, build, machine_name
from support.cache import built
from support.native_operators import available_sets, library

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

PROGRAM = Path(__file__).with_name("digests.cpp")
CROSS = "aarch64-linux-gnu-g++"


def program(machine: str | None = None) -> Path:
    sources = [*sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]), PROGRAM]
    command, flags = ([CROSS], ["-static"]) if machine else (None, [])

    def make(folder: Path) -> None:
        build(folder / "digests", command, machine, flags, test_encoding=machine is None, program=PROGRAM)

    return built(f"digests-{machine or machine_name()}", sources, ["kernels/build.py"], make) / "digests"


def digests(set_name: str, file: Path, *emulator: str) -> list[str]:
    settings = os.environ | {"SPACEPORT_KERNELS": set_name}
    ran = subprocess.run([*emulator, str(file)], env=settings, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


@pytest.mark.slow
def test_all_sets_of_this_processor_compute_the_same_bytes() -> None:
    expected = digests("portable", program())
    assert len(expected) > 100
    assert len(set(expected)) > 100
    for name in available_sets():
        assert digests(name, program()) == expected, name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(CROSS) is None or shutil.which("qemu-aarch64") is None, reason="no cross-compiler")
@pytest.mark.skipif(machine_name() != "x86_64", reason="not on x86-64")
def test_an_emulated_arm_processor_computes_the_same_bytes() -> None:
    expected = digests("portable", program())
    for name, _, _ in SETS["aarch64"]:
        assert digests(name, program("aarch64"), "qemu-aarch64") == expected, name
