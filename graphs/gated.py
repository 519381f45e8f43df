"""Gated: low-rank adapters (LoRA) that act on mask rows only; the results of all other rows stay bit-identical."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.json_fields import JsonField
from spaceport.graphs.mechanism import Mechanism, MechanismError, require_shapes, shapes_of
from spaceport.graphs.traits import UnsupportedModel, class_name, decoder_layers


class Gate:
    """The mask rows of the current call; all parts of a model that act on them share one gate."""

    def __init__(self, mask_ids: Sequence[int]) -> None:
        self.mask_ids = tuple(dict.fromkeys(mask_ids))
        self.rows: Tensor | None = None  # B x T x 1, True = mask row; None outside of calls
        self.uniform: bool | None = None  # True: all rows are mask rows; False: none is; None: as the input ids say

    def open(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Forward pre-hook of a model: find the mask rows in its input ids."""
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if not isinstance(ids, Tensor):
            raise ValueError(
                f"{type(module).__name__} was called without input_ids: expected input_ids, to find the mask rows"
            )
        self.rows = reduce(torch.logical_or, (ids == token for token in self.mask_ids))[..., None]

    def close(self, module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        """Forward hook of a model: forget the mask rows of the call."""
        self.rows = None

    @property
    def open_rows(self) -> Tensor:
        """The mask rows of the current call: B x T x 1."""
        if self.rows is None:
            raise RuntimeError(
                "a gated module was called while its model does not run: call the model with input_ids; "
                "for gradient checkpointing use checkpoint_layers"
            )
        return self.rows

    def rows_for(self, states: Tensor) -> Tensor:
        """The mask rows in the shape of a module's input: B x T x 1, or B * T x 1."""
        rows = self.open_rows
        return rows if states.dim() == rows.dim() else rows.flatten(0, 1)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for torch's gradient checkpointing: recompute with the mask rows of the original forward pass."""
        return nullcontext(), self._recomputing(self.rows)

    @contextmanager
    def _recomputing(self, rows: Tensor | None) -> Iterator[None]:
        previous, self.rows = self.rows, rows
        try:
            yield
        finally:
            self.rows = previous


def gate_of(model: PreTrainedModel, mask_ids: Sequence[int]) -> Gate:
    """A gate that opens with each call of a model, for all its parts."""
    gate = Gate(mask_ids)
    # The base model is hooked as well: callers may run it alone, for hidden states without logits.
    for caller in dict.fromkeys((model, model.base_model)):
        caller.register_forward_pre_hook(gate.open, with_kwargs=True)
        caller.register_forward_hook(gate.close)
    return gate


class _LowRankLinear(torch.autograd.Function):
    """x W^T + bias + scale (x A^T) B^T, with gradients for x, A and B. Matmuls run in the type of W."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        rows = states.to(weight.dtype).flatten(0, -2)
        down, up = a.to(weight.dtype), (b * scale).to(weight.dtype)
        low = rows @ down.T
        output = torch.nn.functional.linear(rows, weight, bias).addmm_(low, up.T)
        ctx.save_for_backward(rows, low, down, up, weight)
        ctx.scale, ctx.types, ctx.shape = scale, (states.dtype, a.dtype, b.dtype), states.shape
        return output.view(*states.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor, None]:
        rows, low, down, up, weight = ctx.saved_tensors
        gradient = outer[0].to(weight.dtype).flatten(0, -2)
        low_gradient = gradient @ up
        states = (gradient @ weight).addmm_(low_gradient, down).view(ctx.shape)
        types = ctx.types
        a = (low_gradient.T @ rows).to(types[1])
        b = (gradient.T @ low).to(types[2]) * ctx.scale
        return states.to(types[0]), None, None, a, b, None


def low_rank_linear(states: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The output of a frozen linear layer plus scale times the low-rank product of A (r x in) and B (out x r)."""
    with torch.autocast(states.device.type, enabled=False):
        return _LowRankLinear.apply(states, weight, bias, a, b, scale)  # type: ignore[no-any-return, no-untyped-call]


ALL_LINEAR = "all-linear"  # target: every linear module inside the decoder layers


@dataclass(frozen=True)
class MaskAdapter(Mechanism):
    """The gated adapters of a model."""

    name: ClassVar[str] = "mask_adapter"
    needs_mask_token: ClassVar[bool | None] = True

    rank: int
    alpha: float  # the output of an adapter is scaled by alpha / rank
    targets: tuple[str, ...]  # names of the linear modules with an adapter, or the ends of their names, such as q_proj
    # MODULE.A, rank x inputs, and MODULE.B, outputs x rank; empty: in the model itself.
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def entry(self) -> dict[str, Any]:
        return {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)}

    def state(self) -> Mapping[str, Tensor]:
        return self.tensors

    @classmethod
    def read(cls, entry: JsonField, tensors: Mapping[str, Tensor]) -> MaskAdapter:
        entries = entry.exactly("rank", "alpha", "targets")
        rank, alpha = entries["rank"].whole(1), entries["alpha"].number()
        if not 0 < alpha < math.inf:
            entries["alpha"].refuse("a number above 0")
        targets = tuple(target.text() for target in entries["targets"].items("names of linear modules"))
        if not targets:
            entries["targets"].refuse("a list of names of linear modules")
        for name, tensor in tensors.items():
            if tensor.dim() != 2 or tensor.shape[0 if name.endswith(".A") else -1] != rank:
                raise MechanismError(
                    f"{name} has shape {tuple(tensor.shape)}, the rank is {rank}: expected rank x in for A and out x "
                    "rank for B"
                )
        return cls(rank, alpha, targets, tensors)

    def apply(self, model: PreTrainedModel, mask_ids: Sequence[int]) -> None:
        gate_model(model, mask_ids, self.rank, self.alpha, self.targets)
        if self.tensors:
            load_adapter(model, self.tensors)
            fold_scale(model)


