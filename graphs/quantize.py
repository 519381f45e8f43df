"""Quantize: quantize a model in place, so that from then on PyTorch computes with the same weights as its engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.calibration import CalibrationTexts, calibration_texts
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.signature import Activations, KvCache, Lowering, Weights
from spaceport.graphs.gated import GatedLinear
from spaceport.graphs.gptq import INT8, Layer, OnLayers, Rounding, rounded_layers
from spaceport.graphs.int8 import IntegerLinear, IntegerModel, QuantizedEmbedding, fake_quantize, quantize_rows
from spaceport.graphs.integer_attention import AttentionRecorder
from spaceport.graphs.rotation import rotate_model
from spaceport.graphs.streamed_weights import copy_of, stored_beside
from spaceport.graphs.traits import class_name
from spaceport.graphs.weight_quantization import (
    BLOCKS,
    INT4_LIMITS,
    Quantization,
    QuantizedWeight,
    block_of,
    finite_modules,
    int4_scales,
    linear_modules,
    linear_rows,
    nearest_weight,
    quantize_weights,
    replace_weight,
)

LIMBS: dict[Activations, int] = {"int8": 1, "int8x2": 2}

# What a bundle stores: int8 layers, or int4 weights by the names of their modules.
Stored = IntegerModel | Mapping[str, QuantizedWeight]

# Larger relative differences between a weight and its quantized form come from another weight. Rounding to 8 bits costs
# about 1 %, to 4 bits about 10 %, GPTQ up to twice as much.
_LARGEST_ERROR = 0.5


@torch.no_grad()
def quantize_model(
    model: PreTrainedModel,
    weights: Weights,
    activations: Activations,
    lowering: Lowering,
    stored: Stored | None = None,
    prompts: tuple[Tensor, ...] = (),
    excluded: tuple[int, ...] = (),
    on_layers: OnLayers = lambda done, total: None,
    kv_cache: KvCache = "same",
) -> Quantization:
    """Quantize the weights of a model in place.

    With int8 activations of one limb, the model is rotated first. Int4 weights and int8 layers are rounded by GPTQ on
    texts that the model samples after the prompts, without the tokens in `excluded`, or are those of a bundle (`stored`).
    With an int8 KV cache, the same texts determine the scales of keys and values."""
    if weights == "int4":
        assert not isinstance(stored, IntegerModel)
        sample = partial(calibration_texts, model, prompts, excluded)
        quantization = _int4_layers(model, BLOCKS[lowering], stored, sample, on_layers)
        return _with_embeddings(model, quantization, BLOCKS[lowering]) if activations == "int8" else quantization
    if weights != "int8" or activations == "float":
        return quantize_weights(model, weights)
    assert stored is None or isinstance(stored, IntegerModel)
    modules = finite_modules(model, integer_modules(model))
    limbs = LIMBS[activations]
    texts = None
    if stored is None:  # before the rotation, of which a streamed model computes a part whenever a layer runs
        texts = calibration_texts(model, prompts, excluded)
    rotation = rotate_model(model) if limbs == 1 else None
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    tied = [name for name, module in modules.items() if module.weight is embedding.weight]
    untied = {name: module for name, module in modules.items() if name not in tied}
    if stored is not None:
        layers, errors = _stored_layers(model, untied, stored.layers)
        table = stored.embedding
        attention = stored.attention
    else:
        assert texts is not None
        recorder = AttentionRecorder(texts.real) if kv_cache == "int8" else None
        layers, errors = rounded_layers(model, untied, texts, INT8, on_layers, recorder)
        table = _quantized_table(embedding)
        attention = () if recorder is None else tuple(recorder.scales)
    assert table is not None
    errors["input embedding"] = replace_weight(embedding.weight, table.of_tokens)
    layers |= {name: IntegerLinear(table.codes.T, table.scale) for name in tied}
    integers = IntegerModel(limbs, layers, table, bool(tied), attention)
    return Quantization("int8", integers=integers, rotation=rotation, errors=errors)


def _int4_layers(
    model: PreTrainedModel,
    blocks: Sequence[int],
    stored: Mapping[str, QuantizedWeight] | None,
    sample: Callable[[], CalibrationTexts],
    on_layers: OnLayers,
) -> Quantization:
    """The linear modules whose number of inputs a block size divides, in int4."""
    found = linear_modules(model).items()
    modules = {name: module for name, module in found if block_of(module.weight.shape[1], blocks) is not None}
    if not modules:
        raise OptionFault(
            f"weights is int4: {class_name(model)} has no linear layer that can be quantized (expected a number of inputs "
            f"divisible by {' or '.join(map(str, blocks))}): export it unquantized (--weights same)"
        )
    finite_modules(model, modules)
    if stored is not None:
        layers, errors = _stored_layers(model, modules, stored)
    else:
        layers, errors = rounded_layers(model, modules, sample(), int4_rounding(blocks, model.dtype), on_layers)
    return Quantization("int4", layers, errors=errors)


def int4_rounding(blocks: Sequence[int], dtype: torch.dtype) -> Rounding[QuantizedWeight]:
    """Int4 codes with the first block size that divides the number of inputs."""

    def size(weight: Tensor) -> int:
        found = block_of(weight.shape[1], blocks)
        assert found is not None
        return found

    return Rounding(
        INT4_LIMITS,
        lambda weight, sizes: int4_scales(weight, size(weight), dtype, sizes).T,
        lambda codes, scale: QuantizedWeight(codes, scale.contiguous(), len(codes) // len(scale)),
        lambda weight: nearest_weight(weight, "int4", size(weight)),
    )


def _stored_layers(
    model: PreTrainedModel, modules: Mapping[str, nn.Linear], stored: Mapping[str, Layer]
) -> tuple[dict[str, Layer], dict[str, float]]:
    """The layers of a bundle, put into the modules of the model that it was made from."""
    errors = {}
    for name, module in modules.items():
        layer = stored.get(name)
        if layer is None or layer.codes.T.shape != module.weight.shape:
            raise InputFault(
                f"{class_name(model)}: the graph has no quantized weight of {name} with {tuple(module.weight.shape)} values: "
                "expected the graph of this checkpoint"
            )
        errors[name] = replace_weight(module.weight, linear_rows(layer))
        if not errors[name] <= _LARGEST_ERROR:
            raise InputFault(
                f"{class_name(model)}: the quantized weight of {name} in the graph differs by {errors[name]:.0%} from the "
                "checkpoint's: expected the checkpoint that the bundle was made from"
            )
    return {name: stored[name] for name in modules}, errors


def _with_embeddings(model: PreTrainedModel, quantization: Quantization, blocks: Sequence[int]) -> Quantization:
    """Quantize also the output embedding (int4) and the input embedding (int8); tied embeddings are separated."""
    embedding, head = cast(nn.Embedding, model.get_input_embeddings()), model.get_output_embeddings()
    block = block_of(head.weight.shape[1], blocks) if type(head) is nn.Linear else None
    if block is None:
        return quantization
    quantized_head = nearest_weight(head.weight, "int4", block)
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
