"""`spaceport doctor`: backends, devices and packages of this machine, and how to install missing ones."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import click

from spaceport import __version__
from spaceport.graphs.contract.faults import MissingDependency
from spaceport.graphs.contract.installation import install_command, installed_version
from spaceport.kernels.build import INSTALL_COMPILER, SOURCES
from spaceport.runtime.backends import BACKENDS, clashing, require_device
from spaceport.runtime.backends.machine import NoGpu, cpu_class, cpu_name, gpu, instruction_sets, no_gpu, usable_cpus
from spaceport.runtime.backends.private_files import cache_folder, problem_of, state_folder
from spaceport.tools.cli import MISSING, OK
from spaceport.tools.cli.bundle_cache import bundles_folder, cached_bundles
from spaceport.tools.cli.options import json_option
from spaceport.tools.terminal.screen import show_json, show_table, size

# package -> the extra that installs it, and what it is used for
PACKAGES = {
    "numpy": ("", "runtime"),
    "tokenizers": ("", "runtime"),
    "jinja2": ("", "chat templates"),
    "llguidance": ("grammar", "constrained decoding"),
    "onnxruntime": ("cpu", "backend onnxruntime (CPU)"),
    "onnxruntime-gpu": ("gpu", "backend onnxruntime-cuda (NVIDIA GPU)"),
    "tensorrt-cu13": ("tensorrt", "backend tensorrt (NVIDIA GPU)"),
    "tensorrt-rtx": ("tensorrt-rtx", "backend tensorrt-rtx (NVIDIA GPU)"),
    "torch": ("export", "export, PyTorch reference"),
    "transformers": ("export", "checkpoints"),
    "onnx": ("export", "ONNX graphs"),
    "onnxscript": ("export", "ONNX graphs"),
    "safetensors": ("export", "weights"),
    "gguf": ("gguf", "GGUF files"),
    "polygraphy": ("check", "comparison of engines"),
    "accelerate": ("tune", "training"),
    "peft": ("tune", "low-rank adapters"),
}
_FOR_GPUS = ("gpu", "tensorrt", "tensorrt-rtx")  # extras


# argv: a backend. Prints its library and version, or fails with the reason why it is not ready.
PROBE = """
import sys
from spaceport.graphs.contract.faults import MissingDependency
from spaceport.runtime.backends import BACKENDS, require_module
name = sys.argv[1]
try:
    require_module(name)
except MissingDependency as error:
    sys.exit(str(error))
module = sys.modules[BACKENDS[name].module]
if name == "onnxruntime-cuda":
    from spaceport.runtime.backends.on_cuda import preload, without_cuda
    if missing := preload():
        sys.exit(without_cuda(missing))
providers = f", {', '.join(module.get_available_providers())}" if name.startswith("onnxruntime") else ""
print(f"{BACKENDS[name].module} {module.__version__}{providers}")
"""
# Prints the native operators: path, version, instruction set in use, those of this processor; or a reason.
NATIVE = """
import json, sys
from spaceport.kernels import native_library as native
path = native.library_path()
if path is None:
    print("null")
elif (reason := native.fault(path)) is not None:
    sys.exit(reason)
else:
    names = {"instruction_set": native.instruction_set(path), "instruction_sets": native.instruction_sets(path)}
    print(json.dumps({"library": str(path), "version": native.version(path)} | names))
