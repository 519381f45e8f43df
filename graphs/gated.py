"""Gated: low-rank adapters that act on mask rows only, so that every other row stays what it was to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.traits import UnsupportedModel, name_of

ALL_LINEAR = "all-linear"  # as a target: every linear module inside the decoder layers


class AdapterFault(InputFault):
    """Tensors that are not those of the adapters in a model; the message says which."""


@dataclass(frozen=True)
class Adapter:
    """The kind of a model's gated adapters."""

    rank: int
    alpha: float  # what an adapter adds is multiplied by alpha / rank
    targets: tuple[str, ...]  # last parts of the names of the linear modules that have one


class Gate:
    """Which rows of the running call are mask rows: all adapters of a model go by the same one."""

    def __init__(self, mask_ids: Sequence[int]) -> None:
        self.mask_ids = tuple(dict.fromkeys(mask_ids))
        self.rows: Tensor | None = None  # B x T x 1, True = a mask row; nothing while the model does not run

    def open(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Forward pre-hook of a model: find the mask rows among its input ids."""
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if not isinstance(ids, Tensor):
            raise ValueError(f"{type(module).__name__} was called without input_ids: they say which rows are mask rows")
        self.rows = reduce(torch.logical_or, (ids == token for token in self.mask_ids))[..., None]

    def close(self, module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        """Forward hook of a model: its rows are no other call's."""
        self.rows = None

    def over(self, states: Tensor) -> Tensor:
        """The mask rows in the shape of what a module is given: B x T x 1, or B * T x 1."""
        if self.rows is None:
            raise RuntimeError(
                "a gated module was called while its model does not run: call the model with input_ids; "
                "for gradient checkpointing use checkpoint_layers"
            )
        return self.rows if states.dim() == self.rows.dim() else self.rows.flatten(0, 1)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For torch's checkpoint: nothing for the run itself, the rows of this run for its repetition."""
        return nullcontext(), _Repetition(self, self.rows)


class _Repetition(AbstractContextManager[None]):
    """A gate set to the rows of an earlier run."""

    def __init__(self, gate: Gate, rows: Tensor | None) -> None:
        self._gate = gate
        self._rows = rows
        self._kept: Tensor | None = None

    def __enter__(self) -> None:
        self._kept, self._gate.rows = self._gate.rows, self._rows

    def __exit__(self, *raised: object) -> None:
        self._gate.rows = self._kept


def _as_it_is(states: Tensor) -> Tensor:
    return states


class GatedLinear(nn.Linear):
    """A linear module with the weights of another, and what its adapter adds on mask rows."""

    def __init__(self, base: nn.Linear, gate: Gate, rank: int, scale: float) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias  # the same names and the same memory as before
        self.gate = gate
        self.scale = scale
        self.base_input: Callable[[Tensor], Tensor] = _as_it_is  # what the base weights are multiplied by
        self.A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, states: Tensor) -> Tensor:
        narrow = nn.functional.linear(states, self.A)
        # Gated where it is narrowest. Chosen, not multiplied by 0: an overflow of another row stays without effect.
        narrow = torch.where(self.gate.over(states), narrow, torch.zeros((), dtype=narrow.dtype, device=narrow.device))
        wide = self.B if self.scale == 1 else self.B * self.scale
        return super().forward(self.base_input(states)) + nn.functional.linear(narrow, wide)


