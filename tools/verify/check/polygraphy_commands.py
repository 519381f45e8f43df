"""Polygraphy commands: the comparisons of a check as stock Polygraphy command lines, to paste into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.exactness import tolerance_of
from spaceport.graphs.contract.manifest import ENGINES_FOLDER, MODEL_FILE, EngineRecord, Manifest
from spaceport.graphs.contract.signature import VISIBLE_STEP, Signature, logit_rows
from spaceport.runtime.bundle import Bundle

LOADER = Path(__file__).with_name("polygraphy_loader.py")

# Sizes of an engine that Polygraphy builds: the defaults of `spaceport build`, with a shorter context.
_STEP_ROWS, _PROMPT_ROWS, _REQUESTS, _CAPACITY = 64, 512, 4, 1024


@dataclass(frozen=True)
class PolygraphyCommand:
    """A command line and its description."""

    description: str
    command: str

    def __str__(self) -> str:
        return f"# {self.description}\n{self.command}"


@dataclass(frozen=True)
class EngineSizes:
    """The sizes that an engine is built for."""

    capacity: int
    requests: int
    step_rows: int
    prompt_rows: int


def commands_for(bundle: Bundle, checkpoint: Path | None, largest_logit: float) -> list[PolygraphyCommand]:
    """The command lines: the reference outputs first, then one comparison per engine that could run the bundle."""
    signature = bundle.manifest.signature
    engines = {
        name: record for name, record in bundle.manifest.engines.items() if record.graph == bundle.manifest.graph
    }
    lines = _on_onnxruntime(bundle, checkpoint, largest_logit) if signature.dtype != "bfloat16" else []
    for name, record in engines.items():
        path = (bundle.path / ENGINES_FOLDER / name).resolve()
        lines += _on_engine(bundle, checkpoint, largest_logit, path, record)
    if (
        signature.lowering == "append" and signature.dtype != "float32"
    ):  # TensorRT needs half precision for its attention
        lines += _built(bundle, checkpoint, largest_logit)
    return list(dict.fromkeys(lines))  # engines of one size are compared with the same outputs


def tolerances(manifest: Manifest, largest_logit: float) -> list[str]:
    """The tolerances of a check as flags: the maximum error for logits, the mean error for KV buffers."""
    share = tolerance_of(manifest.signature.dtype, manifest.activations)
    allowed = share * max(1.0, largest_logit)
    return ["--atol", f"{share:g}", f"logits:{allowed:.3g}", "--rtol", "0", "--check-error-stat", "mean", "logits:max"]


def _on_onnxruntime(bundle: Bundle, checkpoint: Path | None, largest_logit: float) -> list[PolygraphyCommand]:
    model = str((bundle.path / MODEL_FILE).resolve())
    compared = tolerances(bundle.manifest, largest_logit)

    def on(provider: str, *flags: str) -> str:
        return _run(bundle, {}, model, "--onnxrt", "--providers", provider, *flags)

    cuda = "compare ONNX Runtime on a GPU with "
    if checkpoint is None:
        file = "onnxruntime.json"
        return [
            PolygraphyCommand("save the outputs of ONNX Runtime on the CPU", on("cpu", "--save-outputs", file)),
            PolygraphyCommand(f"{cuda}them", on("cuda", "--load-outputs", file, *compared)),
        ]
    file = "pytorch.json"
    return [
        PolygraphyCommand("save the outputs of PyTorch", _saved(bundle, {}, checkpoint, file)),
        PolygraphyCommand("compare ONNX Runtime on the CPU with PyTorch", on("cpu", "--load-outputs", file, *compared)),
        PolygraphyCommand(f"{cuda}PyTorch", on("cuda", "--load-outputs", file, *compared)),
    ]


def _on_engine(
    bundle: Bundle, checkpoint: Path | None, largest_logit: float, path: Path, record: EngineRecord
) -> list[PolygraphyCommand]:
    sizes = EngineSizes(record.capacity, record.requests, record.step_rows, record.prefill_rows)
    library = _library(record.backend)
    name = f"{record.backend} ({record.target})"
    return _comparison(bundle, checkpoint, largest_logit, sizes, library, str(path), name)


def _built(bundle: Bundle, checkpoint: Path | None, largest_logit: float) -> list[PolygraphyCommand]:
    """An engine that stock Polygraphy builds: the graph gets fixed KV buffers, then two optimization profiles."""
    signature = bundle.manifest.signature
    sizes = EngineSizes(_CAPACITY, _REQUESTS, _STEP_ROWS, _PROMPT_ROWS)
    fixed, engine = f"fixed-{sizes.capacity}.onnx", f"polygraphy-{sizes.capacity}.engine"
    dims = [str(size) if isinstance(size, int) else f'"{size}"' for size in signature.past[0].shape]
    dims[2] = str(sizes.capacity)
    shapes = [f"{tensor.name}:[{','.join(dims)}]" for tensor in signature.past]
    model = str((bundle.path / MODEL_FILE).resolve())
    sanitize = ["polygraphy", "surgeon", "sanitize", model, "--override-input-shapes", *shapes, "-o", fixed]
    sanitize += ["--save-external-data", f"{fixed}.data"]
    convert = ["polygraphy", "convert", fixed, "--convert-to", "trt", "-o", engine, *_profiles(signature, sizes)]
    library = _library("tensorrt-rtx")
    return [
        PolygraphyCommand(f"give the graph KV buffers of {sizes.capacity} slots", shlex.join(sanitize)),
        PolygraphyCommand(
            "build an engine with a profile for decode steps and one for prefill", _command(library, convert)
        ),
        *_comparison(bundle, checkpoint, largest_logit, sizes, library, engine, "this engine"),
    ]


def _comparison(
    bundle: Bundle,
    checkpoint: Path | None,
    largest_logit: float,
    sizes: EngineSizes,
    library: Mapping[str, str],
    engine: str,
    name: str,
) -> list[PolygraphyCommand]:
    """Two command lines: save the reference outputs with KV buffers of the engine's size, then compare the engine."""
    variables = {"SPACEPORT_SLOTS": str(sizes.capacity), "SPACEPORT_REQUESTS": str(sizes.requests)}
    flags = ["--trt", "--model-type", "engine"]
    if checkpoint is None:
        model = str((bundle.path / MODEL_FILE).resolve())
        file = f"onnxruntime-{sizes.capacity}.json"
        source = "ONNX Runtime"
        saved = _run(bundle, variables, model, "--onnxrt", "--providers", "cpu", "--save-outputs", file)
    else:
        file, source = f"pytorch-{sizes.capacity}.json", "PyTorch"
        saved = _saved(bundle, variables, checkpoint, file)
    compared = tolerances(bundle.manifest, largest_logit)
    return [
        PolygraphyCommand(f"save the outputs of {source} with {sizes.capacity} KV slots", saved),
        PolygraphyCommand(
            f"compare {name} with {source}",
            _run(bundle, {**library, **variables}, engine, *flags, "--load-outputs", file, *compared),
        ),
    ]


