"""Compiles the native operators into one library, with the system's C++ compiler or the wheel ziglang."""

from __future__ import annotations

import argparse
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512")

# Instruction sets by machine: name, header of the vector layer, what the compiler may use.
SETS: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "x86_64": (
        ("portable", "vector_portable.h", ("-O2",)),  # with -O3 it takes minutes
        ("avx2", "vector_avx2.h", _AVX2),
        ("avxvnni", "vector_avx2.h", (*_AVX2, "-mavxvnni")),
        ("avx512vnni", "vector_avx512vnni.h", (*_AVX2, *_AVX512)),
    ),
    "aarch64": (
        ("portable", "vector_portable.h", ("-O2",)),
        ("neon", "vector_neon.h", ("-march=armv8.2-a+dotprod",)),
    ),
}

# One order of floating-point operations for all sets: no contraction into fused operations that the source does not name.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-ffp-contract=off",
    "-fno-math-errno",  # square roots are instructions, not calls
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-warning-option",  # clang does not know the next one
    "-Wno-maybe-uninitialized",  # GCC 12 warns of its own headers
)

# GCC's sharing of stack slots computes wrong sums with -O1 (seen with 12.2; its bug 90348). Clang has no such option.
_GCC_FLAGS = ("-fstack-reuse=none",)
# Clang 22 (of ziglang) computes wrong scores of the portable set with it.
_CLANG_FLAGS = ("-fno-slp-vectorize",)


class BuildError(RuntimeError):
    """The library could not be compiled."""


def library_name() -> str:
    """The file name of the library on this system."""
    suffix = {"Windows": ".dll", "Darwin": ".dylib"}.get(platform.system(), ".so")
    return f"spaceport_kernels{suffix}"


def machine_name(machine: str | None = None) -> str:
    """The machine in the names of `SETS`."""
    name = (machine or platform.machine()).lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def compiler() -> tuple[str, ...] | None:
    """The command of a C++ compiler, or None where there is none."""
    for name in ("g++", "clang++", "c++"):
        if (path := shutil.which(name)) is not None:
            return (path,)
    if find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def build(
    library: Path,
    command: Sequence[str] | None = None,
    machine: str | None = None,
    flags: Iterable[str] = (),
    test_encoding: bool = False,
    program: Path | None = None,
) -> None:
    """Compile the library of a machine, or a program that has the kernels without the operators.

    With `test_encoding`, AVX-VNNI is in the encoding that AVX512 processors have.
    """
    command = command or compiler()
    if command is None:
        raise BuildError("no C++ compiler found: install g++ or clang, or pip install ziglang")
    name = machine_name(machine)
    if name not in SETS:
        raise BuildError(f"no kernels for {name}: expected one of {', '.join(SETS)}")
    library.parent.mkdir(parents=True, exist_ok=True)
    common = [*_FLAGS, *(_GCC_FLAGS if _is_gcc(command) else _CLANG_FLAGS), *flags]
    if test_encoding:
        common.append("-DSPACEPORT_TEST_ENCODING")
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for source in (program or SOURCES / "operators.cpp", SOURCES / "choose.cpp"):
            objects.append(str(Path(folder) / f"{source.stem}.o"))
            _run([*command, *common, f"-I{SOURCES}", "-c", str(source), "-o", objects[-1]])
        for set_name, header, options in SETS[name]:
            if test_encoding and set_name == "avxvnni":
                options = (*_AVX2, "-mavx512vl", "-mavx512vnni")
            target = str(Path(folder) / f"{set_name}.o")
            macros = [f"-DSPACEPORT_SET={set_name}", f'-DSPACEPORT_VECTOR="{header}"']
            _run([*command, *common, *options, *macros, "-c", str(SOURCES / "set.cpp"), "-o", target])
            objects.append(target)
        # Linked as C: nothing of a C++ library is used, and none has to be on the machine.
        linker = [part.replace("clang++", "clang").replace("g++", "gcc") for part in command]
        linker = ["cc" if part == "c++" else part for part in linker]
        written = Path(folder) / library.name
        _run([*linker, *([] if program else ["-shared"]), *flags, *objects, "-lm", "-o", str(written)])
        shutil.move(str(written), library)


def _is_gcc(command: Sequence[str]) -> bool:
    ran = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return "Free Software Foundation" in ran.stdout


def _run(command: Sequence[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{ran.stderr[-4000:]}")
    if ran.stderr.strip():
        print(ran.stderr, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", nargs="?", type=Path, default=SOURCES / library_name(), help="File to write.")
    parser.add_argument("--machine", help="Target machine, x86_64 or aarch64; with --compiler, to cross-compile.")
    parser.add_argument("--compiler", help="Command of the C++ compiler, for instance 'python -m ziglang c++'.")
    parser.add_argument("--flags", nargs="*", default=[], help="Further flags, without their first dash.")
    parser.add_argument("--test-encoding", action="store_true", help="AVX-VNNI in the encoding of AVX512 processors.")
    given = parser.parse_args()
    try:
        command = shlex.split(given.compiler) if given.compiler else None
        flags = [f"-{flag}" for flag in given.flags]
        build(given.library, command, given.machine, flags, given.test_encoding)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
