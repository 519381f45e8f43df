"""Quantize a model in place, so that from then on PyTorch computes with the same weights as its engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.formats import Weights
from spaceport.graphs.quantization import (
    BLOCKS,
    UNQUANTIZED,
    Quantization,
    QuantizedWeight,
    fake_quantize,
    int4_format,
    replace_weight,
    unclipped_format,
)
from spaceport.graphs.streamed_weights import rows_of
from spaceport.graphs.traits import UnsupportedModel, class_name


@torch.no_grad()
def quantize_model(model: PreTrainedModel, weights: Weights) -> Quantization:
    """Quantize the weights of a model's linear layers in place: they then hold the dequantized values.

    Embeddings, norms, biases, adapters of mask rows and experts that are not linear modules stay. Scales of int4 weights
    are those with the smallest error in each block."""
    if weights == "same":
        return UNQUANTIZED
    modules = quantizable_modules(model, weights)
    _require_finite(model, modules)
    form = int4_format(model.dtype) if weights == "int4" else unclipped_format(weights, model.dtype)
    layers, errors = _replaced(modules, lambda name: form.nearest(modules[name].weight))
    return Quantization(weights, layers, errors)


def quantizable_modules(model: PreTrainedModel, weights: Weights) -> dict[str, nn.Linear]:
    """The linear modules that are quantized, by name; raises if there are none. The model may be without values."""
    block = min(BLOCKS) if weights == "int4" else 1  # which divides all others
    modules = {name: module for name, module in linear_modules(model).items() if module.in_features % block == 0}
    if not modules:
        expected = f" (expected a number of inputs divisible by {' or '.join(map(str, BLOCKS))})"
        raise OptionFault(
            f"weights are {weights}: {class_name(model)} has no linear layer that can be quantized"
            f"{expected if weights == 'int4' else ''}: export it unquantized (--format float16)"
        )
    return modules


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear modules whose weight is not shared with another module, by name; without the output embedding."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)  # also subclasses: if one uses its weight in another way, the export fails
        and module is not model.get_output_embeddings()
        and uses[id(module.weight)] == 1
    }


def expert_matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of experts in a module (experts x outputs x inputs), by name."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if name.rpartition(".")[2] in ("gate_up_proj", "down_proj") and parameter.dim() == 3
    }


def quantize_inputs(model: PreTrainedModel, weights: Weights = "int8") -> None:
    """Round the inputs of linear modules and experts to 8 bits in PyTorch from now on, as native operators do."""
    paired, head = weights == "int4", model.get_output_embeddings()
    experts = {name.rpartition(".")[0] for name in expert_matrices(model)}

    def rounding(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (fake_quantize(arguments[0], paired and module is not head), *arguments[1:])

    for module in [*linear_modules(model).values(), head, *map(model.get_submodule, experts)]:
        module.register_forward_pre_hook(rounding)
    if experts:
        model.set_experts_implementation("batched_mm")  # in which what the gate gives can be replaced
    for module in map(cast(Any, model).get_submodule, experts):
        module._apply_gate = _rounding(module._apply_gate, paired)


def _rounding(apply_gate: Callable[[Tensor], Tensor], paired: bool) -> Callable[[Tensor], Tensor]:
    return lambda states: fake_quantize(apply_gate(states), paired)


def _require_finite(model: PreTrainedModel, modules: Mapping[str, nn.Linear]) -> None:
    for name, module in modules.items():
        if not all(bool(torch.isfinite(rows).all()) for _, rows in rows_of(module.weight)):
            raise UnsupportedModel(
                f"{class_name(model)}, {name}: its weight holds infinities or NaN: save the checkpoint again, or export it in "
                "float32"
            )


def _replaced(
    modules: Mapping[str, nn.Module], layer_of: Callable[[str], QuantizedWeight]
) -> tuple[dict[str, QuantizedWeight], dict[str, float]]:
    """The quantized weight of each module, which then computes with it, and its relative error."""
    layers = {name: layer_of(name) for name in modules}
    return layers, {
        name: replace_weight(cast(Tensor, module.weight), layers[name].of_outputs) for name, module in modules.items()
    }
