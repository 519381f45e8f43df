"""Rivals: other runtimes, each with an environment, converted models and a worker process; only their setup downloads."""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.bench.machine import SPACEPORT_COMMAND, ProcessFailed, Resources, last_lines, resources_of

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
BUILD: dict[str, dict[str, str]] = {
    name: {"CMAKE_ARGS": f"-DCMAKE_C_FLAGS='{_NO_AMX}' -DCMAKE_CXX_FLAGS='{_NO_AMX}'"}
    for name in ("llama.cpp", "llama.cpp-server")
}
_SAMPLES = 64  # blocks per weight file that are hashed
_BLOCK = 1 << 16
_RECORD = "spaceport-pins.json"
_ADAPTERS = Path(__file__).parent / "adapters"
_SPACEPORT = f"{_ADAPTERS / 'on_spaceport.py'}:Spaceport"
BUNDLES = ("float32", "int8", "int4")
_TAIL = 300  # characters of a failed command's output
_PAUSE = 0.05  # seconds; a process that uses no CPU time meanwhile is idle
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_BFLOAT16 = ("avx512_bf16", "amx_bf16")  # CPU extensions that multiply bfloat16
OnProgress = Callable[[str], None]


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


@dataclass(frozen=True)
class Peer:
    """Another runtime with one weight format."""

    name: str  # name in --peers and in the tables
    environment: str  # key in ENVIRONMENTS
    runner: str  # class in adapters/runtimes.py, or FILE:CLASS
    models: tuple[str, ...]  # folders of converted models; empty: the checkpoint itself, or --gguf
    settings: str  # settings, for the tables
    options: dict[str, Any] = field(default_factory=dict)  # further options of the runner
    looks_up: bool = True  # whether it drafts from the text before, if asked

    @property
    def reads_gguf(self) -> bool:
        """Whether its model is the file of --gguf."""
        return self.environment == "llama.cpp"


_GENAI = "builder's int4, accuracy level 4; prune_lm_head except for steps of several rows"
_CTRANSLATE2 = "converter's int8, whole prompt in one call"
PEERS = (
    Peer("onnxruntime-genai int4", "onnxruntime-genai", "Genai", ("genai-int4-pruned", "genai-int4"), _GENAI),
    *(
        Peer(
            f"openvino-genai {x}", "openvino-genai", "OpenVino", (f"openvino-{x}",), f"optimum-cli --weight-format {x}"
        )
        for x in ("int8", "int4")
    ),
    Peer(
        *("ctranslate2 int8", "ctranslate2", "CTranslate2", ("ctranslate2-int8",), _CTRANSLATE2),
        options={"compute_type": "int8"},
    ),
    Peer("transformers float32", "transformers", "Transformers", (), "sdpa attention, DynamicCache"),
    Peer("llama.cpp", "llama.cpp", "LlamaCpp", (), "the file of --gguf, logits of all rows"),
)


@dataclass(frozen=True)
class ComparedRuntime:
    """One row of the tables: a runtime with a model, ready to start."""

    name: str
    python: Path  # Python interpreter of its environment
    runner: str  # FILE:CLASS
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
    subjects: dict[str, ComparedRuntime] = {}
    for path in bundles:
        manifest = open_bundle(path).manifest
        name = f"spaceport {manifest.signature.dtype if manifest.weights == 'same' else manifest.weights}"
        if name in subjects:
            name = f"{name} ({path.name})"
        if name in subjects:
            raise OptionFault(f"--bundle {path}: given twice, or with the same name and weights as another: rename one")
        settings = f"{path.name}, plain decoding"
        subjects[name] = ComparedRuntime(name, Path(sys.executable), _SPACEPORT, path, settings, is_bundle=True)
    return list(subjects.values())


