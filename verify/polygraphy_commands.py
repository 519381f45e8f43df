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


def commands_for(bundle: Bundle, checkpoint: Path | None, largest_logit: float) -> list[PolygraphyCommand]:
    """The command lines: the reference outputs first, then one comparison per engine that could run the bundle."""
    manifest, commands = bundle.manifest, _Commands(bundle, checkpoint, largest_logit)
    dtype, lowering = manifest.signature.dtype, manifest.signature.lowering
    lines = commands.on_onnxruntime() if dtype != "bfloat16" else []
    for name, record in manifest.engines.items():
        if record.graph == manifest.graph:
            lines += commands.on_engine((bundle.path / ENGINES_FOLDER / name).resolve(), record)
    if lowering == "append" and dtype != "float32":  # TensorRT needs half precision for its attention
        lines += commands.on_built_engine()
    return list(dict.fromkeys(lines))  # engines of one size are compared with the same outputs


@dataclass(frozen=True)
class _Commands:
    """The command lines of a bundle, compared with its checkpoint or with ONNX Runtime on the CPU."""

    bundle: Bundle
    checkpoint: Path | None
    largest_logit: float

    @property
    def model(self) -> str:
        return str((self.bundle.path / MODEL_FILE).resolve())

    @property
    def tolerances(self) -> list[str]:
        """The tolerances of a check as flags: the maximum error for logits, the mean error for KV buffers."""
        share = tolerance_of(self.bundle.manifest.signature.dtype, self.bundle.manifest.native)
        logits = f"logits:{share * max(1.0, self.largest_logit):.3g}"
        return ["--atol", f"{share:g}", logits, "--rtol", "0", "--check-error-stat", "mean", "logits:max"]

    def on_onnxruntime(self) -> list[PolygraphyCommand]:
        file, source = ("onnxruntime.json", "them") if self.checkpoint is None else ("pytorch.json", "PyTorch")
        comparing = ("--load-outputs", file, *self.tolerances)
        on_cpu, on_gpu = (self._on_provider({}, provider, *comparing) for provider in ("cpu", "cuda"))
        reference = "ONNX Runtime on the CPU" if self.checkpoint is None else "PyTorch"
        lines = [PolygraphyCommand(f"save the outputs of {reference}", self._saved(file, {}))]
        if self.checkpoint is not None:
            lines.append(PolygraphyCommand("compare ONNX Runtime on the CPU with PyTorch", on_cpu))
        return [*lines, PolygraphyCommand(f"compare ONNX Runtime on a GPU with {source}", on_gpu)]

    def on_engine(self, path: Path, record: EngineRecord) -> list[PolygraphyCommand]:
        name, library = f"{record.backend} ({record.target})", _library(record.backend)
        return self._on_tensorrt(str(path), name, library, record.capacity, record.requests)

    def on_built_engine(self) -> list[PolygraphyCommand]:
        """An engine that stock Polygraphy builds: the graph gets fixed KV buffers, then two optimization profiles."""
        signature, library = self.bundle.manifest.signature, _library("tensorrt-rtx")
        fixed, engine = f"fixed-{_CAPACITY}.onnx", f"polygraphy-{_CAPACITY}.engine"
        dims = [str(size) if isinstance(size, int) else f'"{size}"' for size in signature.past[0].shape]
        dims[2] = str(_CAPACITY)
        shapes = [f"{tensor.name}:[{','.join(dims)}]" for tensor in signature.past]
        sanitize = ["polygraphy", "surgeon", "sanitize", self.model, "--override-input-shapes", *shapes, "-o", fixed]
        sanitize += ["--save-external-data", f"{fixed}.data"]
        convert = ["polygraphy", "convert", fixed, "--convert-to", "trt", "-o", engine, *_profiles(signature)]
        building = "build an engine with a profile for decode steps and one for prefill"
        return [
            PolygraphyCommand(f"give the graph KV buffers of {_CAPACITY} slots", shlex.join(sanitize)),
            PolygraphyCommand(building, _command(library, convert)),
            *self._on_tensorrt(engine, "this engine", library, _CAPACITY, _REQUESTS),
        ]

    def _on_tensorrt(
        self, engine: str, name: str, library: Mapping[str, str], capacity: int, requests: int
    ) -> list[PolygraphyCommand]:
        """Two command lines: save the reference outputs with KV buffers of the engine's size, then compare the engine."""
        variables = {"SPACEPORT_SLOTS": str(capacity), "SPACEPORT_REQUESTS": str(requests)}
        source = "ONNX Runtime" if self.checkpoint is None else "PyTorch"
        file = f"{source.replace(' ', '').lower()}-{capacity}.json"
        flags = ["--trt", "--model-type", "engine", "--load-outputs", file, *self.tolerances]
        saving = f"save the outputs of {source} with {capacity} KV slots"
        return [
            PolygraphyCommand(saving, self._saved(file, variables)),
            PolygraphyCommand(f"compare {name} with {source}", self._run({**library, **variables}, engine, *flags)),
        ]

    def _saved(self, file: str, variables: Mapping[str, str]) -> str:
        """The command line that saves the reference outputs."""
        if self.checkpoint is None:
            return self._on_provider(variables, "cpu", "--save-outputs", file)
        folders = [str(folder.resolve()) for folder in (self.bundle.path, self.checkpoint)]
        return _command(variables, ["spaceport", "check", *folders, "--save-outputs", file])

    def _on_provider(self, variables: Mapping[str, str], provider: str, *flags: str) -> str:
        return self._run(variables, self.model, "--onnxrt", "--providers", provider, *flags)

    def _run(self, variables: Mapping[str, str], model: str, *flags: str) -> str:
        named = {**variables, "SPACEPORT_BUNDLE": str(self.bundle.path.resolve())}
        loader = str(Path(__file__).resolve())
        return _command(named, ["polygraphy", "run", model, "--data-loader-script", loader, *flags])


def _profiles(signature: Signature) -> list[str]:
    """The flags of two optimization profiles, for decode steps and for prefill: minimum, optimum and maximum shapes."""
    wanted = logit_rows(_PROMPT_ROWS, signature.row_logits)
    flags: list[str] = []
    for rows, logits in ((_STEP_ROWS, _STEP_ROWS), (_PROMPT_ROWS, wanted)):
        for which, share in (("min", 0), ("opt", 1), ("max", 1)):
            sizes = {
                "B": _REQUESTS if which == "max" else 1,
                "T": rows if share else 1,
                "R": logits if share else 1,
                "A": _CAPACITY if share else VISIBLE_STEP,
                "S": _CAPACITY,
            }
            flags.append(f"--trt-{which}-shapes")
            for tensor in signature.inputs:
                shape = ",".join(str(sizes[size] if isinstance(size, str) else size) for size in tensor.shape)
                flags.append(f"{tensor.name}:[{shape}]")
    return flags


def _library(flavour: str) -> dict[str, str]:
    return {"POLYGRAPHY_USE_TENSORRT_RTX": "1"} if flavour == "tensorrt-rtx" else {}


def _command(variables: Mapping[str, str], words: Sequence[str]) -> str:
    settings = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    return f"{settings}{shlex.join(words)}"
