"""Quantize: quantize a model in place, so that from then on PyTorch computes with the same weights as its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.calibration import calibration_texts
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.signature import Activations, KvCache, Lowering, Weights
from spaceport.graphs.gated import GatedLinear
from spaceport.graphs.gptq import OnLayers, rounded_layers
from spaceport.graphs.int8 import IntegerLinear, IntegerModel, QuantizedEmbedding, fake_quantize, quantize_rows
from spaceport.graphs.integer_attention import AttentionRecorder
from spaceport.graphs.rotation import rotate_model
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

# Larger relative differences between a weight and its int8 form come from another weight. Rounding to 8 bits costs about
# 1 %, GPTQ up to twice as much.
_LARGEST_ERROR = 0.25


@torch.no_grad()
def quantize_model(
    model: PreTrainedModel,
    weights: Weights,
    activations: Activations,
    lowering: Lowering,
    stored: IntegerModel | None = None,
    prompts: tuple[Tensor, ...] = (),
    excluded: tuple[int, ...] = (),
    on_layers: OnLayers = lambda done, total: None,
    kv_cache: KvCache = "same",
) -> Quantization:
    """Quantize the weights of a model in place.

    With int8 activations of one limb, the model is rotated first. Int8 layers are rounded by GPTQ on texts that the model
    samples after the prompts, without the tokens in `excluded`, or are those of a bundle (`stored`). With an int8 KV
    cache, the same texts determine the scales of keys and values."""
    if weights == "int4" and activations == "int8":
        return _with_embeddings(model, quantize_weights(model, weights, lowering), BLOCKS[lowering])
    if weights != "int8" or activations == "float":
        return quantize_weights(model, weights, lowering)
    modules = integer_modules(model)
    for name, module in modules.items():
        if not all(bool(torch.isfinite(rows).all()) for _, rows in rows_of(module.weight)):
            raise UnsupportedModel(
                f"{class_name(model)}, {name}: its weight holds infinities or NaN: save the checkpoint again"
            )
    limbs = LIMBS[activations]
    texts = None
    if stored is None:  # before the rotation, of which a streamed model computes a part whenever a layer runs
        texts = calibration_texts(model, prompts, excluded)
    rotation = rotate_model(model) if limbs == 1 else None
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    tied = [name for name, module in modules.items() if module.weight is embedding.weight]
    untied = {name: module for name, module in modules.items() if name not in tied}
    if stored is not None:
        layers, errors = _stored_layers(model, untied, stored)
        table = stored.embedding
        attention = stored.attention
    else:
        assert texts is not None
        recorder = AttentionRecorder(texts.real) if kv_cache == "int8" else None
        layers, errors = rounded_layers(model, untied, texts, on_layers, recorder)
        table = _quantized_table(embedding)
        attention = () if recorder is None else tuple(recorder.scales)
    assert table is not None
    errors["input embedding"] = replace_weight(embedding.weight, table.of_tokens)
    layers |= {name: IntegerLinear(table.codes.T, table.scale) for name in tied}
    integers = IntegerModel(limbs, layers, table, bool(tied), attention)
    return Quantization("int8", integers=integers, rotation=rotation, errors=errors)


def _stored_layers(
    model: PreTrainedModel, modules: Mapping[str, nn.Linear], stored: IntegerModel
) -> tuple[dict[str, IntegerLinear], dict[str, float]]:
    """The layers of a bundle, put into the modules of the model that it was made from."""
    errors = {}
    for name, module in modules.items():
        layer = stored.layers.get(name)
        if layer is None or layer.codes.T.shape != module.weight.shape:
            raise InputFault(
                f"{class_name(model)}: the graph has no int8 weight of {name} with {tuple(module.weight.shape)} values: "
                "expected the graph of this checkpoint"
            )
        errors[name] = replace_weight(module.weight, linear_rows(layer))
        if not errors[name] <= _LARGEST_ERROR:
            raise InputFault(
                f"{class_name(model)}: the int8 weight of {name} in the graph differs by {errors[name]:.0%} from the "
                "checkpoint's: expected the checkpoint that the bundle was made from"
            )
    return {name: stored.layers[name] for name in modules}, errors


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


def _quantized_table(embedding: nn.Embedding) -> QuantizedEmbedding:
    codes, scale = quantize_rows(embedding.weight)
    return QuantizedEmbedding(stored_beside(embedding.weight, codes), scale)


def quantize_inputs(model: PreTrainedModel, integers: IntegerModel) -> None:
    """Quantize and dequantize the inputs of a model's int8 layers in PyTorch from now on, as its engines do."""
    quantize = partial(fake_quantize, limbs=integers.limbs)
    for name in integers.layers:
        module = model.get_submodule(name)
        if isinstance(module, GatedLinear):  # the input of the adapter itself is not quantized
            module.base_input = quantize
        else:
            module.register_forward_pre_hook(lambda module, arguments: (quantize(arguments[0]), *arguments[1:]))
