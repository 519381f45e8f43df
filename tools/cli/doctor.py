"""`spaceport doctor`: which backends, devices and extras are here, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from spaceport import __version__
from spaceport.graphs.contract.faults import MissingDependency
from spaceport.graphs.contract.manifest import FLAVOURS
from spaceport.runtime.backends import BACKENDS, clashing, require_device
from spaceport.runtime.backends.device import NoGpu, gpu
from spaceport.tools.cli.options import json_option
from spaceport.tools.terminal.screen import show_json, show_table, size

# package -> the extra that brings it, and what it is for
PACKAGES = {
    "numpy": ("", "runtime"),
    "tokenizers": ("", "runtime"),
    "jinja2": ("", "chat templates"),
    "llguidance": ("grammar", "texts that fit a form"),
    "onnxruntime": ("cpu", "runs bundles on the CPU"),
    "onnxruntime-gpu": ("gpu", "runs bundles on NVIDIA GPUs"),
    "tensorrt-cu13": ("tensorrt", "builds and runs TensorRT engines"),
    "tensorrt-rtx": ("tensorrt-rtx", "builds and runs TensorRT-RTX engines"),
    "torch": ("export", "export and reference"),
    "transformers": ("export", "opens checkpoints"),
    "onnx": ("export", "writes graphs"),
    "onnxscript": ("export", "writes graphs"),
    "safetensors": ("export", "opens weights"),
    "polygraphy": ("export", "compares engines"),
    "accelerate": ("tune", "trains on one processor or many"),
    "peft": ("tune", "low-rank adapters"),
    "matplotlib": ("tune", "plots"),
}


# argv: a backend. Prints what it runs with, or ends with why it cannot.
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
    if lacking := preload():
        sys.exit(without_cuda(lacking))
providers = f", {', '.join(module.get_available_providers())}" if name.startswith("onnxruntime") else ""
print(f"{BACKENDS[name].module} {module.__version__}{providers}")
"""
# argv: a flavour. Prints the version of the library and, a line each, the GPUs that it builds for anywhere.
BUILDER = """
import sys
from spaceport.exporter.tensorrt.to_tensorrt import open_library
from spaceport.graphs.contract.faults import MissingDependency
try:
    library = open_library(sys.argv[1])
except MissingDependency as error:
    sys.exit(str(error))
print(library.version, *library.targets, sep="\\n")
"""


@click.command("doctor")
@json_option("it")
def command(as_json: bool) -> None:
    """Show which backends, devices and packages are here, and the command that installs what is missing."""
    found = survey()
    if as_json:
        show_json(found)
        return
    show_table("", ("what", "value"), list(found["system"].items()))
    rows = [(p["package"], p["version"] or "-", p["for"], p["install"] or "") for p in found["packages"]]
    show_table("\nPackages", ("package", "version", "for", "to install it"), rows)
    show_table(
        "\nBackends",
        ("backend", "ready", "why"),
        [(b["backend"], "yes" if b["ready"] else "no", b["why"]) for b in found["backends"]],
    )
    builders = [(b["flavour"], b["version"] or "-", ", ".join(b["targets"]) or b["why"]) for b in found["builders"]]
    show_table("\nEngines that can be built here", ("flavour", "version", "for"), builders)
    for problem in found["problems"]:
        click.echo(f"\nproblem: {problem}")


def survey() -> dict[str, Any]:
    """Everything that doctor shows."""
    versions = {package: _version(package) for package in PACKAGES}
    packages = [
        {
            "package": package,
            "version": versions[package],
            "for": purpose,
            "install": _install(package, versions),
        }
        for package, (_, purpose) in PACKAGES.items()
    ]
    system = {
        "spaceport": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor threads": os.cpu_count() or 1,
        "NVIDIA GPU": _gpu(),
        "NVIDIA driver": _driver() or "none found",
    }
    clash = clashing()
    return {
        "system": system,
        "packages": packages,
        "backends": [*map(_backend, BACKENDS), _torch(versions)],
        "builders": [*map(_builder, FLAVOURS)],
        "problems": [] if clash is None else [f"{clash}, then install one of them"],
    }


def _install(package: str, versions: dict[str, str | None]) -> str | None:
    """The command that brings a package; nothing if it is here, or what it does is."""
    extra = PACKAGES[package][0]
    command = f"pip install 'spaceport[{extra}]'" if extra else "pip install spaceport"
    if versions[package] or (package == "onnxruntime" and versions["onnxruntime-gpu"]):
        return None
    if package == "onnxruntime-gpu" and versions["onnxruntime"]:  # side by side they overwrite each other
        return f"pip uninstall onnxruntime, then {command}"
    return command


def _backend(name: str) -> dict[str, Any]:
    try:
        require_device(name)
    except MissingDependency as error:
        return {"backend": name, "ready": False, "why": str(error)}
    ready, said = _probe(PROBE, name)
    return {"backend": name, "ready": ready, "why": ", ".join(said)}


def _torch(versions: dict[str, str | None]) -> dict[str, Any]:
    exports = all(versions[package] for package in ("torch", "transformers", "onnx", "onnxscript", "safetensors"))
    why = "PyTorch reference, with --checkpoint" if exports else "packages are missing: pip install 'spaceport[export]'"
    return {"backend": "torch", "ready": exports, "why": why}


def _builder(flavour: str) -> dict[str, Any]:
    ready, said = _probe(BUILDER, flavour)
    if not ready:
        return {"flavour": flavour, "version": None, "targets": [], "why": said[-1]}
    version, *targets = said
    try:
        here = gpu().target
        targets = [*targets, *(() if here in targets else (here,))]
    except NoGpu as error:
        return {
            "flavour": flavour,
            "version": version,
            "targets": targets,
            "why": f"only where there is a GPU: {error}",
        }
    return {"flavour": flavour, "version": version, "targets": targets, "why": ""}


def _probe(code: str, argument: str) -> tuple[bool, list[str]]:
    """What a program of its own prints: a broken build may take its process down with it."""
    command = [sys.executable, "-c", code, argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        return True, done.stdout.strip().splitlines()
    lines = done.stderr.strip().splitlines()
    return False, [lines[-1] if lines else f"its process ends with exit code {done.returncode}"]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu() -> str:
    try:
        found = gpu()
    except NoGpu as error:
        return f"none: {error}"
    return f"{found.name}, {found.target}, {size(found.memory)}"


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
