"""Quantize a model in place, so that from then on PyTorch computes with the same weights as its engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.signature import Activations, KvCache, Lowering, Weights
from spaceport.graphs.gated import GatedLinear
from spaceport.graphs.gptq import CalibrationTexts, OnProgress, calibration_texts, rounded_layers
from spaceport.graphs.integer_attention import AttentionRecorder
from spaceport.graphs.quantization import (
    BLOCKS,
    INT8,
    UNQUANTIZED,
    Quantization,
    QuantizedWeight,
    WeightFormat,
    block_of,
    fake_quantize,
    int4_format,
    limbs_of,
    quantized_table,
    replace_weight,
    unclipped_format,
)
from spaceport.graphs.rotation import rotate_model
from spaceport.graphs.streamed_weights import copy_of, rows_of
from spaceport.graphs.traits import UnsupportedModel, class_name

# Larger relative differences between a weight and its quantized form come from another weight. Rounding to 8 bits costs
# about 1 %, to 4 bits about 10 %, GPTQ up to twice as much.
_LARGEST_ERROR = 0.5


@torch.no_grad()
def quantize_model(
    model: PreTrainedModel,
    weights: Weights,
    activations: Activations,
    lowering: Lowering,
    stored: Quantization | None = None,
    prompts: tuple[Tensor, ...] = (),
    excluded: tuple[int, ...] = (),
    on_progress: OnProgress = lambda sentence, done, total: None,
    kv_cache: KvCache = "same",
) -> Quantization:
    """Quantize the weights of a model's linear layers in place: they then hold the dequantized values.

    Norms, biases, adapters of mask rows and experts that are not linear modules stay, and so do embeddings beside float
    activations. With int8 activations of one limb, an int8 model is rotated first. Int4 weights, and int8 weights with int8
    activations, are rounded by GPTQ on texts that the model samples after the prompts, without the tokens in `excluded`,
    or are those of a bundle (`stored`). With an int8 KV cache, the same texts determine the scales of keys and values."""
    if weights == "same":
        return UNQUANTIZED
    modules = quantizable_modules(model, weights, activations, lowering)
    _require_finite(model, modules)
    sample = partial(calibration_texts, model, prompts, excluded, on_progress)
    if limbs := limbs_of(weights, activations):
        return _integer_layers(model, modules, limbs, stored, sample, on_progress, kv_cache)
    form = unclipped_format(weights, model.dtype) if weights != "int4" else int4_format(BLOCKS[lowering], model.dtype)
    if weights != "int4":
        layers, errors = _replaced(modules, lambda name: form.nearest(modules[name].weight))
    elif stored is not None:
        layers, errors = _stored_layers(model, modules, stored)
    else:
        layers, errors = rounded_layers(model, modules, sample(), form, on_progress)
    quantization = Quantization(weights, layers, errors=errors)
    return _with_embeddings(model, quantization, form) if activations == "int8" else quantization


def quantizable_modules(
    model: PreTrainedModel, weights: Weights, activations: Activations, lowering: Lowering
) -> dict[str, nn.Linear]:
    """The linear modules that are quantized, by name; raises if there are none. The model may be without values."""
    if limbs_of(weights, activations):
        return integer_modules(model)
    blocks = BLOCKS[lowering] if weights == "int4" else (1,)
    modules = {
        name: module
        for name, module in linear_modules(model).items()
        if block_of(module.in_features, blocks) is not None
    }
    if not modules:
        expected = f" (expected a number of inputs divisible by {' or '.join(map(str, blocks))})"
        raise OptionFault(
            f"weights is {weights}: {class_name(model)} has no linear layer that can be quantized"
            f"{expected if weights == 'int4' else ''}: export it unquantized (--weights same)"
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


def integer_modules(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The modules that become int8 layers, by name: linear modules with unshared weights, and the output embedding."""
    head = model.get_output_embeddings()
    heads = {name: module for name, module in model.named_modules() if module is head and type(head) is nn.Linear}
    return linear_modules(model) | heads


def quantize_inputs(model: PreTrainedModel, quantization: Quantization) -> None:
    """Quantize and dequantize the inputs of a model's int8 layers in PyTorch from now on, as its engines do."""
    quantize = partial(fake_quantize, limbs=quantization.limbs)
    for name in quantization.layers if quantization.limbs else ():
        module = model.get_submodule(name)
        if isinstance(module, GatedLinear):  # the input of the adapter itself is not quantized
            module.base_input = quantize
        else:
            module.register_forward_pre_hook(lambda module, arguments: (quantize(arguments[0]), *arguments[1:]))


