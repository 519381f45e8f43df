"""Loader: model inputs for stock Polygraphy, as a `--data-loader-script`.

polygraphy run BUNDLE/model.onnx --onnxrt --data-loader-script polygraphy_loader.py --validate

SPACEPORT_BUNDLE: the bundle, if the command line does not name its model.onnx. SPACEPORT_SLOTS: KV slots, if the graph or
engine has a fixed number. SPACEPORT_REQUESTS: maximum requests per call of the engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import Manifest
from spaceport.graphs.contract.signature import NUMPY, visible_length
from spaceport.runtime.bundle import read_manifest


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
