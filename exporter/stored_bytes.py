"""Stored bytes: the size of a bundle's weights, computed from the shapes of a model without values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.dtypes import DTYPES
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import Activations, Lowering, Precision, Weights
from spaceport.graphs.quantize import integer_modules
from spaceport.graphs.rotation import rotation_sizes
from spaceport.graphs.traits import class_name
from spaceport.graphs.weight_quantization import BLOCKS, block_of, linear_modules

INLINE = 256  # bytes; constants of up to this size are stored in model.onnx, all others in model.onnx.data
_FLOAT32 = DTYPES["float32"].bytes


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of a model's weights."""

    data: int  # model.onnx.data
    quantized: int  # number of quantized weights
    unnamed: int  # bytes of the codes and scales that a streamed export holds in files without a name


@dataclass(frozen=True)
class _Storage:
    """How the weights of a model are stored."""

    dtype: int  # bytes of an element of `--dtype`
    weights: Weights
    blocks: tuple[int, ...]
    integers: bool  # int8 layers with int8 activations: their scales are float32


def stored_bytes(
    model: PreTrainedModel, dtype: Precision, weights: Weights, activations: Activations, lowering: Lowering
) -> StoredBytes:
    """The bytes that an export stores for a model; raise if no layer of it can be quantized."""
    integers = weights == "int8" and activations != "float"
    storage = _Storage(DTYPES[dtype].bytes, weights, BLOCKS[lowering], integers)
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    modules = {} if weights == "same" else integer_modules(model) if integers else linear_modules(model)
    quantized = [module for module in modules.values() if _quantizable(module, storage)]
    if weights != "same" and not quantized:
        raise OptionFault(
            f"weights is {weights}: {class_name(model)} has no linear layer that can be quantized (expected a number of "
            f"inputs divisible by {' or '.join(map(str, storage.blocks))}): export it unquantized (--weights same)"
        )
    head = model.get_output_embeddings()
    separate = weights == "int4" and activations == "int8" and type(head) is nn.Linear and _quantizable(head, storage)
    if separate:  # the two embeddings are separated, and each is quantized
        quantized.append(cast(nn.Linear, head))
    table = embedding if separate or integers else None
    replaced = {id(module.weight) for module in (*quantized, *((table,) if table else ()))}
    sizes = [
        *(parameter.numel() * storage.dtype for parameter in model.parameters() if id(parameter) not in replaced),
        *_buffers(model),
        *_quantized_sizes(quantized, table, storage, separate),
        *(storage.dtype * count for count in (rotation_sizes(model) if integers and activations == "int8" else ())),
    ]
    count = sum(module.weight.numel() for module in quantized)
    if table is not None and not any(module.weight is table.weight for module in quantized if not separate):
        count += table.weight.numel()
    scales = sum(_scale_bytes(module, storage) for module in quantized)
    data = sum(size for size in sizes if size > INLINE)
    return StoredBytes(data, count, count if integers else count + scales)


def _quantizable(module: nn.Linear, storage: _Storage) -> bool:
    return storage.weights != "int4" or _block(module, storage) is not None


def _block(module: nn.Linear, storage: _Storage) -> int | None:
    """Inputs that share a scale of int4 weights."""
    return block_of(module.in_features, storage.blocks)


def _scale_bytes(module: nn.Linear, storage: _Storage) -> int:
    block = _block(module, storage) if storage.weights == "int4" else None
    scales = module.out_features * (1 if block is None else module.in_features // block)
    return scales * (_FLOAT32 if storage.integers else storage.dtype)


def _quantized_sizes(
    modules: list[nn.Linear], table: nn.Embedding | None, storage: _Storage, separate: bool
) -> Iterator[int]:
    """Bytes of the codes and of the scales of each quantized weight."""
    for module in modules:
        if storage.weights == "int4":
            yield -(-module.weight.numel() // 2)
        elif table is None or module.weight is not table.weight:  # otherwise the codes are those of the table
            yield module.weight.numel()
        yield _scale_bytes(module, storage)
    if table is not None and (separate or storage.integers):
        yield from (table.weight.numel(), _FLOAT32 * table.num_embeddings)


def _buffers(model: PreTrainedModel) -> Iterator[int]:
    """Bytes of the rotary frequencies and other constants, each once."""
    seen = set()
    for name, buffer in model.named_buffers():
        kind = (name.rsplit(".", 1)[-1], tuple(buffer.shape))
        if kind not in seen and not name.endswith("original_inv_freq"):
            seen.add(kind)
            yield buffer.numel() * buffer.element_size()