def _profiles(signature: Signature, engine: EngineSizes) -> list[str]:
    """The flags of two optimization profiles, for decode steps and for prefill: minimum, optimum and maximum shapes."""
    wanted = logit_rows(engine.prompt_rows, signature.row_logits)
    flags: list[str] = []
    for rows, logits in ((engine.step_rows, engine.step_rows), (engine.prompt_rows, wanted)):
        for which, share in (("min", 0), ("opt", 1), ("max", 1)):
            sizes = {
                "B": engine.requests if which == "max" else 1,
                "T": rows if share else 1,
                "R": logits if share else 1,
                "A": engine.capacity if share else VISIBLE_STEP,
                "S": engine.capacity,
            }
            flags.append(f"--trt-{which}-shapes")
            for tensor in signature.inputs:
                shape = ",".join(str(sizes[size] if isinstance(size, str) else size) for size in tensor.shape)
                flags.append(f"{tensor.name}:[{shape}]")
    return flags


def _library(flavour: str) -> dict[str, str]:
    return {"POLYGRAPHY_USE_TENSORRT_RTX": "1"} if flavour == "tensorrt-rtx" else {}


def _saved(bundle: Bundle, variables: Mapping[str, str], checkpoint: Path, file: str) -> str:
    words = ["spaceport", "check", str(bundle.path.resolve()), str(checkpoint.resolve()), "--save-outputs", file]
    return _command(variables, words)


def _run(bundle: Bundle, variables: Mapping[str, str], model: str, *flags: str) -> str:
    named = {**variables, "SPACEPORT_BUNDLE": str(bundle.path.resolve())}
    return _command(named, ["polygraphy", "run", model, "--data-loader-script", str(LOADER.resolve()), *flags])


def _command(variables: Mapping[str, str], words: Sequence[str]) -> str:
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    return f"{settings}{shlex.join(words)}"