def _integer_layers(
    model: PreTrainedModel,
    modules: Mapping[str, nn.Linear],
    limbs: int,
    stored: Quantization | None,
    sample: Callable[[], CalibrationTexts],
    on_progress: OnProgress,
    kv_cache: KvCache,
) -> Quantization:
    """Int8 layers with int8 activations, and both embeddings in int8."""
    # sampled before the rotation, of which a streamed model computes a part whenever a layer runs
    texts = sample() if stored is None else None
    rotation = rotate_model(model) if limbs == 1 else None
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    tied = [name for name, module in modules.items() if module.weight is embedding.weight]
    untied = {name: module for name, module in modules.items() if name not in tied}
    if texts is None:
        assert stored is not None
        layers, errors = _stored_layers(model, untied, stored)
        table, attention = stored.embedding, stored.attention
    else:
        recorder = AttentionRecorder(texts.real) if kv_cache == "int8" else None
        layers, errors = rounded_layers(model, untied, texts, INT8, on_progress, recorder)
        table, attention = quantized_table(embedding.weight), () if recorder is None else tuple(recorder.scales)
    assert table is not None
    errors["input embedding"] = replace_weight(embedding.weight, table.of_outputs)
    layers |= dict.fromkeys(tied, table)
    return Quantization("int8", layers, limbs, table, bool(tied), attention, rotation, errors=errors)


def _require_finite(model: PreTrainedModel, modules: Mapping[str, nn.Linear]) -> None:
    for name, module in modules.items():
        if not all(bool(torch.isfinite(rows).all()) for _, rows in rows_of(module.weight)):
            raise UnsupportedModel(
                f"{class_name(model)}, {name}: its weight holds infinities or NaN: save the checkpoint again, or export it in "
                "float32"
            )


def _replaced(
    modules: Mapping[str, nn.Linear], layer_of: Callable[[str], QuantizedWeight]
) -> tuple[dict[str, QuantizedWeight], dict[str, float]]:
    """The quantized weight of each module, which then computes with it, and its relative error."""
    layers = {name: layer_of(name) for name in modules}
    return layers, {name: replace_weight(module.weight, layers[name].of_outputs) for name, module in modules.items()}


def _stored_layers(
    model: PreTrainedModel, modules: Mapping[str, nn.Linear], stored: Quantization
) -> tuple[dict[str, QuantizedWeight], dict[str, float]]:
    """The layers of a bundle, put into the modules of the model that it was made from."""
    for name, module in modules.items():
        layer = stored.layers.get(name)
        if layer is None or layer.codes.T.shape != module.weight.shape:
            raise InputFault(
                f"{class_name(model)}: the graph has no quantized weight of {name} with {tuple(module.weight.shape)} values: "
                "expected the graph of this checkpoint"
            )
    layers, errors = _replaced(modules, stored.layers.__getitem__)
    for name, error in errors.items():
        if not error <= _LARGEST_ERROR:
            raise InputFault(
                f"{class_name(model)}: the quantized weight of {name} in the graph differs by {error:.0%} from the "
                "checkpoint's: expected the checkpoint that the bundle was made from"
            )
    return layers, errors


def _with_embeddings(model: PreTrainedModel, quantization: Quantization, form: WeightFormat) -> Quantization:
    """Quantize also the output embedding (int4) and the input embedding (int8); tied embeddings are separated."""
    embedding, head = cast(nn.Embedding, model.get_input_embeddings()), model.get_output_embeddings()
    if type(head) is not nn.Linear or block_of(head.in_features, form.blocks) is None:
        return quantization
    quantized_head = form.nearest(head.weight)
    (name,) = [name for name, module in model.named_modules() if module is head]
    table = quantized_table(embedding.weight)
    untied_weights = table.codes.numel() if head.weight is embedding.weight else 0
    head.weight = copy_of(head.weight)  # untied
    errors = {
        name: replace_weight(head.weight, quantized_head.of_outputs),
        "input embedding": replace_weight(embedding.weight, table.of_outputs),
    }
    return replace(
        quantization,
        layers={**quantization.layers, name: quantized_head},
        embedding=table,
        untied_weights=untied_weights,
        errors={**quantization.errors, **errors},
    )
