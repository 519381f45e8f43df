"""Compiles the native operators into one library, with the system's C++ compiler or the wheel ziglang.

setup.py loads this file by its path before anything is installed: it imports the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent


class Target(NamedTuple):
    """A system that a wheel is built for on another one, with ziglang."""

    system: str  # as platform.system() names it
    machine: str  # in the names of SETS
    triple: str  # as zig names it, with the oldest version of the C library or system
    wheel_tag: str  # the platform in the name of a wheel


# glibc 2.28: the oldest that wheels of ONNX Runtime run with. macOS 11: the first on ARM.
TARGETS = {
    "linux-x86_64": Target("Linux", "x86_64", "x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    "linux-aarch64": Target("Linux", "aarch64", "aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    "macos-arm64": Target("Darwin", "aarch64", "aarch64-macos.11.0", "macosx_11_0_arm64"),
    "windows-x86_64": Target("Windows", "x86_64", "x86_64-windows-gnu", "win_amd64"),
}

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512")

# Instruction sets by machine: name, header of the vector layer, what the compiler may use.
SETS: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "x86_64": (
        ("portable", "vector_portable.h", ("-O2",)),  # with -O3 it takes minutes
        ("avx2", "vector_avx2.h", _AVX2),
        ("avxvnni", "vector_avx2.h", (*_AVX2, "-mavxvnni")),
        ("avx512vnni", "vector_avx512vnni.h", (*_AVX2, *_AVX512)),
        ("amx", "vector_avx512vnni.h", (*_AVX2, *_AVX512, "-mamx-tile", "-mamx-int8")),
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
    "-g0",  # zig adds debug information unless told otherwise
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-ffp-contract=off",
    "-fno-math-errno",  # square roots are instructions, not calls
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-ignored-attributes",  # of vectors that are arguments of templates
    "-Wno-unknown-warning-option",  # clang does not know the next one
    "-Wno-maybe-uninitialized",  # GCC 12 warns of its own headers
)

# GCC's sharing of stack slots computes wrong sums with -O1 (seen with 12.2; its bug 90348). Clang has no such option.
_GCC_FLAGS = ("-fstack-reuse=none",)
# Clang 22 (of ziglang) computes wrong scores of the portable set with it.
_CLANG_FLAGS = ("-fno-slp-vectorize",)

# Zig compiles for the processor at hand unless told otherwise, and has names of its own for those of ARM.
_ZIG_FLAGS = ("-mcpu=baseline",)
_ARM, _ARM_OF_ZIG = "-march=armv8.2-a", "-mcpu=generic+v8_2a"

INSTALL_COMPILER = "install g++ or clang, or pip install ziglang"
LOST = (
    "Until Spaceport is installed again with a compiler that works, bundles in the formats int4, int8 and stored run "
    "with the standard operators of ONNX Runtime, which are slower"
)


class BuildError(RuntimeError):
    """The library could not be compiled."""


def library_name(system: str | None = None) -> str:
    """The file name of the library on a system, this one by default."""
    suffix = {"Windows": ".dll", "Darwin": ".dylib"}.get(system or platform.system(), ".so")
    return f"spaceport_kernels{suffix}"


def machine_name(machine: str | None = None) -> str:
    """The machine in the names of `SETS`."""
    name = (machine or platform.machine()).lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def zig() -> str | None:
    """The program in the wheel ziglang, or None where it is not installed.

    pip hides installed packages from a build, so their folder is searched and nothing is imported.
    """
    for folder in (*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib")):
        for name in ("zig", "zig.exe"):
            if (program := Path(folder) / "ziglang" / name).is_file():
                return str(program)
    return None


def compiler() -> tuple[str, ...] | None:
    """The command of a C++ compiler, or None where there is none."""
    for name in ("g++", "clang++", "c++"):
        if (path := shutil.which(name)) is not None:
            return (path,)
    program = zig()
    return None if program is None else (program, "c++")


def cross_compiler(target: Target) -> tuple[str, ...]:
    """The command of the C++ compiler for another system."""
    program = zig()
    if program is None:
        raise BuildError(
            f"a library for {target.wheel_tag} is compiled with ziglang, which is missing: pip install ziglang"
        )
    return (program, "c++", "-target", target.triple)


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
        raise BuildError(f"no C++ compiler found: {INSTALL_COMPILER}")
    name = machine_name(machine)
    if name not in SETS:
        raise BuildError(f"no kernels for {name}: expected one of {', '.join(SETS)}")
    library.parent.mkdir(parents=True, exist_ok=True)
    common = [*_compiler_flags(command, library), *flags, f"-I{SOURCES}"]
    if test_encoding:
        common.append("-DSPACEPORT_TEST_ENCODING")
    compilations = {
        source.stem: [str(source)] for source in (program or SOURCES / "operators.cpp", SOURCES / "choose.cpp")
    }
    for set_name, header, options in SETS[name]:
        if test_encoding and set_name == "avxvnni":
            options = (*_AVX2, "-mavx512vl", "-mavx512vnni")
        if _is_zig(command):
            options = tuple(option.replace(_ARM, _ARM_OF_ZIG) for option in options)
        macros = [f"-DSPACEPORT_SET={set_name}", f'-DSPACEPORT_VECTOR="{header}"']
        compilations[set_name] = [*options, *macros, str(SOURCES / "set.cpp")]
    with tempfile.TemporaryDirectory() as folder:
        objects = {stem: str(Path(folder) / f"{stem}.o") for stem in compilations}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [[*command, *common, *rest, "-c", "-o", objects[stem]] for stem, rest in compilations.items()]
            list(pool.map(_run, commands))
        # Linked as C: nothing of a C++ library is used, and none has to be on the machine.
        linker = [part.replace("clang++", "clang").replace("g++", "gcc") for part in command]
        linker = ["cc" if part == "c++" else part for part in linker]
        written = Path(folder) / library.name
        kind = [] if program else ["-shared"]
        libraries = [] if library.suffix == ".dll" else ["-lm"]
        _run([*linker, *kind, *flags, *objects.values(), *libraries, "-o", str(written)])
        # Programs that run may have the file mapped that this one replaces.
        beside = library.with_name(f"{library.name}.{os.getpid()}")
        shutil.copy2(written, beside)
        beside.replace(library)


def is_current(library: Path) -> bool:
    """Whether a library is newer than all that it is compiled from."""
    sources = [*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"), Path(__file__)]
    return library.is_file() and library.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def build_if_possible(library: Path, target: Target | None = None) -> bool:
    """Compile the library unless it is current; where that fails, remove it and say what is lost.

    For another system, a failure is an error.
    """
    if is_current(library):
        return True
    library.unlink(missing_ok=True)
    if target is not None:
        build(library, cross_compiler(target), target.machine)
        return True
    try:
        build(library)
    except BuildError as error:
        reason, _, details = str(error).partition("\n")
        print(f"spaceport: installed without native operators: {reason}. {LOST}.", file=sys.stderr)
        print(details, file=sys.stderr, flush=True)
        return False
    return True


def _compiler_flags(command: Sequence[str], library: Path) -> list[str]:
    flags = [*_FLAGS, *(_GCC_FLAGS if _is_gcc(command) else _CLANG_FLAGS)]
    if library.suffix != ".dll":
        flags.append("-fPIC")
    if _is_zig(command):
        flags.extend(_ZIG_FLAGS)
    return flags


def _is_zig(command: Sequence[str]) -> bool:
    return any(Path(part).stem in ("zig", "ziglang") for part in command)


def _is_gcc(command: Sequence[str]) -> bool:
    if _is_zig(command):
        return False
    ran = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return "Free Software Foundation" in ran.stdout


def _run(command: Sequence[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        said = ran.stderr.strip().splitlines()
        reason = next((line for line in said if "error" in line), f"exit code {ran.returncode}")
        raise BuildError(f"{command[0]} failed: {reason}\n{shlex.join(command)}\n{ran.stderr[-4000:]}")
    if ran.stderr.strip():
        print(ran.stderr, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", nargs="?", type=Path, default=SOURCES / library_name(), help="File to write.")
    parser.add_argument("--if-possible", action="store_true", help="Only if it is not current; a failure is no error.")
    parser.add_argument("--target", choices=TARGETS, help="Another system, for which ziglang compiles.")
    given = parser.parse_args()
    if given.if_possible:
        build_if_possible(given.library)
        return
    try:
        if target := TARGETS.get(given.target):
            build(given.library, cross_compiler(target), target.machine)
        else:
            build(given.library)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
