"""Machines: the CPUs that are emulated here, what each needs, and the command that runs Python on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.paths import package
from support.programs import Missing, install, output_of

_HERE = Path(__file__).parent
# onnxruntime reads the kind of an ARM CPU here and crashes without it: qemu 7 shows the host's file.
_ARM_CPU = """processor\t: {number}
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
_DEBIAN = "python3.11,libpython3.11,libstdc++6,libgomp1,zlib1g,libexpat1"
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
_PACKAGES = ("numpy", "onnxruntime", "tokenizers", "jinja2", "click", "rich")


@dataclass(frozen=True)
class Machine:
    """A CPU that this machine can imitate."""

    name: str
    description: str
    prepare: Callable[[Path], None]  # downloads and builds what it needs, in its folder
    command: Callable[[Path, Sequence[str]], tuple[list[str], dict[str, str]]]  # of Python with these arguments
    emulated: bool = True  # instruction by instruction, so that times mean nothing


def _program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Missing(f"got no {name} on the PATH, expected Debian's package {package}: apt-get install {package}")
    return found


def _site() -> Path:
    """The packages of this environment."""
    return Path(next(path for path in sys.path if path.endswith("site-packages")))


def _qemu_x86(cpu: str) -> Callable[[Path, Sequence[str]], tuple[list[str], dict[str, str]]]:
    def command(folder: Path, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        program = _program("qemu-x86_64", "qemu-user")
        python = str(Path(sys.executable).resolve())
        return [program, "-cpu", cpu, python, *arguments], {"PYTHONPATH": f"{_site()}:{package()}"}

    return command


def _prepare_avx2(folder: Path) -> None:
    """Build a copy of onnxruntime whose questions to the CPU are answered without AVX512, AVX-VNNI and AMX."""
    copied = folder / "site" / "onnxruntime"
    if (folder / "hide_avx512.so").exists():
        return
    source = _site() / "onnxruntime"
    shutil.rmtree(folder / "site", ignore_errors=True)
    shutil.copytree(source, copied)
    (library,) = (copied / "capi").glob("onnxruntime_pybind11_state*.so")
    dump = _program("objdump", "binutils")
    sections = output_of([dump, "-h", library])
    (address, offset) = re.findall(r" \.text +[0-9a-f]+ +([0-9a-f]+) +[0-9a-f]+ +([0-9a-f]+)", sections)[0]
    code = bytearray(library.read_bytes())
    listing = output_of([dump, "-d", "-j", ".text", "--no-show-raw-insn", library])
    for found in re.findall(r"^ *([0-9a-f]+):\s+cpuid", listing, re.M):
        at = int(found, 16) - int(address, 16) + int(offset, 16)
        if code[at : at + 2] != b"\x0f\xa2":
            raise Missing(f"got other code than cpuid at {found} of {library.name}: update tests/cpus")
        code[at : at + 2] = b"\x0f\x0b"  # ud2
    library.write_bytes(code)
    compiler = _program("cc", "gcc")
    output_of([compiler, "-O2", "-shared", "-fPIC", "-o", folder / "hide_avx512.so", _HERE / "hide_avx512.c", "-ldl"])


def _run_avx2(folder: Path, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Python processes see the kernels of an AVX2 CPU."""
    settings = {"LD_PRELOAD": folder / "hide_avx512.so", "PYTHONPATH": folder / "site"}
    return [sys.executable, *arguments], {name: str(path.resolve()) for name, path in settings.items()}


def _prepare_arm(folder: Path) -> None:
    """Unpack Debian's Python for ARM64, and install the runtime's packages for it."""
    root, site = folder / "root", folder / "site"
    if not (root / "usr" / "bin" / "python3.11").exists():
        archive = folder / "root.tar"
        create = _program("mmdebstrap", "mmdebstrap")
        output_of([create, "--variant=extract", "--architectures=arm64", f"--include={_DEBIAN}", "bookworm", archive])
        root.mkdir(exist_ok=True)
        subprocess.run(["tar", "-xf", archive, "-C", root, "--exclude=./dev"], capture_output=True, check=False)
        archive.unlink()
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc" / "cpuinfo").write_text("".join(_ARM_CPU.format(number=number) for number in range(2)))
    if not (site / "onnxruntime").exists():
        platforms = [option for name in _PLATFORMS for option in ("--platform", name)]
        abis = ("--abi", "cp311", "--abi", "abi3", "--abi", "none")
        install(site, "--python-version", "3.11", "--implementation", "cp", *abis, *platforms, *_PACKAGES)


def _run_arm(folder: Path, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    program, root = _program("qemu-aarch64", "qemu-user"), folder / "root"
    python = root / "usr" / "bin" / "python3.11"
    if not python.exists():
        raise Missing(f"got no {python}, expected a root of Debian for ARM64: make cpus-setup")
    # an absolute path is tried inside the root first, so a program there need not exist outside it
    return [program, "-cpu", "neoverse-n1", "-L", str(root), str(python), *arguments], {
        "PYTHONPATH": f"{(folder / 'site').resolve()}:{package()}"
    }


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("avx2", "AVX2 without VNNI, at full speed", _prepare_avx2, _run_avx2, emulated=False),
        Machine("haswell", "AVX2 without VNNI, emulated", lambda folder: None, _qemu_x86("Haswell")),
        Machine("nehalem", "SSE4.2 without AVX, emulated", lambda folder: None, _qemu_x86("Nehalem")),
        Machine("aarch64", "ARM64 with 8-bit dot products, emulated", _prepare_arm, _run_arm),
    )
}


def environment_for(own: dict[str, str], cache: Path) -> dict[str, str]:
    """The variables of a process on a machine: measurements of other CPUs stay apart from the user's."""
    return {**os.environ, **own, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
