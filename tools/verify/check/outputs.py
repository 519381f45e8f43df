"""Outputs: the PyTorch model's outputs for the loader's inputs, as a file for `polygraphy run --load-outputs`."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from polygraphy.comparator import IterationResult, RunResults
from polygraphy.logger import G_LOGGER

from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.backends.on_torch import TorchEngine
from spaceport.tools.verify.check import polygraphy_loader


def save_outputs(engine: TorchEngine, manifest: Manifest, file: Path) -> int:
    """Write the graph outputs of every loader call, in the types of the bundle's graph; returns the number of calls."""
    dtype = manifest.signature.dtype
    stored_type: torch.dtype = getattr(torch, dtype)
    model_type: torch.dtype = getattr(torch, engine.signature.dtype)
    iterations = []
    for inputs in polygraphy_loader.calls(manifest):
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
