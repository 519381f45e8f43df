"""Peft adapter: the modules, ranks and scales of an adapter of peft in a base model, and its tensors."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.exporter.mechanisms import read_tensors
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.gated import MaskAdapter, adapter_state, gate_model
from spaceport.graphs.traits import different_names
from spaceport.tools.adopt.peft_config import WEIGHTS_FILE, read_peft_config
from spaceport.tools.adopt.plan import PublishedWeights

_PREFIX = "base_model.model."  # peft's wrapper around a model
_NAME = "default"
_RENAMED = ("model.", "encoder.")  # a part of the converted model, and its name in Nemotron-Labs-Diffusion
_HALVES = {"A": "lora_A", "B": "lora_B"}
_ADVICE = "copy the adapter folder again"


@dataclass(frozen=True)
class LoraModule:
    """A low-rank adapter of one linear module, as its file has it."""

    rank: int
    scale: float  # of the product of B and A


def read_peft_adapter(folder: Path, checkpoint: Checkpoint, mask_ids: tuple[int, ...]) -> PublishedWeights:
    """The adapter in a folder, checked against the configuration of its base model; no weights are loaded."""
    config, base = read_peft_config(folder)
    modules = _modules(folder, config, checkpoint)
    rank = max(module.rank for module in modules.values())
    scales = {module.scale for module in modules.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0  # different ones are multiplied into B
    model = _empty_model(checkpoint)
    try:
        adapter = gate_model(model, mask_ids, rank, scale * rank, tuple(modules))
    except InputFault as error:
        raise CheckpointError(f"{folder}: {error}; an adapter on other modules cannot act on mask rows only") from error
    _check_shapes(
        folder, checkpoint, modules, {name: tuple(one.shape) for name, one in adapter_state(model).items()}, base
    )
    report = {
        "folder": str(folder),
        "named_base": base,
        "modules": len(modules),
        **adapter.entry,
        "scales": sorted({module.scale for module in modules.values()}),
    }
    return PublishedWeights(
        "adapter",
        folder,
        adapter,
        report,
        lambda: (replace(adapter, tensors=_adapter_tensors(folder, modules, adapter)), None),
    )


def _adapter_tensors(folder: Path, modules: Mapping[str, LoraModule], adapter: MaskAdapter) -> dict[str, Tensor]:
    """A and B of each module with one rank and one scale, in the narrowest type that holds them exactly."""
    stored = read_tensors(folder / WEIGHTS_FILE, _ADVICE)
    published = _published_names(modules, stored)
    rank, scale = adapter.rank, adapter.alpha / adapter.rank
    found: dict[str, Tensor] = {}
    types = set()
    for name, module in modules.items():
        a, b = (stored[_tensor(published[name], half)] for half in _HALVES)
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise CheckpointError(f"{folder / WEIGHTS_FILE}: {name} has numbers that are not finite; {_ADVICE}")
        types |= {a.dtype, b.dtype}
        missing = rank - module.rank  # rows and columns of zeros: the product is the same
        found[f"{name}.A"] = torch.nn.functional.pad(a.float(), (0, 0, 0, missing))
        factor = 1.0 if len({other.scale for other in modules.values()}) == 1 else module.scale / scale
        found[f"{name}.B"] = torch.nn.functional.pad(b.float(), (0, missing)) * factor
    own = types.pop() if len(types) == 1 else torch.float32
    exact = all(torch.equal(tensor.to(own).float(), tensor) for tensor in found.values())
    return {name: tensor.to(own if exact else torch.float32) for name, tensor in found.items()}


def _modules(folder: Path, config: LoraConfig, checkpoint: Checkpoint) -> dict[str, LoraModule]:
    """The modules that peft itself gives an adapter to, with their ranks and scales."""
    model = _empty_model(checkpoint)
    names = [name for name, _ in model.named_modules()]
    targets = config.target_modules
    absent = (
        []
        if isinstance(targets, str)
        else sorted(one for one in targets or () if not any(name == one or name.endswith(f".{one}") for name in names))
    )
    if absent:
        raise CheckpointError(_wrong_base(folder, checkpoint, f"has no module {absent[0]}, which target_modules names"))
    try:
        with warnings.catch_warnings():  # about weights of the base model that are tied
            warnings.simplefilter("ignore")
            adapted: Any = inject_adapter_in_model(config, model, _NAME, low_cpu_mem_usage=True)
    except (ValueError, TypeError, NotImplementedError, re.error) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise CheckpointError(_wrong_base(folder, checkpoint, f"cannot have this adapter: {reason}")) from error
    return {
        name: LoraModule(layer.r[_NAME], float(layer.scaling[_NAME]))
        for name, layer in adapted.named_modules()
        if isinstance(layer, LoraLayer)
    }


def _check_shapes(
    folder: Path,
    checkpoint: Checkpoint,
    modules: Mapping[str, LoraModule],
    padded: Mapping[str, tuple[int, ...]],
    base: str | None,
) -> None:
    """Raise unless the file has exactly the tensors of these modules; reads only its header."""
    file = folder / WEIGHTS_FILE
    try:
        with safe_open(file, "pt") as opened:
            found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}: {_ADVICE}") from error
    published = _published_names(modules, found)
    expected = {
        _tensor(published[name], half): _with_rank(padded[f"{name}.{half}"], half, module.rank)
        for name, module in modules.items()
        for half in _HALVES
    }
    if wrong := different_names(found.keys(), expected.keys()):
        raise CheckpointError(
            f"{file}: {wrong}: expected exactly A and B of the {len(modules)} modules that adapter_config.json selects in "
            f"{checkpoint.folder}; {_ADVICE}, or give its base model{_called(base)}"
        )
    for name, shape in found.items():
        if shape != expected[name]:
            rank = 0 if ".lora_A." in name else 1
            if len(shape) == 2 and shape[1 - rank] == expected[name][1 - rank]:
                advice = f"the rank in adapter_config.json is {expected[name][rank]}: {_ADVICE}"
            else:
                advice = f"the sizes are those of {checkpoint.folder}: give the adapter's base model{_called(base)}"
            raise CheckpointError(f"{file}: {name} has shape {shape}: expected {expected[name]}; {advice}")


def _tensor(module: str, half: str) -> str:
    """The name of a tensor in the file of an adapter."""
    return f"{_PREFIX}{module}.{_HALVES[half]}.weight"


def _published_names(modules: Iterable[str], tensors: Iterable[str]) -> dict[str, str]:
    """The name of each module in the file of an adapter, which may be that of Nemotron-Labs-Diffusion."""
    own, published = _RENAMED
    if not any(name.startswith(_PREFIX + published) for name in tensors):
        return {name: name for name in modules}
    return {name: published + name.removeprefix(own) for name in modules}


def _with_rank(shape: tuple[int, ...], half: str, rank: int) -> tuple[int, ...]:
    return (rank, shape[1]) if half == "A" else (shape[0], rank)


def _called(base: str | None) -> str:
    return "" if base is None else f", which it calls {base}"


def _wrong_base(folder: Path, checkpoint: Checkpoint, reason: str) -> str:
    return f"{folder}: its base model {checkpoint.folder} {reason}: expected the base model that the adapter was trained on"


def _empty_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(checkpoint.config), attn_implementation="eager", trust_remote_code=checkpoint.remote_code
        )
    return model
