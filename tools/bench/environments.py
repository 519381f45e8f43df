"""Environments: other runtimes, each with a virtual environment and its converted models; only their setup downloads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.bundle import open_bundle

TORCH = "torch==2.13.0"  # a CPU build satisfies it; an open range may fetch gigabytes of CUDA libraries
GENAI = ("onnxruntime-genai==0.18.0", "onnxruntime==1.31.1")
CTRANSLATE2 = "ctranslate2==4.8.5"
OPENVINO_TOKENIZERS = "openvino-tokenizers==2026.4.1.0"
# Environment -> requirements. `convert` converts checkpoints for the others.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "onnxruntime-genai": GENAI,
    "openvino-genai": ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", OPENVINO_TOKENIZERS),
    "ctranslate2": (CTRANSLATE2,),
    "transformers": (TORCH, "transformers==5.23.0", "accelerate==1.15.0", "safetensors==0.8.0"),
    "llama.cpp": ("llama-cpp-python==0.3.36",),
    "llama.cpp-server": ("llama-cpp-python[server]==0.3.36",),
    "convert": (
        *(TORCH, "transformers==5.5.4", "accelerate==1.15.0", "safetensors==0.8.0", "sentencepiece==0.2.3"),
        *(*GENAI, "onnx==1.23.2", "onnx-ir==1.1.0"),
        *("optimum-intel==2.2.0", "nncf==3.4.0", OPENVINO_TOKENIZERS),
        CTRANSLATE2,
    ),
}
# Uninstalled afterwards: no text model needs it, and a build for another torch version breaks transformers.
UNWANTED: dict[str, tuple[str, ...]] = {"convert": ("torchvision",)}
# Environment variables of an installation. The AMX kernels of this llama.cpp crash (segmentation fault in llama_decode, on
# an Emerald Rapids CPU, Q4_1); all other extensions of the CPU are used.
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
_SAMPLES = 64  # blocks per weight file that are hashed
_BLOCK = 1 << 16
_RECORD = "spaceport-pins.json"
SPACEPORT = "spaceport"
OnProgress = Callable[[str], None]
BUNDLES = ("float32", "int8", "int4")
_SPACEPORT = "import sys; from spaceport.tools.cli import run; sys.exit(run(sys.argv[1:]))"
_TAIL = 300  # characters of a failed command's output


BUILD: dict[str, dict[str, str]] = {
    name: {"CMAKE_ARGS": f"-DCMAKE_C_FLAGS='{_NO_AMX}' -DCMAKE_CXX_FLAGS='{_NO_AMX}'"}
    for name in ("llama.cpp", "llama.cpp-server")
}


class Environments:
    """The virtual environments `environments/NAME` below one folder, and the logs beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def environment(self, name: str) -> Path:
        """Folder of a virtual environment."""
        return self.folder / "environments" / name

    def python(self, name: str) -> Path:
        """Python interpreter of a virtual environment."""
        return self.environment(name) / "bin" / "python"

    def installed(self, name: str) -> bool:
        """Whether the environment exists with the pinned versions."""
        record = self.environment(name) / _RECORD
        return record.is_file() and json.loads(record.read_text("utf-8")) == list(ENVIRONMENTS[name])

    def record_installed(self, name: str) -> None:
        """Record that an environment is complete."""
        (self.environment(name) / _RECORD).write_text(json.dumps(ENVIRONMENTS[name]) + "\n", "utf-8")

    @property
    def logs(self) -> Path:
        """Folder of the output of installations, conversions and workers."""
        return self.folder / "logs"


class WorkFolder(Environments):
    """Environments, and converted models in `models/CHECKPOINT-FINGERPRINT/NAME`."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        super().__init__(folder)
        if not (checkpoint / "config.json").is_file():
            raise InputFault(f"{checkpoint}: has no config.json: expected a Hugging Face checkpoint folder")
        self.checkpoint = checkpoint.absolute()

    @cached_property
    def models(self) -> Path:
        """Folder of the models converted from this checkpoint."""
        return self.folder / "models" / f"{self.checkpoint.name}-{fingerprint(self.checkpoint)[:12]}"

    def model(self, name: str) -> Path:
        """Folder of one converted model."""
        return self.models / name


def fingerprint(checkpoint: Path) -> str:
    """SHA-256 of the config and of samples of each weight file: fast, and different for every checkpoint."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for path in sorted(checkpoint.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


ADAPTERS = Path(__file__).parent / "adapters"


@dataclass(frozen=True)
class Peer:
    """Another runtime with one weight format."""

    name: str  # name in --peers and in the tables
    environment: str  # key in ENVIRONMENTS
    adapter: str  # file below adapters/
    models: tuple[str, ...]  # folders of converted models; empty: the checkpoint itself, or --gguf
    settings: str  # settings, for the tables
    options: dict[str, Any] = field(default_factory=dict)  # further options of the adapter


PEERS = (
    Peer(
        "onnxruntime-genai int4",
        "onnxruntime-genai",
        "on_genai.py",
        ("genai-int4-pruned", "genai-int4"),
        "builder's int4, accuracy level 4; prune_lm_head except for steps of several rows",
    ),
    Peer(
        "openvino-genai int8",
        "openvino-genai",
        "on_openvino.py",
        ("openvino-int8",),
        "optimum-cli --weight-format int8",
    ),
    Peer(
        "openvino-genai int4",
        "openvino-genai",
        "on_openvino.py",
        ("openvino-int4",),
        "optimum-cli --weight-format int4",
    ),
    Peer(
        "ctranslate2 int8",
        "ctranslate2",
        "on_ctranslate2.py",
        ("ctranslate2-int8",),
        "converter's int8, whole prompt in one call",
        {"compute_type": "int8"},
    ),
    Peer("transformers float32", "transformers", "on_transformers.py", (), "sdpa attention, DynamicCache"),
    Peer("llama.cpp", "llama.cpp", "on_llama_cpp.py", (), "the file of --gguf, logits of all rows"),
)


