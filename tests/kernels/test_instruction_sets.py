"""All instruction sets compute the same bytes, also those of processors of another kind, in an emulator."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from spaceport.kernels.build import SETS, TARGETS, build, cross_compiler, machine_name, zig
from support.cache import built
from support.native_operators import EMULATION, available_sets, emulation, library, sources

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

PROGRAM = Path(__file__).with_name("digests.cpp")
CROSS = "aarch64-linux-gnu-g++"


def program(target: str | None = None) -> Path:
    """The program that prints digests, for this processor or, with ziglang, for a target of wheels."""
    command: tuple[str, ...] | None = None
    machine: str | None = None
    flags: list[str] = []
    name = "digests"
    if target == CROSS:
        command, machine, flags = (CROSS,), "aarch64", ["-static"]
    elif target is not None:
        command, machine = cross_compiler(TARGETS[target]), TARGETS[target].machine
        if target == "linux-aarch64":  # without the libraries of such a system
            command, flags = tuple(part.replace("gnu.2.28", "musl") for part in command), ["-static"]
        else:
            name = "digests.exe"
    test_encoding = machine != "aarch64"
    if test_encoding:
        flags = [EMULATION] if target else emulation()

    def make(folder: Path) -> None:
        build(folder / name, command, machine, flags, test_encoding=test_encoding, program=PROGRAM)

    return (
        built(f"digests-{target or machine_name()}", [*sources(), PROGRAM, *flags], make, ["kernels/build.py"]) / name
    )


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
        assert digests(name, program(CROSS), "qemu-aarch64") == expected, name


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("target", "emulator"), [("linux-aarch64", "qemu-aarch64"), ("windows-x86_64", "wine")])
def test_kernels_of_wheels_compute_the_same_bytes(target: str, emulator: str) -> None:
    if zig() is None or shutil.which(emulator) is None:
        pytest.skip(f"ziglang or {emulator} is not installed")
    expected = digests("portable", program())
    names = [name for name, _, _ in SETS[TARGETS[target].machine]]
    for name in names if emulator == "qemu-aarch64" else available_sets():
        assert digests(name, program(target), emulator) == expected, name