def gate_model(
    model: PreTrainedModel, mask_ids: Sequence[int], rank: int, alpha: float, targets: Sequence[str]
) -> Adapter:
    """Give the linear modules of these names adapters of effect 0 that act on mask rows; what was given, names in full.

    The first halves are drawn from torch's global generator. What of the base weights is tuned stays the caller's choice."""
    if not mask_ids:
        raise UnsupportedModel(f"{name_of(model)} has no mask token: an adapter for mask rows needs at least one")
    found = _linear_modules(model, targets)
    gate = Gate(mask_ids)
    for name, module in found.items():
        model.set_submodule(name, GatedLinear(module, gate, rank, alpha / rank))
    # Most families call the model inside by its input ids too, and a caller may: for hidden states without logits.
    for caller in dict.fromkeys((model, model.base_model)):
        caller.register_forward_pre_hook(gate.open, with_kwargs=True)
        caller.register_forward_hook(gate.close)
    return Adapter(rank, alpha, tuple(dict.fromkeys(name.rpartition(".")[2] for name in found)))


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Turn gradient checkpointing on, with the gate of each run, if the model has one, kept for its repetition."""
    settings: dict[str, Any] = {"use_reentrant": False}
    for gate in {module.gate for module in _gated(model).values()}:  # all adapters of a model go by the same one
        settings["context_fn"] = gate.contexts
    # newer versions of transformers warn of the older name
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(settings)


def trainable_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The adapters' parameters, and nothing else of the model."""
    return [parameter for module in _gated(model).values() for parameter in (module.A, module.B)]


def base_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state of the model without its adapters, by the names it has without them."""
    adapters = adapter_state(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in adapters}


def adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters' tensors by name: MODULE.A is rank x in, MODULE.B is out x rank."""
    gated = _gated(model)
    return {f"{name}.{half}": getattr(module, half).detach() for name, module in gated.items() for half in ("A", "B")}


def load_adapter(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Fill the adapters of a gated model; every tensor of it must be there, and no other."""
    expected = adapter_state(model)
    for wrong, names in (("has none of", expected.keys() - state.keys()), ("has", state.keys() - expected.keys())):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise AdapterFault(
                f"adapter {wrong} {min(names)}{more}: expected {len(expected)} tensors such as {min(expected)}, "
                f"one A and one B for each gated module of {name_of(model)}"
            )
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)}: expected {tuple(expected[name].shape)}"
            raise AdapterFault(f"adapter tensor {name} has shape {shapes}, by the rank and the sizes of the model")
    for name, tensor in expected.items():
        tensor.copy_(state[name])


def fold_scale(model: PreTrainedModel) -> None:
    """Multiply the adapters' scale into their second halves, for a model that is not tuned further: a graph that holds
    the product needs not reckon it in each step."""
    for module in _gated(model).values():
        module.B.detach().mul_(module.scale)
        module.scale = 1.0


def _gated(model: PreTrainedModel) -> dict[str, GatedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GatedLinear)}


def _linear_modules(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The modules that the targets mean, by name; a target that means none, or something not linear, is refused."""
    inside = _inside_layers(model)
    linear = {name: module for name, module in inside.items() if type(module) is nn.Linear}
    if ALL_LINEAR in targets:
        chosen = inside
    else:
        chosen = {name: module for name, module in inside.items() if name.rpartition(".")[2] in targets}
    # a matrix that is no linear module's: Conv1D, fused experts, a linear module with a forward of its own
    others = {name for name, module in chosen.items() if name not in linear and _has_matrix(module)}
    missing = set(targets) - {ALL_LINEAR} - {name.rpartition(".")[2] for name in chosen}
    if others or missing or not chosen.keys() & linear.keys():
        names = sorted({name.rpartition(".")[2] for name in linear})
        wrong = sorted({f"{name.rpartition('.')[2]} ({type(inside[name]).__name__})" for name in others})
        raise UnsupportedModel(
            f"{name_of(model)} cannot have adapters on {', '.join([*wrong, *sorted(missing)] or targets)}: expected names "
            f"of linear modules in its decoder layers, which are {', '.join(names) or 'none'}"
        )
    return {name: module for name, module in linear.items() if name in chosen}


def _inside_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules inside the decoder layers, by name."""
    count = model.config.get_text_config().num_hidden_layers
    stacks = [
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    return {name: module for name, module in model.named_modules() if name.startswith(tuple(stacks[:1]))}


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