@dataclass(frozen=True)
class ComparedRuntime:
    """One row of the tables: a runtime with a model, ready to start."""

    name: str
    python: Path  # Python interpreter of its environment
    adapter: Path
    model: Path
    settings: str
    options: dict[str, Any] = field(default_factory=dict)
    is_bundle: bool = False


@dataclass(frozen=True)
class Skipped:
    """A subject that is not measured."""

    name: str
    reason: str  # why, and what to do about it


def bundle_subjects(bundles: Sequence[Path]) -> list[ComparedRuntime]:
    """One subject per bundle, named after its weight format."""
    subjects: list[ComparedRuntime] = []
    for path in bundles:
        manifest = open_bundle(path).manifest
        weights = manifest.signature.dtype if manifest.weights == "same" else manifest.weights
        name = f"{SPACEPORT} {weights}"
        if any(subject.name == name for subject in subjects):
            name = f"{name} ({path.name})"
        if any(subject.name == name for subject in subjects):
            raise OptionFault(f"--bundle {path}: given twice, or with the same name and weights as another: rename one")
        settings = f"{path.name}, plain decoding"
        subjects.append(
            ComparedRuntime(name, Path(sys.executable), ADAPTERS / "on_spaceport.py", path, settings, is_bundle=True)
        )
    return subjects


def peers_named(names: str, peers: Sequence[Peer] = PEERS) -> tuple[Peer, ...]:
    """The peers in a list such as `openvino-genai int8,ctranslate2`; a runtime's name selects all its formats."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {peer.name for peer in peers} | {peer.environment for peer in peers}
    if unknown := [name for name in wanted if name not in known]:
        raise OptionFault(f"--peers names {unknown[0]!r}: expected any of {', '.join(sorted(known))}, with commas")
    return tuple(peer for peer in peers if peer.name in wanted or peer.environment in wanted)


def peer_subject(peer: Peer, work: WorkFolder, gguf: Path | None) -> ComparedRuntime | Skipped:
    """The subject of a peer, or the reason why it cannot be measured."""
    reads_gguf = peer.environment == "llama.cpp"
    if reads_gguf and gguf is None:
        return Skipped(peer.name, "no GGUF file: add --gguf FILE of the same model")
    python = work.python(peer.environment)
    if not work.installed(peer.environment):
        return Skipped(peer.name, f"no environment with the pinned versions at {python.parent.parent}: add --setup")
    models = [work.model(name) for name in peer.models] or [gguf if reads_gguf and gguf else work.checkpoint]
    if missing := [model for model in models if not model.exists()]:
        return Skipped(peer.name, f"no converted model at {missing[0]}: add --setup")
    name = f"{peer.name} {models[0].stem.rpartition('.')[2]}" if reads_gguf else peer.name
    options = {**peer.options, **({"rows_model": str(models[1])} if len(models) > 1 else {})}
    return ComparedRuntime(name, python, ADAPTERS / peer.adapter, models[0], peer.settings, options)


class CommandFailed(RuntimeError):
    """A command of the setup failed; the message has the end of its output and the path of the log."""


def set_up(work: WorkFolder, peers: Sequence[Peer], on_progress: OnProgress) -> list[Skipped]:
    """Create missing environments and models, and return the peers whose setup failed."""
    failed = []
    for peer in peers:
        try:
            create_environment(work, peer.environment, on_progress)
            for model in peer.models:
                if not work.model(model).exists():
                    create_environment(work, "convert", on_progress)
                    on_progress(f"convert {work.checkpoint.name} to {model}")
                    convert(work, model)
        except CommandFailed as failure:
            failed.append(Skipped(peer.name, f"setup failed: {failure}"))
    return failed


def create_environment(work: Environments, name: str, on_progress: OnProgress) -> None:
    """Create an environment with the pinned versions, from the package index that pip is configured for."""
    if work.installed(name):
        return
    on_progress(f"create the environment {name}")
    folder, python = work.environment(name), str(work.python(name))
    venv.create(folder, with_pip=True, clear=True)
    log = work.logs / f"install-{name}.log"
    fresh = ["--no-cache-dir"] if name in BUILD else []  # a cached wheel may have been built with other variables
    run_logged([python, "-m", "pip", "install", *fresh, *ENVIRONMENTS[name]], log, BUILD.get(name))
    for package in UNWANTED.get(name, ()):
        run_logged([python, "-m", "pip", "uninstall", "--yes", package], log)
    work.record_installed(name)


def convert(work: WorkFolder, model: str) -> None:
    """Convert one model; a failed conversion leaves nothing behind."""
    target, part = work.model(model), work.model(f"{model}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    run_logged(conversion(model, work.python("convert"), work.checkpoint, part), work.logs / f"convert-{model}.log")
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
            run_logged(command, work.logs / f"export-{name}.log")
        except CommandFailed as failure:
            failed.append(Skipped(f"spaceport {name}", f"setup failed: {failure}"))
    return failed


def run_logged(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
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
