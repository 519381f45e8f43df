"""Quantize: a model whose weights are rounded in place, so that from here on it computes with what its engines will."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.calibration import calibrate, calibration_texts
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.signature import Activations, Lowering, Weights
from spaceport.graphs.gated import GatedLinear
from spaceport.graphs.int8 import (
    InputScale,
    IntegerLinear,
    IntegerModel,
    LinearScales,
    QuantizedEmbedding,
    fake_quantize,
    quantize_linear,
    quantize_rows,
)
from spaceport.graphs.traits import UnsupportedModel, name_of
from spaceport.graphs.weight_quantization import BLOCKS, Quantization, linear_modules, quantize_weight, quantize_weights

LIMBS: dict[Activations, int] = {"int8": 1, "int8x2": 2}

# How the products of linear modules are scaled, by their names; those that are given the same rows share an input scale.
ModelScales = Mapping[str, LinearScales]


def quantize_model(
    model: PreTrainedModel,
    weights: Weights,
    activations: Activations,
    lowering: Lowering,
    scales: ModelScales | None = None,
    prompts: tuple[Tensor, ...] = (),
) -> Quantization:
    """Round the weights of a model. Integer products are scaled as `scales` says; without them, as the texts ask for that
    the model writes behind the prompts."""
    if weights == "int4" and activations == "int8":
        return _with_embeddings(model, quantize_weights(model, weights, lowering), BLOCKS[lowering])
    if weights != "int8" or activations == "float":
        return quantize_weights(model, weights, lowering)
    limbs = LIMBS[activations]
    modules = integer_modules(model)
    for name, module in modules.items():
        if not bool(torch.isfinite(module.weight).all()):
            raise UnsupportedModel(
                f"{name_of(model)}, {name}: its weight holds infinities or NaN: save the checkpoint again"
            )
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    if scales is None:
        fixed = frozenset(name for name, module in modules.items() if module.weight is embedding.weight)
        scales = calibrate(model, modules, calibration_texts(model, prompts), limbs, fixed)
    if missing := sorted(modules.keys() - scales.keys()):
        raise InputFault(f"no scale of {missing[0]}: expected one for each of {len(modules)} linear layers")
    return Quantization("int8", integers=_integers(model, modules, scales, limbs))


def _with_embeddings(model: PreTrainedModel, quantization: Quantization, blocks: Sequence[int]) -> Quantization:
    """The same with the output embedding among the layers, and the input embedding in int8; tied ones are no longer tied."""
    embedding, head = cast(nn.Embedding, model.get_input_embeddings()), model.get_output_embeddings()
    rounded = quantize_weight(head.weight, "int4", blocks) if type(head) is nn.Linear else None
    if rounded is None:
        return quantization
    (name,) = [name for name, module in model.named_modules() if module is head]
    table = QuantizedEmbedding(*quantize_rows(embedding.weight.detach()))
    tied = table.codes.numel() if head.weight is embedding.weight else 0
    head.weight = nn.Parameter(rounded.values.T.contiguous(), requires_grad=False)
    embedding.weight.data.copy_(table.values)
    return replace(
        quantization, layers={**quantization.layers, name: rounded}, table=table, extra_embedding_weights=tied
    )


def integer_modules(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The modules that become integer products: linear ones with a weight of their own, and the output embedding."""
    found = linear_modules(model)
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        found |= {name: module for name, module in model.named_modules() if module is head}
    return found


def _integers(
    model: PreTrainedModel, modules: Mapping[str, nn.Linear], scales: ModelScales, limbs: int
) -> IntegerModel:
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    tied = any(module.weight is embedding.weight for module in modules.values())
    table = QuantizedEmbedding(*quantize_rows(embedding.weight.detach()))
    products = {}
    for name, module in modules.items():
        if module.weight is embedding.weight:
            products[name] = IntegerLinear(table.codes.T, table.scale, scales[name].input)
        else:
            products[name] = quantize_linear(module.weight.detach(), scales[name])
    for name, module in modules.items():
        module.weight.data.copy_(products[name].values.T)
    embedding.weight.data.copy_(table.values)
    return IntegerModel(limbs, products, table, tied)


class QuantizedInputs:
    """Rounds the inputs of a model's linear modules as its engines do, while the model runs in PyTorch."""

    def __init__(self, model: PreTrainedModel, integers: IntegerModel) -> None:
        self.count = 0  # that were rounded
        self.clipped: dict[str, int] = {}  # values beyond the range of a fixed scale, by the name of the module
        self._limbs = integers.limbs
        for name, product in integers.products.items():
            module = model.get_submodule(name)
            if isinstance(module, GatedLinear):  # what adapters are given is not rounded
                module.base_input = self._rounding(name, product.input)
            else:
                module.register_forward_pre_hook(self._hook(name, product.input))

    def _hook(self, name: str, scale: InputScale) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        rounding = self._rounding(name, scale)
        return lambda module, given: (rounding(given[0]), *given[1:])

    def _rounding(self, name: str, scale: InputScale) -> Callable[[Tensor], Tensor]:
        def rounding(states: Tensor) -> Tensor:
            rounded, cut = fake_quantize(states, scale, self._limbs)
            self.count += states.numel()
            if cut:
                self.clipped[name] = self.clipped.get(name, 0) + cut
            return rounded

        return rounding
