"""Runtimes: the environments of other runtimes, and the bundle's model converted for each; only --setup downloads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault, OptionFault

OnProgress = Callable[[str], None]
GENAI = ("onnxruntime-genai==0.18.0", "onnxruntime==1.31.1")
TOKENIZERS = "openvino-tokenizers==2026.4.1.0"
# Environment -> requirements. `convert` converts checkpoints for the others; a CPU build satisfies its torch.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "onnxruntime-genai": GENAI,
    "openvino-genai": ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", TOKENIZERS),
    "llama.cpp": ("llama-cpp-python==0.3.36",),
    "convert": (
        *("torch==2.13.0", "transformers==5.5.4", "accelerate==1.15.0", "safetensors==0.8.0", "sentencepiece==0.2.3"),
        *(*GENAI, "onnx==1.23.2", "onnx-ir==1.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", TOKENIZERS, "gguf==0.19.0"),
    ),
}
# Uninstalled afterwards: no text model needs it, and a build for another torch version breaks transformers.
_UNWANTED = {"convert": ("torchvision",)}
# The AMX kernels of this llama.cpp crash (segmentation fault in llama_decode, on an Emerald Rapids CPU, Q4_1); all other
# extensions of the CPU are used.
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
_BUILD = {"llama.cpp": {"CMAKE_ARGS": f"-DCMAKE_C_FLAGS='{_NO_AMX}' -DCMAKE_CXX_FLAGS='{_NO_AMX}'"}}
_GGUF_TO_CHECKPOINT = (
    "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; folder, file, target = sys.argv[1:]; "
    "[kind.from_pretrained(folder, gguf_file=file).save_pretrained(target) for kind in (M, T)]"
)
_GGUF_TO_GGUF = (
    "import ctypes, sys, llama_cpp as l; source, target, form = sys.argv[1:]; p = l.llama_model_quantize_default_params(); "
    "p.ftype = getattr(l, 'LLAMA_FTYPE_MOSTLY_' + form); p.allow_requantize = True; "
    "sys.exit(l.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(p)))"
)
_SAMPLES, _BLOCK = 64, 1 << 16  # blocks of each weight file that are hashed, and their bytes
_RECORD = "spaceport-pins.json"
_TAIL = 300  # characters of a failed command's output


class ProcessFailed(InputFault):
    """A command or a worker ended or did not answer; the message has its last output."""


@dataclass(frozen=True)
class OtherRuntime:
    """Another runtime with one weight format."""

    environment: str  # key in ENVIRONMENTS
    runner: str  # class in runners.py
    model: str  # name of its converted model; "gguf": the file of --gguf itself
    rows_model: str = ""  # another model for steps of several rows
    lookup: bool = False  # drafts from the text before


RUNTIMES = {
    "onnxruntime-genai int4": OtherRuntime("onnxruntime-genai", "Genai", "genai-int4-pruned", "genai-int4"),
    "openvino-genai int4": OtherRuntime("openvino-genai", "OpenVino", "openvino-int4"),
    "openvino-genai int4 lookup": OtherRuntime("openvino-genai", "OpenVino", "openvino-int4", lookup=True),
    "openvino-genai int8": OtherRuntime("openvino-genai", "OpenVino", "openvino-int8"),
    "openvino-genai int8 lookup": OtherRuntime("openvino-genai", "OpenVino", "openvino-int8", lookup=True),
    "llama.cpp": OtherRuntime("llama.cpp", "LlamaCpp", "gguf"),
    "llama.cpp Q4_0": OtherRuntime("llama.cpp", "LlamaCpp", "gguf-Q4_0"),
}


def runtimes_named(text: str) -> dict[str, OtherRuntime]:
    """The runtimes in a list such as `openvino-genai int8,llama.cpp Q4_0`; a * stands for all formats of a runtime."""
    found: dict[str, OtherRuntime] = {}
    for name in (part.strip() for part in text.split(",")):
        every = name.removesuffix("*").strip()
        chosen = {key: one for key, one in RUNTIMES.items() if key == name or (every != name and key.startswith(every))}
        if not chosen:
            raise OptionFault(f"--others names {name!r}: expected names among {', '.join(RUNTIMES)}, or one with a *")
        found |= chosen
    return found


@dataclass(frozen=True)
class WorkFolder:
    """Environments in `environments/NAME`, and converted models in `models/SOURCE-FINGERPRINT/NAME`."""

    folder: Path
    checkpoint: Path | None  # the bundle's model as a Hugging Face checkpoint
    gguf: Path | None  # the same as a GGUF file; without a checkpoint it is converted to one

    def __post_init__(self) -> None:
        if self.checkpoint is not None and not (self.checkpoint / "config.json").is_file():
            raise InputFault(f"{self.checkpoint}: has no config.json: expected a Hugging Face checkpoint folder")
        if self.gguf is not None and not self.gguf.is_file():
            raise InputFault(f"{self.gguf}: no such file: expected the bundle's model as a GGUF file")

    def python(self, environment: str) -> Path:
        """Python interpreter of an environment."""
        return self.folder.absolute() / "environments" / environment / "bin" / "python"

    def installed(self, environment: str) -> bool:
        """Whether an environment exists with the pinned versions."""
        record = self.python(environment).parents[1] / _RECORD
        return record.is_file() and json.loads(record.read_text("utf-8")) == list(ENVIRONMENTS[environment])

    def source(self, model: str) -> Path:
        """The file or folder that a model is converted from; raises if it was not given."""
        only_gguf = model.startswith("gguf") or model == "checkpoint"
        source = self.gguf if only_gguf else self.checkpoint or self.gguf
        if source is None:
            option = "--gguf FILE" if only_gguf else "--checkpoint FOLDER or --gguf FILE"
            raise OptionFault(f"no model for other runtimes: expected {option} with the model of the bundle: add it")
        return source.absolute()

    def model(self, name: str) -> Path:
        """The file or folder of a model."""
        source = self.source(name)
        if name == "gguf":
            return source
        return self.folder.absolute() / "models" / f"{source.name}-{fingerprint(source)}" / name

    @property
    def logs(self) -> Path:
        """Folder of the output of installations, conversions and workers."""
        return self.folder.absolute() / "logs"

    def check(self, name: str, runtime: OtherRuntime) -> None:
        """Raise if the environment or a model of a runtime is missing."""
        if not self.installed(runtime.environment):
            folder = self.python(runtime.environment).parents[1]
            raise InputFault(f"{folder}: has no environment with the pinned versions of {name}: add --setup once")
        for model in filter(None, (runtime.model, runtime.rows_model)):
            if not (path := self.model(model)).exists():
                raise InputFault(f"{path}: no such model, which {name} needs: add --setup once")


def fingerprint(source: Path) -> str:
    """A hash of a checkpoint's configuration, or nothing, and of samples of each weight file: fast, and enough."""
    digest = hashlib.sha256()
    for path in [source] if source.is_file() else sorted((source / "config.json", *source.glob("*.safetensors"))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:12]