class GatedLinear(nn.Linear):
    """A linear module with the weights of another, plus the output of a low-rank adapter on mask rows."""

    def __init__(self, base: nn.Linear, gate: Gate, rank: int, scale: float) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias  # same parameter names, same memory
        self.gate = gate
        self.scale = scale
        self.A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, states: Tensor) -> Tensor:
        if self.gate.uniform is False:
            return super().forward(states)
        if self.gate.uniform:
            return low_rank_linear(states, self.weight, self.bias, self.A, self.B, self.scale)
        low_rank = nn.functional.linear(states, self.A)
        # The gate is applied to the smallest tensor. `where` instead of a product with 0: an overflow in another row
        # has no effect.
        low_rank = torch.where(
            self.gate.rows_for(states), low_rank, torch.zeros((), dtype=low_rank.dtype, device=low_rank.device)
        )
        scaled_b = self.B if self.scale == 1 else self.B * self.scale
        return super().forward(states) + nn.functional.linear(low_rank, scaled_b)


def gate_model(
    model: PreTrainedModel, mask_ids: Sequence[int], rank: int, alpha: float, targets: Sequence[str]
) -> MaskAdapter:
    """Add adapters to the target modules; returns their configuration with the targets expanded.

    A target is the end of a name, such as q_proj or layers.3.self_attn.q_proj, or ALL_LINEAR.

    A is initialized from torch's global generator, B with zeros, so that the adapters have no effect at first. Whether
    base weights require gradients is not changed."""
    if not mask_ids:
        raise UnsupportedModel(f"{class_name(model)} has no mask token: an adapter for mask rows needs at least one")
    modules = _linear_modules(model, targets)
    expanded = _expanded(modules, _inside_layers(model))
    gate = gate_of(model, mask_ids)
    for name, module in modules.items():
        model.set_submodule(name, GatedLinear(module, gate, rank, alpha / rank))
    return MaskAdapter(rank, alpha, expanded)


def gated_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """The mask tokens on whose rows the adapters of a model act; none for a model without adapters."""
    return next((module.gate.mask_ids for module in _gated(model).values()), ())


