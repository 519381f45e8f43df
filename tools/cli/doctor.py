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
from spaceport.tools.cli.screen import show_json, show_table

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


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
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
            "install": None
            if versions[package]
            else f"pip install 'spaceport[{extra}]'"
            if extra
            else "pip install spaceport",
        }
        for package, (extra, purpose) in PACKAGES.items()
    ]
    gpu = _gpu()
    system = {
        "spaceport": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor threads": os.cpu_count() or 1,
        "NVIDIA GPU": gpu or "none found",
    }
    problems = []
    if versions["onnxruntime"] and versions["onnxruntime-gpu"]:
        problems.append(
            "onnxruntime and onnxruntime-gpu are one module and overwrite each other: "
            "pip uninstall onnxruntime onnxruntime-gpu, then install one of them"
        )
    return {"system": system, "packages": packages, "backends": _backends(versions), "problems": problems}


def _backends(versions: dict[str, str | None]) -> list[dict[str, Any]]:
    ort = versions["onnxruntime"] or versions["onnxruntime-gpu"]
    opens, why = False, "onnxruntime is not installed: pip install 'spaceport[cpu]'"
    if ort:
        opens, why = _probe("import onnxruntime as o; print(o.__version__, ', '.join(o.get_available_providers()))")
    exports = all(versions[package] for package in ("torch", "transformers", "onnx", "onnxscript", "safetensors"))
    torch_why = (
        "PyTorch reference, with --checkpoint" if exports else "packages are missing: pip install 'spaceport[export]'"
    )
    return [
        {"backend": "onnxruntime", "ready": opens, "why": why},
        {"backend": "torch", "ready": exports, "why": torch_why},
    ]


def _probe(code: str) -> tuple[bool, str]:
    """Import in a process of its own: a broken build may take its process down with it."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        return True, done.stdout.strip()
    lines = done.stderr.strip().splitlines()
    return False, f"installed, but does not import: {lines[-1] if lines else f'exit code {done.returncode}'}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().replace("\n", "; ") or None if done.returncode == 0 else None