def set_up(work: WorkFolder, runtime: OtherRuntime, on_progress: OnProgress) -> None:
    """Create the environment and the models of a runtime, unless they exist."""
    install(work, runtime.environment, on_progress)
    for model in filter(None, (runtime.model, runtime.rows_model)):
        convert(work, model, on_progress)


def install(work: WorkFolder, name: str, on_progress: OnProgress) -> None:
    """Create an environment with the pinned versions, from the package index that pip is configured for."""
    if work.installed(name):
        return
    on_progress(f"creating the environment {name}")
    python, log = work.python(name), work.logs / f"install-{name}.log"
    venv.create(python.parents[1], with_pip=True, clear=True)
    fresh = ["--no-cache-dir"] if name in _BUILD else []  # a cached wheel may have been built with other variables
    run_logged([str(python), "-m", "pip", "install", *fresh, *ENVIRONMENTS[name]], log, _BUILD.get(name))
    for package in _UNWANTED.get(name, ()):
        run_logged([str(python), "-m", "pip", "uninstall", "--yes", package], log)
    (python.parents[1] / _RECORD).write_text(json.dumps(ENVIRONMENTS[name]) + "\n", "utf-8")


def convert(work: WorkFolder, model: str, on_progress: OnProgress) -> None:
    """Convert one model unless it exists; a failed conversion leaves nothing behind."""
    source, target = work.source(model), work.model(model)
    if target.exists():
        return
    if source.is_file() and not model.startswith("gguf") and model != "checkpoint":
        convert(work, "checkpoint", on_progress)
        source = work.model("checkpoint")
    environment = "llama.cpp" if model.startswith("gguf") else "convert"
    install(work, environment, on_progress)
    on_progress(f"converting {source.name} to {model}")
    part = target.with_name(f"{model}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    run_logged(conversion(model, work.python(environment), source, part), work.logs / f"convert-{model}.log")
    part.rename(target)


def conversion(model: str, python: Path, source: Path, target: Path) -> list[str]:
    """The command that converts a model, as documented by the runtime."""
    runtime, _, rest = model.partition("-")
    weights, _, variant = rest.partition("-")
    if runtime == "checkpoint":
        return [str(python), "-c", _GGUF_TO_CHECKPOINT, str(source.parent), source.name, str(target)]
    if runtime == "gguf":
        return [str(python), "-c", _GGUF_TO_GGUF, str(source), str(target), weights]
    if runtime == "genai":
        builder = [str(python), "-m", "onnxruntime_genai.models.builder", "-m", str(source), "-i", str(source)]
        pruned = ["--extra_options", "prune_lm_head=true"] if variant else []  # computes logits of the last row only
        return [*builder, "-o", str(target), "-p", weights, "-e", "cpu", *pruned]
    export = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(source)]
    group = ["--group-size", str(group_size(source))] if weights == "int4" else []
    return [*export, "--task", "text-generation-with-past", "--weight-format", weights, *group, str(target)]


def group_size(checkpoint: Path) -> int:
    """Weights per quantization scale: optimum's default of 128, or less if it does not divide the checkpoint's widths."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    widths = [config[name] for name in ("hidden_size", "intermediate_size") if name in config]
    return next((size for size in (128, 64, 32) if all(width % size == 0 for width in widths)), 16)


def run_logged(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Run a command with its output in a log file; raises ProcessFailed with the end of the output."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as output:
        print("$", *command, file=output, flush=True)
        environment = {**without_own(os.environ), **(variables or {})}
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, check=False
        )
    if result.returncode != 0:
        end = " ".join(log.read_text("utf-8", "replace")[-_TAIL:].split())
        raise ProcessFailed(f"exit code {result.returncode}: … {end} (all of it: {log})")


def without_own(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables without those that are meant for this interpreter."""
    return {name: value for name, value in variables.items() if name not in ("PYTHONPATH", "OMP_WAIT_POLICY")}
