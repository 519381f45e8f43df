"""Quantize: quantize a model in place, so that from then on PyTorch computes with the same weights as its engines."""

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
from spaceport.graphs.streamed_weights import copy_of, rows_of, stored_beside
from spaceport.graphs.traits import UnsupportedModel, class_name
from spaceport.graphs.weight_quantization import (
    BLOCKS,
    Quantization,
    linear_modules,
    linear_rows,
    quantize_weight,
    quantize_weights,
    replace_weight,
)

LIMBS: dict[Activations, int] = {"int8": 1, "int8x2": 2}

# The scales of a model's linear modules, by name; modules with the same input share one input scale.
ModelScales = Mapping[str, LinearScales]


def quantize_model(
    model: PreTrainedModel,
    weights: Weights,
    activations: Activations,
    lowering: Lowering,
    scales: ModelScales | None = None,
    prompts: tuple[Tensor, ...] = (),
    excluded: tuple[int, ...] = (),
) -> Quantization:
    """Quantize the weights of a model in place.

    Int8 layers use the given scales. Without scales, they are calibrated on completions of the prompts, which hold no
    token in `excluded`."""
    if weights == "int4" and activations == "int8":
        return _with_embeddings(model, quantize_weights(model, weights, lowering), BLOCKS[lowering])
    if weights != "int8" or activations == "float":
        return quantize_weights(model, weights, lowering)
    limbs = LIMBS[activations]
    modules = integer_modules(model)
    for name, module in modules.items():
        if not all(bool(torch.isfinite(rows).all()) for _, rows in rows_of(module.weight)):
            raise UnsupportedModel(
                f"{class_name(model)}, {name}: its weight holds infinities or NaN: save the checkpoint again"
            )
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    if scales is None:
        tied = frozenset(name for name, module in modules.items() if module.weight is embedding.weight)
        scales = calibrate(model, modules, calibration_texts(model, prompts, excluded), limbs, tied)
    if missing := sorted(modules.keys() - scales.keys()):
        raise InputFault(f"no scale of {missing[0]}: expected one for each of {len(modules)} linear layers")
    integers, errors = _integer_model(model, modules, scales, limbs)
    return Quantization("int8", integers=integers, errors=errors)


def _with_embeddings(model: PreTrainedModel, quantization: Quantization, blocks: Sequence[int]) -> Quantization:
    """Quantize also the output embedding (int4) and the input embedding (int8); tied embeddings are separated."""
    embedding, head = cast(nn.Embedding, model.get_input_embeddings()), model.get_output_embeddings()
    quantized_head = quantize_weight(head.weight, "int4", blocks) if type(head) is nn.Linear else None
    if quantized_head is None:
        return quantization
    (name,) = [name for name, module in model.named_modules() if module is head]
    table = _quantized_table(embedding)
    untied_weights = table.codes.numel() if head.weight is embedding.weight else 0
    head.weight = copy_of(head.weight)  # untied
    errors = {
        name: replace_weight(head.weight, linear_rows(quantized_head)),
        "input embedding": replace_weight(embedding.weight, table.of_tokens),
    }
    return replace(
        quantization,
        layers={**quantization.layers, name: quantized_head},
        embedding=table,
        untied_weights=untied_weights,
        errors={**quantization.errors, **errors},
    )


def integer_modules(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The modules that become int8 layers, by name: linear modules with unshared weights, and the output embedding."""
    found = linear_modules(model)
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        found |= {name: module for name, module in model.named_modules() if module is head}
    return found


def _integer_model(
    model: PreTrainedModel, modules: Mapping[str, nn.Linear], scales: ModelScales, limbs: int
) -> tuple[IntegerModel, dict[str, float]]:
    """Quantize these modules and the input embedding to int8, in place; also return the error of each weight."""
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    tied = any(module.weight is embedding.weight for module in modules.values())
    table = _quantized_table(embedding)
    layers = {}
    for name, module in modules.items():
        if module.weight is embedding.weight:
            layers[name] = IntegerLinear(table.codes.T, table.scale, scales[name].input)
        else:
            layer = quantize_linear(module.weight, scales[name])
            layers[name] = replace(layer, codes=stored_beside(module.weight, layer.codes))
    errors = {
        name: replace_weight(module.weight, linear_rows(layers[name]))
        for name, module in modules.items()
        if module.weight is not embedding.weight
    }
    errors["input embedding"] = replace_weight(embedding.weight, table.of_tokens)
    return IntegerModel(limbs, layers, table, tied), errors


def _quantized_table(embedding: nn.Embedding) -> QuantizedEmbedding:
    codes, scale = quantize_rows(embedding.weight)
    return QuantizedEmbedding(stored_beside(embedding.weight, codes), scale)


class QuantizedInputs:
    """Hooks that quantize and dequantize the inputs of a model's int8 layers in PyTorch, as its engines do."""

    def __init__(self, model: PreTrainedModel, integers: IntegerModel) -> None:
        self.count = 0  # activations that were quantized so far
        self.clipped: dict[str, int] = {}  # activations beyond the range of a static scale, by module name
        self._limbs = integers.limbs
        for name, layer in integers.layers.items():
            module = model.get_submodule(name)
            if isinstance(module, GatedLinear):  # the input of the adapter itself is not quantized
                module.base_input = self._quantizer(name, layer.input)
            else:
                module.register_forward_pre_hook(self._hook(name, layer.input))

    def _hook(self, name: str, scale: InputScale) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        quantize = self._quantizer(name, scale)
        return lambda module, arguments: (quantize(arguments[0]), *arguments[1:])

    def _quantizer(self, name: str, scale: InputScale) -> Callable[[Tensor], Tensor]:
        def quantize(states: Tensor) -> Tensor:
            quantized, clipped = fake_quantize(states, scale, self._limbs)
            self.count += states.numel()
            if clipped:
                self.clipped[name] = self.clipped.get(name, 0) + clipped
            return quantized

        return quantize