@contextmanager
def uniform_rows(model: PreTrainedModel, masks: bool) -> Iterator[None]:
    """Calls in which the caller guarantees that all rows are mask rows, or that none is: adapters cost less, or nothing."""
    gates = {module.gate for module in _gated(model).values()}  # at most one
    for gate in gates:
        gate.uniform = masks
    try:
        yield
    finally:
        for gate in gates:
            gate.uniform = None


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Enable gradient checkpointing; gated adapters recompute with the mask rows of the original forward pass."""
    settings: dict[str, Any] = {"use_reentrant": False}
    for gate in {module.gate for module in _gated(model).values()}:  # at most one
        settings["context_fn"] = gate.contexts
    # newer versions of transformers deprecate gradient_checkpointing_enable
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(settings)


def trainable_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters of the adapters."""
    return [parameter for module in _gated(model).values() for parameter in (module.A, module.B)]


def base_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict of the model without its adapters."""
    adapters = adapter_state(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in adapters}


def adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters' tensors by name: MODULE.A is rank x inputs, MODULE.B is outputs x rank."""
    gated = _gated(model)
    return {f"{name}.{half}": getattr(module, half).detach() for name, module in gated.items() for half in ("A", "B")}


def load_adapter(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Load the adapters of a gated model; the state must have exactly the tensors of its adapters."""
    expected = adapter_state(model)
    what = f"tensors such as {min(expected)}, one A and one B for each gated module of {class_name(model)}"
    require_shapes(shapes_of(state), shapes_of(expected), what)
    for name, tensor in expected.items():
        tensor.copy_(state[name])


def fold_scale(model: PreTrainedModel) -> None:
    """Fold the adapters' scale into B, so that the exported graph does not multiply by it in each step."""
    for module in _gated(model).values():
        module.B.detach().mul_(module.scale)
        module.scale = 1.0


def unfold_scale(model: PreTrainedModel, adapter: MaskAdapter) -> None:
    """Take the adapters' scale out of B again, so that they are trained as they were first."""
    for module in _gated(model).values():
        module.scale = adapter.alpha / adapter.rank
        module.B.detach().div_(module.scale)


def _gated(model: PreTrainedModel) -> dict[str, GatedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GatedLinear)}


def _linear_modules(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The target modules by name; raises for a target without modules, or with a weight matrix that is not linear."""
    in_layers = _inside_layers(model)
    linear = {name: module for name, module in in_layers.items() if type(module) is nn.Linear}
    if ALL_LINEAR in targets:
        targeted = in_layers
    else:
        targeted = {name: module for name, module in in_layers.items() if any(_ends(name, end) for end in targets)}
    # weight matrices of other modules: Conv1D, fused experts, subclasses of Linear with their own forward
    others = {name for name, module in targeted.items() if name not in linear and _has_matrix(module)}
    missing = {
        target for target in targets if target != ALL_LINEAR and not any(_ends(name, target) for name in targeted)
    }
    if others or missing or not targeted.keys() & linear.keys():
        names = sorted({name.rpartition(".")[2] for name in linear})
        wrong = sorted({f"{name.rpartition('.')[2]} ({type(in_layers[name]).__name__})" for name in others})
        raise UnsupportedModel(
            f"{class_name(model)} cannot have adapters on {', '.join([*wrong, *sorted(missing)] or targets)}: "
            f"expected names of linear modules in its decoder layers, which are {', '.join(names) or 'none'}"
        )
    return {name: module for name, module in linear.items() if name in targeted}


def _expanded(modules: Mapping[str, nn.Module], in_layers: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The shortest targets of these modules: a last name component where all layers have it, else the whole name."""
    last = {name: name.rpartition(".")[2] for name in modules}
    partly = {
        name.rpartition(".")[2] for name, module in in_layers.items() if name not in modules and _has_matrix(module)
    }
    return tuple(dict.fromkeys(name if end in partly else end for name, end in last.items()))


def _ends(name: str, target: str) -> bool:
    """Whether a target names a module."""
    return name == target or name.endswith(f".{target}")


def _inside_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules inside the decoder layers, by name."""
    layers = decoder_layers(model, model.config.get_text_config().num_hidden_layers)
    inside = {module for layer in layers for module in layer.modules()}
    return {name: module for name, module in model.named_modules() if module in inside}


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