def peers_named(names: str, peers: Sequence[Peer] = PEERS) -> tuple[Peer, ...]:
    """The peers in a list such as `openvino-genai int8,ctranslate2`; a runtime's name selects all its formats."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {peer.name for peer in peers} | {peer.environment for peer in peers}
    if unknown := [name for name in wanted if name not in known]:
        raise OptionFault(f"--peers names {unknown[0]!r}: expected any of {', '.join(sorted(known))}, with commas")
    return tuple(peer for peer in peers if peer.name in wanted or peer.environment in wanted)


def peer_subject(
    peer: Peer, work: Environments, checkpoint: Path, gguf: Path | None, flags: Sequence[str]
) -> ComparedRuntime | Skipped:
    """The subject of a peer on a CPU with these extensions, or the reason why it cannot be measured."""
    if peer.reads_gguf and gguf is None:
        return Skipped(peer.name, "no GGUF file: add --gguf FILE of the same model")
    if peer.options.get("dtype") == "bfloat16" and not set(_BFLOAT16) & set(flags):
        return Skipped(peer.name, f"this CPU has none of {', '.join(_BFLOAT16)}: measure float32")
    python = work.python(peer.environment)
    if not work.installed(peer.environment):
        return Skipped(peer.name, f"no environment with the pinned versions at {python.parent.parent}: add --setup")
    name, models, options = peer.name, [checkpoint], dict(peer.options)
    if peer.reads_gguf and gguf is not None:
        name, models = f"{peer.name} {gguf.stem.rpartition('.')[2]}", [gguf]
    elif peer.models and isinstance(work, WorkFolder):
        models = [work.model(folder) for folder in peer.models]
    if missing := [model for model in models if not model.exists()]:
        return Skipped(peer.name, f"no converted model at {missing[0]}: add --setup")
    if len(models) > 1:
        options["rows_model"] = str(models[1])
    runner = peer.runner if ":" in peer.runner else f"{_ADAPTERS / 'runtimes.py'}:{peer.runner}"
    return ComparedRuntime(name, python, runner, models[0], peer.settings, options)


def set_up(work: Environments, peers: Sequence[Peer], on_progress: OnProgress) -> list[Skipped]:
    """Create missing environments and models, and return the peers whose setup failed."""
    failed = []
    for peer in peers:
        try:
            create_environment(work, peer.environment, on_progress)
            if isinstance(work, WorkFolder):
                for model in (model for model in peer.models if not work.model(model).exists()):
                    create_environment(work, "convert", on_progress)
                    on_progress(f"convert {work.checkpoint.name} to {model}")
                    convert(work, model)
        except ProcessFailed as failure:
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
        command = [*SPACEPORT_COMMAND, "export", str(work.checkpoint), str(target), "--weights", weights]
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            run_logged(command, work.logs / f"export-{name}.log")
        except ProcessFailed as failure:
            failed.append(Skipped(f"spaceport {name}", f"setup failed: {failure}"))
    return failed


def run_logged(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Run a command with its output in a log file; raises ProcessFailed with the end of the output."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **(variables or {})}
    if command[0] != sys.executable:
        for name in ("PYTHONPATH", "OMP_WAIT_POLICY"):  # the command line sets the latter
            environment.pop(name, None)
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, check=False
            ).returncode
        except OSError as error:
            raise ProcessFailed(f"{command[0]}: {error.strerror}") from error
    if code != 0:
        end = " ".join(log.read_text("utf-8", "replace")[-_TAIL:].split())
        raise ProcessFailed(f"exit code {code}: … {end} (all of it: {log})")


class UnsupportedCall(ProcessFailed):
    """The API of a runtime does not support a call; its worker goes on."""


@dataclass
class WorkerProcess:
    """A running worker process."""

    subject: ComparedRuntime
    process: subprocess.Popen[str]
    log: Path
    timeout: float  # seconds to wait for an answer
    opened: dict[str, Any] = field(default_factory=dict)

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one call; the process computes only until then."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise self._ended() from None
        ready, _, _ = select.select([self.process.stdout], [], [], self.timeout)
        if not ready:
            raise ProcessFailed(f"no answer within {self.timeout:g} s: look at {self.log}")
        line = self.process.stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "unsupported" in answer:
            raise UnsupportedCall(answer["unsupported"])
        return dict(answer["result"])

    def resources(self) -> Resources:
        """What the process holds and has used."""
        try:
            return resources_of(self.process.pid)
        except ProcessFailed:
            raise self._ended() from None

    def cpu_seconds(self) -> float:
        """CPU time of all threads so far, with a resolution of 10 ms."""
        return self.resources().cpu_seconds

    def wait_until_idle(self, limit: float) -> None:
        """Wait until no thread of the process uses CPU time: threads of some libraries spin for a while after a call."""
        end, before = monotonic() + limit, self.cpu_seconds()
        while True:
            sleep(_PAUSE)
            now = self.cpu_seconds()
            if now == before:
                return
            if monotonic() > end:
                raise ProcessFailed(f"still busy {limit:g} s after its measurement: expected an idle process")
            before = now

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    def _ended(self) -> ProcessFailed:
        code = self.process.wait()
        return ProcessFailed(f"its process ended with exit code {code} and printed last: {last_lines(self.log)}")


def start_worker(subject: ComparedRuntime, threads: int, logs: Path, timeout: float) -> WorkerProcess:
    """The worker process of a subject, before it opens a model."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"worker-{subject.name.replace(' ', '-').replace('/', '-')}.log"
    environment = {**os.environ, **{name: str(threads) for name in _THREADS}, "PYTHONUNBUFFERED": "1"}
    if not subject.is_bundle:
        for name in ("PYTHONPATH", "OMP_WAIT_POLICY"):  # the command line sets the latter
            environment.pop(name, None)
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(subject.python), str(_ADAPTERS / "worker.py"), *subject.runner.rsplit(":", 1)]
    with log.open("w", encoding="utf-8") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            )
        except OSError as error:
            raise ProcessFailed(f"{subject.python}: {error.strerror}: expected an interpreter; add --setup") from error
    return WorkerProcess(subject, process, log, timeout)


def open_model(worker: WorkerProcess, length: int, threads: int, idle_limit: float) -> None:
    """Open the model of a worker for contexts of this length; a worker that fails is closed."""
    read_files(worker.subject.model)
    settings = {"model": str(worker.subject.model), "threads": threads, "length": length}
    try:
        worker.opened = worker.call("open", {**settings, **worker.subject.options})
        worker.wait_until_idle(idle_limit)
    except ProcessFailed:
        worker.close()
        raise


def read_files(path: Path) -> None:
    """Read the files of a model once, so that it is opened from the page cache."""
    for file in files_of(path):
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass


def files_of(path: Path) -> list[Path]:
    """The files below a folder, or the file itself."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
