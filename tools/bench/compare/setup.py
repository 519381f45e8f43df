"""Setup: the environments and converted models of each peer; the only part that downloads packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spaceport.tools.bench.compare.pins import BUILD, ENVIRONMENTS, UNWANTED
from spaceport.tools.bench.compare.subjects import Peer, Skipped
from spaceport.tools.bench.compare.work_folder import Environments, WorkFolder

OnProgress = Callable[[str], None]
BUNDLES = ("float32", "int8", "int4")
_SPACEPORT = "import sys; from spaceport.tools.cli import run; sys.exit(run(sys.argv[1:]))"
_TAIL = 300  # characters of a failed command's output


class CommandFailed(RuntimeError):
    """A command of the setup failed; the message has the end of its output and the path of the log."""


def set_up(work: WorkFolder, peers: Sequence[Peer], on_progress: OnProgress) -> list[Skipped]:
    """Create missing environments and models, and return the peers whose setup failed."""
    failed = []
    for peer in peers:
        try:
            create(work, peer.environment, on_progress)
            for model in peer.models:
                if not work.model(model).exists():
                    create(work, "convert", on_progress)
                    on_progress(f"convert {work.checkpoint.name} to {model}")
                    convert(work, model)
        except CommandFailed as failure:
            failed.append(Skipped(peer.name, f"setup failed: {failure}"))
    return failed


def create(work: Environments, name: str, on_progress: OnProgress) -> None:
    """Create an environment with the pinned versions, from the package index that pip is configured for."""
    if work.installed(name):
        return
    on_progress(f"create the environment {name}")
    folder, python = work.environment(name), str(work.python(name))
    venv.create(folder, with_pip=True, clear=True)
    log = work.logs / f"install-{name}.log"
    fresh = ["--no-cache-dir"] if name in BUILD else []  # a cached wheel may have been built with other variables
    run([python, "-m", "pip", "install", *fresh, *ENVIRONMENTS[name]], log, BUILD.get(name))
    for package in UNWANTED.get(name, ()):
        run([python, "-m", "pip", "uninstall", "--yes", package], log)
    work.record_installed(name)


def convert(work: WorkFolder, model: str) -> None:
    """Convert one model; a failed conversion leaves nothing behind."""
    target, part = work.model(model), work.model(f"{model}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    run(conversion(model, work.python("convert"), work.checkpoint, part), work.logs / f"convert-{model}.log")
    if model.startswith("ctranslate2"):
        give_begin_token(part)
    part.rename(target)


def conversion(model: str, python: Path, checkpoint: Path, target: Path) -> list[str]:
    """The command that converts a checkpoint, as documented by the peer."""
    runtime, format, *variant = model.split("-")
    source, output = str(checkpoint), str(target)
    if runtime == "genai":
        builder = [str(python), "-m", "onnxruntime_genai.models.builder", "-m", source, "-i", source, "-o", output]
        pruned = ["--extra_options", "prune_lm_head=true"] if variant else []  # computes logits of the last row only
        return [*builder, "-p", format, "-e", "cpu", *pruned]
    if runtime == "openvino":
        export = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", source]
        group = ["--group-size", str(group_size(checkpoint))] if format == "int4" else []
        return [*export, "--task", "text-generation-with-past", "--weight-format", format, *group, output]
    converter = str(python.parent / "ct2-transformers-converter")
    return [converter, "--model", source, "--output_dir", output, "--quantization", format]


def group_size(checkpoint: Path) -> int:
    """Weights per quantization scale: optimum's default of 128, or less if it does not divide the checkpoint's widths."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    widths = [config[name] for name in ("hidden_size", "intermediate_size") if name in config]
    return next((size for size in (128, 64, 32) if all(width % size == 0 for width in widths)), 16)


def give_begin_token(folder: Path) -> None:
    """Write the end token as the missing begin token: the converter writes null, which the loader refuses."""
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    if config.get("bos_token") is None:
        path.write_text(json.dumps({**config, "bos_token": config["eos_token"]}, indent=2) + "\n", "utf-8")


def export_bundles(work: WorkFolder, on_progress: OnProgress) -> list[Skipped]:
    """Export missing bundles of the checkpoint in each weight format, and return those that failed."""
    failed = []
    for name in BUNDLES:
        target = work.model(f"spaceport-{name}")
        if target.exists():
            continue
        on_progress(f"export {work.checkpoint.name} as {name}")
        weights = "same" if name == "float32" else name
        command = [sys.executable, "-c", _SPACEPORT, "export", str(work.checkpoint), str(target), "--weights", weights]
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            run(command, work.logs / f"export-{name}.log")
        except CommandFailed as failure:
            failed.append(Skipped(f"spaceport {name}", f"setup failed: {failure}"))
    return failed


def run(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Run a command with its output in a log file; raises CommandFailed with the end of the output."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **(variables or {})}
    if command[0] != sys.executable:
        environment.pop("PYTHONPATH", None)
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, check=False
            ).returncode
        except OSError as error:
            raise CommandFailed(f"{command[0]}: {error.strerror}") from error
    if code != 0:
        end = " ".join(log.read_text("utf-8", "replace")[-_TAIL:].split())
        raise CommandFailed(f"exit code {code}: … {end} (all of it: {log})")
