"""The comparisons of a check as stock Polygraphy command lines, with the inputs and reference outputs that they load.

This file is the `--data-loader-script` of these commands:

    polygraphy run BUNDLE/model.onnx --onnxrt --data-loader-script polygraphy_commands.py --validate

SPACEPORT_BUNDLE: the bundle, if the command line does not name its model.onnx. SPACEPORT_SLOTS: KV slots, if the graph or
engine has a fixed number. SPACEPORT_REQUESTS: maximum requests per call of the engine.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from polygraphy.comparator import IterationResult, RunResults
from polygraphy.logger import G_LOGGER

from spaceport.graphs.contract.exactness import tolerance_of
from spaceport.graphs.contract.manifest import ENGINES_FOLDER, MODEL_FILE, EngineRecord, Manifest
from spaceport.graphs.contract.signature import NUMPY, VISIBLE_STEP, Signature, logit_rows, visible_length
from spaceport.runtime.backends.on_torch import TorchEngine
from spaceport.runtime.bundle import Bundle, read_manifest

# Sizes of an engine that Polygraphy builds: the defaults of `spaceport build`, with a shorter context.
_STEP_ROWS, _PROMPT_ROWS, _REQUESTS, _CAPACITY = 64, 512, 4, 1024


def load_data() -> Iterator[dict[str, Any]]:
    """The inputs for the bundle that Polygraphy was started with; Polygraphy calls this function."""
    return calls(read_manifest(_bundle()))


def calls(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Inputs of a prompt, decode steps and a batch of two requests, over KV buffers with random content."""
    random = np.random.default_rng(0)
    slots, most = _number("SPACEPORT_SLOTS"), _number("SPACEPORT_REQUESTS")
    for requests, rows, context in ((1, 16, 0), (1, 1, 40), (1, 9, 64), (2, 5, 100)):
        if most is None or requests <= most:
            yield inputs(manifest, random, requests, rows, context, slots)


def inputs(
    manifest: Manifest, random: np.random.Generator, requests: int, rows: int, context: int, slots: int | None
) -> dict[str, Any]:
    """The inputs of one call: a chain of rows after `context` cached tokens."""
    signature = manifest.signature
    visible = visible_length(context + rows)
    sizes = {"B": requests, "T": rows, "A": visible, "R": rows, "S": slots or visible + 64}
    if sizes["S"] < visible:
        raise SystemExit(f"SPACEPORT_SLOTS is {slots}: expected at least {visible}")
    positions = np.arange(context, context + rows)
    mask = np.zeros((requests, 1, rows, visible), np.bool_)
    mask[:] = np.arange(visible) <= positions[:, None]
    near = mask & (positions[:, None] - np.arange(visible) < (signature.window or visible))
    arrays: dict[str, NDArray[Any]] = {
        "input_ids": random.integers(0, signature.vocab_size, (requests, rows)),
        "position_ids": np.tile(positions, (requests, 1)),
        "slot_ids": np.tile(positions, (requests, 1)),
        "attention_mask": mask,
        "sliding_attention_mask": near,
        "logit_rows": np.tile(np.arange(rows), (requests, 1)),
    }
    for tensor in signature.past:
        shape = [sizes[size] if isinstance(size, str) else size for size in tensor.shape]
        arrays[tensor.name] = random.standard_normal(shape)
    return {tensor.name: _typed(arrays[tensor.name], tensor.dtype) for tensor in signature.inputs}


def _typed(array: NDArray[Any], dtype: str) -> Any:
    """An input in its type; bfloat16 inputs are torch tensors, as numpy has no such type and Polygraphy accepts both."""
    if dtype == "bfloat16":
        return torch.from_numpy(array).to(torch.bfloat16)
    return array.astype(NUMPY[dtype])


def _number(name: str) -> int | None:
    value = os.environ.get(name)
    if value is not None and not value.isdecimal():
        raise SystemExit(f"{name} is {value!r}: expected a whole number")
    return None if value is None else int(value)


def _bundle() -> Path:
    """The bundle named by SPACEPORT_BUNDLE, or the folder of the model on the command line."""
    bundle = os.environ.get("SPACEPORT_BUNDLE")
    if bundle:
        return Path(bundle)
    models = [Path(argument) for argument in sys.argv if argument.endswith(".onnx")]
    if not models:
        raise SystemExit(
            "got no model.onnx on the command line, expected one: name it, or set SPACEPORT_BUNDLE to the bundle"
        )
    return models[0].parent


def save_outputs(engine: TorchEngine, manifest: Manifest, file: Path) -> int:
    """Write the graph outputs of every loader call, in the types of the bundle's graph; returns the number of calls."""
    dtype = manifest.signature.dtype
    stored_type: torch.dtype = getattr(torch, dtype)
    model_type: torch.dtype = getattr(torch, engine.signature.dtype)
    iterations = []
    for inputs in calls(manifest):
        tensors = [_tensor(value, model_type) for value in inputs.values()]
        with torch.inference_mode():
            outputs = engine.module(*tensors)
        named: OrderedDict[str, Any] = OrderedDict()
        for tensor, output in zip(engine.signature.outputs, outputs, strict=True):
            stored = output if tensor.name == "logits" else output.to(stored_type)
            named[tensor.name] = stored if dtype == "bfloat16" else stored.numpy()
        iterations.append(IterationResult(outputs=named, runtime=0.0, runner_name=f"PyTorch {engine.signature.dtype}"))
    results = RunResults()
    results.append((f"PyTorch {engine.signature.dtype}", iterations))
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        results.save(str(file))
    return len(iterations)


def _tensor(value: Any, model_type: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return tensor.to(model_type) if tensor.is_floating_point() else tensor


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
    return _command(named, ["polygraphy", "run", model, "--data-loader-script", str(Path(__file__).resolve()), *flags])


def _command(variables: Mapping[str, str], words: Sequence[str]) -> str:
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    return f"{settings}{shlex.join(words)}"