"""


@click.command("doctor")
@json_option("the result")
def command(as_json: bool) -> int:
    """Show the backends, devices and packages of this machine and the commands that install missing packages.

    The exit code is 5 if something is wrong: a problem is found, or no backend is ready.
    """
    found = survey()
    if as_json:
        show_json(found)
    else:
        show(found)
    ready = any(backend["ready"] for backend in found["backends"])
    return OK if ready and not found["problems"] else MISSING


def show(found: Mapping[str, Any]) -> None:
    """Print what was found."""
    show_table("", ("property", "value"), list(found["system"].items()))
    rows = [tuple(package.values()) for package in found["packages"]]
    show_table("\nPackages", ("package", "version", "used for", "install with"), rows)
    rows = [(one["backend"], "yes" if one["ready"] else "no", one["why"]) for one in found["backends"]]
    show_table("\nBackends", ("backend", "ready", "why"), rows)
    for problem in found["problems"]:
        click.echo(f"\nproblem: {problem}")


def survey() -> dict[str, Any]:
    """Everything that doctor shows, as JSON data."""
    versions = {package: installed_version(package) for package in PACKAGES}
    packages = [
        {"package": package, "version": versions[package], "for": purpose, "install": _install(package, versions)}
        for package, (_, purpose) in PACKAGES.items()
    ]
    system = {
        "spaceport": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "CPUs": usable_cpus(),
        "CPU": f"{cpu_name()}: {cpu_class()}",
        "instruction sets": ", ".join(instruction_sets()) or "unknown",
        "NVIDIA GPU": _gpu(),
        "NVIDIA driver": _driver() or "none found",
        "exported bundles": _exported(),
    }
    native, fault = _native()
    system["native operators"] = fault or _in_words(native)
    problems = (clashing(), fault, problem_of(state_folder()), problem_of(cache_folder()))
    return {
        "system": system,
        "packages": packages,
        "native_operators": native,
        "backends": [*map(_backend, BACKENDS)],
        "problems": [problem for problem in problems if problem is not None],
    }


def _native() -> tuple[dict[str, Any] | None, str | None]:
    """The library of native operators, and why it cannot be used; two times None if there is no library."""
    ready, said = _probe(NATIVE, "")
    return (json.loads(said[-1]), None) if ready else (None, said[-1])


def _in_words(native: Mapping[str, Any] | None) -> str:
    if native is None:
        again = f": {install_command()}" if (SOURCES / "operators.cpp").is_file() else ""
        return f"none, formats for them are slower: {INSTALL_COMPILER}, then install Spaceport from its sources{again}"
    others = [name for name in native["instruction_sets"] if name != native["instruction_set"]]
    also = f" (also {', '.join(others)}: SPACEPORT_KERNELS)" if others else ""
    return f"version {native['version']}, {native['instruction_set']}{also}"


def _install(package: str, versions: dict[str, str | None]) -> str | None:
    """The command that installs a package; nothing if it is installed, another one replaces it, or it needs a GPU."""
    extra, others = PACKAGES[package][0], {"onnxruntime": "onnxruntime-gpu", "onnxruntime-gpu": "onnxruntime"}
    if versions[package] or versions.get(others.get(package, "")):
        return None
    return None if extra in _FOR_GPUS and no_gpu() else install_command(extra)


def _backend(name: str) -> dict[str, Any]:
    try:
        require_device(name)
    except MissingDependency as error:
        return {"backend": name, "ready": False, "why": str(error)}
    ready, said = _probe(PROBE, name)
    return {"backend": name, "ready": ready, "why": ", ".join(said)}


def _probe(code: str, argument: str) -> tuple[bool, list[str]]:
    """Run code in a new process, which a broken library may crash; whether it succeeded, and its output."""
    command = [sys.executable, "-c", code, argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        return True, done.stdout.strip().splitlines()
    lines = done.stderr.strip().splitlines()
    return False, [lines[-1] if lines else f"the process crashed with exit code {done.returncode}"]


def _gpu() -> str:
    try:
        found = gpu()
    except NoGpu as error:
        return f"none: {error}"
    return f"{found.name}, {found.target}, {size(found.memory)}"


def _exported() -> str:
    """The bundles that commands have exported from checkpoints, and how to remove them."""
    files = [file for bundle in cached_bundles() for file in bundle.iterdir()]
    total, folder = size(sum(file.stat().st_size for file in files)), bundles_folder()
    return f"{total} in {folder}, which may be deleted" if files else f"none in {folder}"


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] or None if done.returncode == 0 else None
