"""Polygraphy commands: the comparisons of a check as stock command lines, ready to paste into a shell in any folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.manifest import ENGINES_FOLDER, MODEL_FILE, EngineRecord, Manifest
from spaceport.graphs.contract.signature import VISIBLE_STEP, Signature, logit_rows
from spaceport.graphs.contract.tolerance import tolerance_of
from spaceport.runtime.bundle import Bundle

LOADER = Path(__file__).with_name("polygraphy_loader.py")

# Room of an engine that a bundle does not hold yet: what `spaceport build` makes it with, a short text apart.
_STEP_ROWS, _PROMPT_ROWS, _REQUESTS, _CAPACITY = 64, 512, 4, 1024


@dataclass(frozen=True)
class PolygraphyCommand:
    """A command and what it does."""

    does: str
    command: str

    def __str__(self) -> str:
        return f"# {self.does}\n{self.command}"


@dataclass(frozen=True)
class EngineSizes:
    """The sizes that an engine is built for."""

    capacity: int
    requests: int
    step_rows: int
    prompt_rows: int


def commands_for(bundle: Bundle, checkpoint: Path | None, largest_logit: float) -> list[PolygraphyCommand]:
    """What to paste: the outputs to compare with first, then a line for everything that could run the bundle."""
    signature = bundle.manifest.signature
    engines = {
        name: record for name, record in bundle.manifest.engines.items() if record.graph == bundle.manifest.graph
    }
    lines = _on_onnxruntime(bundle, checkpoint, largest_logit) if signature.dtype != "bfloat16" else []
    for name, record in engines.items():
        path = (bundle.path / ENGINES_FOLDER / name).resolve()
        lines += _on_engine(bundle, checkpoint, largest_logit, path, record)
    if signature.lowering == "append" and signature.dtype != "float32":  # there TensorRT has no attention of its own
        lines += _built(bundle, checkpoint, largest_logit)
    return list(dict.fromkeys(lines))  # engines of one size are compared with the same outputs


def tolerances(manifest: Manifest, largest_logit: float) -> list[str]:
    """As a check has them: the largest error of a logit, as a share of the largest one. Buffers are held by their mean."""
    share = tolerance_of(manifest.signature.dtype, manifest.activations)
    allowed = share * max(1.0, largest_logit)
    return ["--atol", f"{share:g}", f"logits:{allowed:.3g}", "--rtol", "0", "--check-error-stat", "mean", "logits:max"]


def _on_onnxruntime(bundle: Bundle, checkpoint: Path | None, largest_logit: float) -> list[PolygraphyCommand]:
    model = str((bundle.path / MODEL_FILE).resolve())
    compared = tolerances(bundle.manifest, largest_logit)

    def on(provider: str, *flags: str) -> str:
        return _run(bundle, {}, model, "--onnxrt", "--providers", provider, *flags)

    cuda = "ONNX Runtime on a GPU against "
    if checkpoint is None:
        file = "onnxruntime.json"
        return [
            PolygraphyCommand("what ONNX Runtime gives on the processor", on("cpu", "--save-outputs", file)),
            PolygraphyCommand(f"{cuda}that", on("cuda", "--load-outputs", file, *compared)),
        ]
    file = "pytorch.json"
    return [
        PolygraphyCommand("what PyTorch gives", _saved(bundle, {}, checkpoint, file)),
        PolygraphyCommand(
            "ONNX Runtime on the processor against PyTorch", on("cpu", "--load-outputs", file, *compared)
        ),
        PolygraphyCommand(f"{cuda}PyTorch", on("cuda", "--load-outputs", file, *compared)),
    ]


def _on_engine(
    bundle: Bundle, checkpoint: Path | None, largest_logit: float, path: Path, record: EngineRecord
) -> list[PolygraphyCommand]:
    room = EngineSizes(record.capacity, record.requests, record.step_rows, record.prompt_rows)
    library = _library(record.flavour)
    return _against(bundle, checkpoint, largest_logit, room, library, str(path), f"{record.flavour} ({record.target})")


def _built(bundle: Bundle, checkpoint: Path | None, largest_logit: float) -> list[PolygraphyCommand]:
    """An engine that stock Polygraphy builds itself: the buffers of the graph get their size, then two profiles."""
    signature = bundle.manifest.signature
    room = EngineSizes(_CAPACITY, _REQUESTS, _STEP_ROWS, _PROMPT_ROWS)
    fixed, engine = f"fixed-{room.capacity}.onnx", f"polygraphy-{room.capacity}.engine"
    dims = [str(size) if isinstance(size, int) else f'"{size}"' for size in signature.past[0].shape]
    dims[2] = str(room.capacity)
    shapes = [f"{tensor.name}:[{','.join(dims)}]" for tensor in signature.past]
    model = str((bundle.path / MODEL_FILE).resolve())
    sanitize = ["polygraphy", "surgeon", "sanitize", model, "--override-input-shapes", *shapes, "-o", fixed]
    sanitize += ["--save-external-data", f"{fixed}.data"]
    convert = ["polygraphy", "convert", fixed, "--convert-to", "trt", "-o", engine, *_profiles(signature, room)]
    library = _library("tensorrt-rtx")
    return [
        PolygraphyCommand(f"the graph with buffers of {room.capacity} slots", shlex.join(sanitize)),
        PolygraphyCommand("an engine of it, with a profile for steps and one for prompts", _command(library, convert)),
        *_against(bundle, checkpoint, largest_logit, room, library, engine, "that engine"),
    ]


def _against(
    bundle: Bundle,
    checkpoint: Path | None,
    largest_logit: float,
    room: EngineSizes,
    library: Mapping[str, str],
    engine: str,
    told: str,
) -> list[PolygraphyCommand]:
    """An engine's line, behind the one that gives what it is compared with, in buffers of the engine's size."""
    sizes = {"SPACEPORT_SLOTS": str(room.capacity), "SPACEPORT_REQUESTS": str(room.requests)}
    flags = ["--trt", "--model-type", "engine"]
    if checkpoint is None:
        model = str((bundle.path / MODEL_FILE).resolve())
        file = f"onnxruntime-{room.capacity}.json"
        source = "ONNX Runtime"
        saved = _run(bundle, sizes, model, "--onnxrt", "--providers", "cpu", "--save-outputs", file)
    else:
        file, source = f"pytorch-{room.capacity}.json", "PyTorch"
        saved = _saved(bundle, sizes, checkpoint, file)
    compared = tolerances(bundle.manifest, largest_logit)
    return [
        PolygraphyCommand(f"what {source} gives with {room.capacity} slots", saved),
        PolygraphyCommand(
            f"{told} against {source}",
            _run(bundle, {**library, **sizes}, engine, *flags, "--load-outputs", file, *compared),
        ),
    ]


def _profiles(signature: Signature, room: EngineSizes) -> list[str]:
    """A profile for steps and one for prompts: the least, the likeliest and the largest shapes."""
    wanted = logit_rows(room.prompt_rows, signature.vocab_size)
    flags: list[str] = []
    for rows, logits in ((room.step_rows, room.step_rows), (room.prompt_rows, wanted)):
        for which, share in (("min", 0), ("opt", 1), ("max", 1)):
            sizes = {
                "B": room.requests if which == "max" else 1,
                "T": rows if share else 1,
                "R": logits if share else 1,
                "A": room.capacity if share else VISIBLE_STEP,
                "S": room.capacity,
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
    told = {**variables, "SPACEPORT_BUNDLE": str(bundle.path.resolve())}
    return _command(told, ["polygraphy", "run", model, "--data-loader-script", str(LOADER.resolve()), *flags])


def _command(variables: Mapping[str, str], words: Sequence[str]) -> str:
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    return f"{settings}{shlex.join(words)}"
