"""Sizes of an export: bytes of the bundle's weights and peak memory, computed from a model without values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint_files import is_converted, is_gguf
from spaceport.graphs.contract.signature import DTYPES, Activations, Lowering, Precision, Weights
from spaceport.graphs.decoder import decoder_layers
from spaceport.graphs.gptq import sample_bytes
from spaceport.graphs.quantization import BLOCKS, block_of, limbs_of
from spaceport.graphs.quantize import quantizable_modules
from spaceport.graphs.rotation import rotation_sizes

INLINE = 256  # bytes; constants of up to this size are stored in model.onnx, all others in model.onnx.data
_FLOAT32 = DTYPES["float32"].bytes

# Fitted to the measured peaks of exports with 56 million to 7 billion parameters.
_LIBRARIES, _PARTS = 300_000_000, 50_000_000  # of a streamed export: libraries, and parts of 16 MB in several forms
_GRAPH_LAYER = 8_000_000  # of the traced graph, per layer
_MATRICES = 1.3  # the largest layer or embedding, with what is computed from it
_IN_MEMORY, _COPIES = 600_000_000, 2  # of an export of a model in memory: libraries and graph; bytes per byte of it


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of a model's weights."""

    data: int  # model.onnx.data
    quantized: int  # number of quantized weights
    unnamed: int  # bytes of the codes and scales that a streamed export holds in files without a name


def stored_bytes(
    model: PreTrainedModel, dtype: Precision, weights: Weights, activations: Activations, lowering: Lowering
) -> StoredBytes:
    """The bytes that an export stores for a model; raise if no layer of it can be quantized."""
    integers = limbs_of(weights, activations) > 0
    element, blocks = DTYPES[dtype].bytes, BLOCKS[lowering] if weights == "int4" else ()
    embedding, head = cast(nn.Embedding, model.get_input_embeddings()), model.get_output_embeddings()
    modules = {} if weights == "same" else quantizable_modules(model, weights, activations, lowering)
    quantized: list[nn.Linear | nn.Embedding] = [*modules.values()]
    if weights == "int4" and activations == "int8" and type(head) is nn.Linear and block_of(head.in_features, blocks):
        tables = [embedding]  # the two embeddings are separated, and each is quantized
        quantized.append(head)
        shared = False
    else:
        tables = [embedding] if integers else []
        shared = any(module.weight is table.weight for module in quantized for table in tables)
    scales = [
        len(module.weight)
        * (module.weight.shape[1] // (block_of(module.weight.shape[1], blocks) or module.weight.shape[1]))
        for module in quantized
    ]
    stored = [module.weight.numel() for module in quantized if not (shared and module.weight is embedding.weight)]
    replaced = {id(module.weight) for module in (*quantized, *tables)}
    sizes = [
        *(parameter.numel() * element for parameter in model.parameters() if id(parameter) not in replaced),
        *_buffers(model),
        *(-(-size // 2) if weights == "int4" else size for size in stored),
        *(size * (_FLOAT32 if integers else element) for size in scales),
        *(size for table in tables for size in (table.weight.numel(), _FLOAT32 * table.num_embeddings)),
        *(element * count for count in (rotation_sizes(model) if integers and activations == "int8" else ())),
    ]
    count = sum(stored) + sum(table.weight.numel() for table in tables)
    data = sum(size for size in sizes if size > INLINE)
    return StoredBytes(data, count, count if integers else count + element * sum(scales))


def _buffers(model: PreTrainedModel) -> Iterator[int]:
    """Bytes of the rotary frequencies and other constants, each once."""
    seen = set()
    for name, buffer in model.named_buffers():
        kind = (name.rsplit(".", 1)[-1], tuple(buffer.shape))
        if kind not in seen and not name.endswith("original_inv_freq"):
            seen.add(kind)
            yield buffer.numel() * buffer.element_size()


@dataclass(frozen=True)
class ExportMemory:
    """Estimated peak memory of an export, in bytes."""

    streamed: bool  # whether weights are read layer by layer; otherwise the model is in memory
    libraries: int
    graph: int  # traced graph
    weights: int

    @property
    def total(self) -> int:
        return self.libraries + self.graph + self.weights


def is_streamed(
    folder: Path, remote_code: bool, model: PreTrainedModel, headers: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether an export reads the weights of a base model layer by layer.

    `headers` has the shapes of the tensors in its safetensors files; it is empty if there are no such files yet."""
    if is_gguf(folder) or is_converted(folder) or remote_code:
        return False
    matrices = Counter(tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() > 1)
    stored = Counter(shape for shape in headers.values() if len(shape) > 1)
    return not headers or matrices <= stored


def export_memory(
    model: PreTrainedModel, dtype: Precision, layers: int, streamed: bool, base_parameters: int, rounds: bool = False
) -> ExportMemory:
    """The memory of an export of a model, whose base model has this number of parameters.

    If drafts add others, these and both embeddings are in memory; so are sampled texts if it `rounds` weights by GPTQ."""
    size, parameters = DTYPES[dtype].bytes, _count(model)
    if not streamed:
        return ExportMemory(False, _IN_MEMORY, 0, _COPIES * parameters * size)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    outer = {id(module.weight): module.weight.numel() for module in embeddings if module is not None}
    largest = max([*map(_count, decoder_layers(model, layers)), *outer.values()])
    held = sum(outer.values()) + max(0, parameters - base_parameters) if parameters != base_parameters else 0
    weights = int(size * (_MATRICES * largest + held)) + (sample_bytes(model) if rounds else 0)
    return ExportMemory(True, _LIBRARIES + _PARTS, layers * _GRAPH_LAYER, weights)


def _count(module: nn.Module) -> int:
    """Parameters of a module, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())
