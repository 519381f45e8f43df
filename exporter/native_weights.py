"""The matrices of a native graph: rounded from a model's weights, or as a GGUF file stores them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.exporter.gguf_checkpoint import MODULES
from spaceport.exporter.gguf_file import GgufFile
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.parts import BLOCK, DecoderParts, Linear
from spaceport.graphs.quantization import expert_matrices, linear_modules, replace_weight
from spaceport.graphs.streamed_weights import values_of
from spaceport.kernels.gguf_weights import GGUF_BLOCKS, from_gguf
from spaceport.kernels.packing import (
    PANEL,
    WEIGHT_FORMATS,
    QuantizedWeights,
    WeightFormat,
    gate_order,
    pack,
    packed_bytes,
    quantize,
)

_PARTS = ("codes", "scales", "minima", "factors", "minimum_factors")  # arrays of quantized weights
_PANELS = 16 * PANEL  # outputs that are packed at a time: their numbers stay in the cache

# Packed formats of weights that are rounded. Embeddings have more bits, and each step reads the whole output embedding.
_MATRICES, _TABLES = {"int4": "int4_pair"}, {"int4": "int5"}
# Names of tensors in GGUF files by the last name of a linear module.
_GGUF_NAMES = {module.rpartition(".")[2]: name for name, module in MODULES.items()}
# Two tables hold the same weights if nearly all numbers differ by less than a step of 4 bits; other tables differ by
# several steps in most numbers. Some rows may be others, such as those of mask tokens.
_SAMPLED, _COARSEST, _SAME, MOST_OTHERS = 2048, 8, 0.99, 64
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


ReadOutputs = Callable[[NDArray[np.int64]], QuantizedWeights]


@dataclass(frozen=True)
class Matrix:
    """A matrix in a packed format, which is made in parts."""

    format: WeightFormat
    outputs: int
    inputs: int
    read: ReadOutputs

    @property
    def bytes(self) -> int:
        return packed_bytes(self.format, self.outputs, self.inputs)

    def packed(self) -> Iterator[NDArray[np.uint8]]:
        """The packed bytes in parts of whole panels."""
        for start in range(0, self.outputs, _PANELS):
            yield pack(self.read(np.arange(start, min(start + _PANELS, self.outputs))))

    def ordered(self, order: NDArray[np.int64]) -> Matrix:
        """The matrix with some of its outputs in another order."""
        return replace(self, outputs=len(order), read=lambda outputs: self.read(order[outputs]))


def other_rows(parts: DecoderParts) -> list[int] | None:
    """Tokens whose input embedding is not their output embedding.

    None unless there are few: both tables then were rounded from one, as in GGUF files of tied models."""
    if parts.tied:
        return []
    inputs, outputs = parts.embedding.weight, parts.head.module.weight
    if inputs.shape != outputs.shape:
        return None
    sampled = torch.arange(0, len(inputs), -(-len(inputs) // _SAMPLED))
    if _likeness(inputs[sampled], outputs[sampled]).mean() <= _SAME:
        return None
    starts = range(0, len(inputs), _SAMPLED)
    alike = torch.cat(
        [_likeness(inputs[start : start + _SAMPLED], outputs[start : start + _SAMPLED]) for start in starts]
    )
    others = np.flatnonzero(alike.numpy() < 0.5).tolist()
    return others if len(others) <= MOST_OTHERS else None


def _likeness(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The share of numbers of each row that are the same in two tables."""
    first, second = (table.detach().float().view(len(table), -1, BLOCK) for table in (inputs, outputs))
    near: Tensor = (first - second).abs() <= first.abs().amax(2, keepdim=True) / _COARSEST
    return near.float().mean((1, 2))


def format_of_matrix(name: str, weight: Tensor, format_name: str) -> str:
    """The format of a linear module's matrix: keys and values that several heads share keep 8 bits beside int4.

    They are a hundredth of the weights and a third of what rounding costs: with 4 bits for them, the mean KL divergence
    of Qwen2.5-Coder-0.5B is 0.025 instead of 0.016.
    """
    outputs, inputs = weight.shape
    shared = name.rpartition(".")[2] in ("k_proj", "v_proj") and 2 * outputs <= inputs
    return "int8" if shared and format_name == "int4" else format_name


def rounded(weight: Tensor | NDArray[np.float32], format_name: str, table: bool = False) -> Matrix:
    """A matrix with the nearest codes of a format, or a table of embeddings; inputs are padded to whole blocks."""
    packed = (_TABLES if table else _MATRICES).get(format_name, format_name)
    if weight.shape[1] % WEIGHT_FORMATS[packed].input_multiple:
        packed = format_name

    @cache
    def values() -> NDArray[np.float32]:
        return weight if isinstance(weight, np.ndarray) else values_of(weight).detach().float().numpy()

    outputs, inputs = weight.shape
    padding = -inputs % BLOCK

    def read(some: NDArray[np.int64]) -> QuantizedWeights:
        return quantize(np.pad(values()[some], ((0, 0), (0, padding))), packed)

    return Matrix(WEIGHT_FORMATS[packed], outputs, inputs + padding, read)


@dataclass(frozen=True)
class RoundedWeights:
    """Weights of a model in float32, rounded to a format; embeddings to one with more bits."""

    format_name: str  # also of the experts' matrices
    notes: tuple[str, ...] = ()
    changed: tuple[int, ...] = ()

    def one_table(self, parts: DecoderParts) -> bool:
        """Whether the output embedding's table is that of the input too."""
        return other_rows(parts) is not None

    def table(self, weight: Tensor, output: bool) -> Matrix:
        """The input or output embedding."""
        return rounded(weight, self.format_name, table=True)

    def linear(self, linear: Linear) -> Matrix:
        return rounded(linear.weight, format_of_matrix(linear.name, linear.weight, self.format_name))


def packed_size(file: GgufFile) -> int:
    """Bytes of the matrices of a GGUF file in a bundle, where a table that the file has twice may be stored once."""
    matrices = {name: tensor for name, tensor in file.tensors.items() if len(tensor.shape) > 1}
    if _OUTPUT in matrices and _holds_table_twice(file):
        del matrices[_EMBEDDING]
    total = 0
    for tensor in matrices.values():
        inputs, outputs = tensor.shape
        stored = GGUF_BLOCKS[tensor.kind if tensor.kind in GGUF_BLOCKS else "Q8_0"]
        total += packed_bytes(stored[2], outputs, inputs + -inputs % BLOCK)
    return total


def _size(file: GgufFile, name: str) -> int:
    return file.tensors[name].end - file.tensors[name].begin


def _holds_table_twice(file: GgufFile) -> bool:
    """Whether the output embedding is the table of the input in at least as many bits, by some of their rows."""
    tensors = [file.tensors[name] for name in (_EMBEDDING, _OUTPUT)]
    (inputs, outputs), same = tensors[0].shape, tensors[0].shape == tensors[1].shape
    rows = np.arange(0, outputs, -(-outputs // _SAMPLED))
    if (
        not same
        or _size(file, _OUTPUT) < _size(file, _EMBEDDING)
        or any(tensor.kind not in GGUF_BLOCKS for tensor in tensors)
    ):
        return False
    blocks = (file.data_of(tensor).reshape(outputs, -1)[rows].reshape(-1) for tensor in tensors)
    tables = [from_gguf(data, t.kind, len(rows), inputs) for data, t in zip(blocks, tensors, strict=True)]
    found = [torch.from_numpy(table.dequantized()) for table in tables if table is not None]
    return len(found) == 2 and bool(_likeness(*found).mean() > _SAME)


class StoredWeights:
    """Weights as a GGUF file stores them; those without an exact form are rounded to int8, and named in `rounded`."""

    format_name = "int8"

    def __init__(self, file: GgufFile, heads: int, kv_heads: int) -> None:
        self.file = file
        self.rounded: dict[str, str] = {}  # type by name of the tensor
        self.changed: set[int] = set()  # tokens whose rows in a table are rounded: they are not those of the file
        self.merged = False  # whether the input embedding is read from the table of the output
        # llama.cpp orders the rows of queries and keys of this architecture by rotated pairs.
        self.pairs = {"attn_q": heads, "attn_k": kv_heads} if file.architecture == "llama" else {}

    def one_table(self, parts: DecoderParts) -> bool:
        """Whether there is one table; if the file has it twice, the input's has larger steps."""
        if parts.tied or _OUTPUT not in self.file.tensors:
            return parts.tied
        self.merged = _size(self.file, _OUTPUT) >= _size(self.file, _EMBEDDING) and other_rows(parts) is not None
        return self.merged

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not exactly as the file stores it, a sentence each."""
        notes = [
            f"{name} is rounded to int8: no format has its {kind} weights exactly"
            for name, kind in self.rounded.items()
        ]
        if self.merged:
            notes.append(f"{_EMBEDDING} and {_OUTPUT} hold the same table: it is stored once, as in {_OUTPUT}")
        return tuple(notes)

    def table(self, weight: Tensor, output: bool) -> Matrix:
        """The table of the file, in which rows that the model has changed or added are rounded to the same format."""
        matrix = self._matrix(_OUTPUT if output and _OUTPUT in self.file.tensors else _EMBEDDING, weight)
        own = matrix.outputs

        def read(some: NDArray[np.int64]) -> QuantizedWeights:
            found, values = (
                matrix.read(np.minimum(some, own - 1)),
                weight[torch.from_numpy(some)].detach().float().numpy(),
            )
            different = (some >= own) | _differs(found, values)
            self.changed.update(some[different].tolist())
            return _with_changes(found, values, different)

        return replace(matrix, outputs=len(weight), read=read)

    def linear(self, linear: Linear) -> Matrix:
        layer, last = re.search(r"(\d+)\D*\.(\w+)$", linear.name).groups()  # type: ignore[union-attr]
        part = _GGUF_NAMES[last]
        name = f"blk.{layer}.{part}.weight"
        heads = self.pairs.get(part)
        order = None if heads is None else np.arange(linear.outputs).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        matrix = self._matrix(name, linear.weight, order)
        if name not in self.rounded:
            first = np.arange(min(matrix.outputs, PANEL))
            if linear.factor is not None:
                matrix = _scaled(matrix, linear.factor.numpy())
            if not np.allclose(matrix.read(first).dequantized(), linear.weight[: len(first)].numpy(), 1e-3, 1e-5):
                raise CheckpointError(f"{self.file.path}: the weights of {linear.name} are not those of tensor {name}")
        return matrix

    def _matrix(self, name: str, weight: Tensor, order: NDArray[np.int64] | None = None) -> Matrix:
        """The matrix of a tensor, whose rows may be in another order than the model's."""
        tensor = self.file.tensors[name]
        blocks, inputs = self.file.data_of(tensor).reshape(tensor.shape[1], -1), weight.shape[1]

        def read(some: NDArray[np.int64]) -> QuantizedWeights | None:
            rows = some if order is None else order[some]
            return from_gguf(blocks[rows].reshape(-1), tensor.kind, len(rows), inputs)

        # Only scales of Q4_0 can be too large for the exact form.
        checked = np.arange(len(blocks) if tensor.kind == "Q4_0" else 1)
        first = read(checked) if tensor.kind in GGUF_BLOCKS else None
        if first is None:
            self.rounded[name] = tensor.kind
            return rounded(weight, self.format_name)
        return Matrix(first.format, len(blocks), inputs, cast(ReadOutputs, read))


Weights = RoundedWeights | StoredWeights  # where the matrices of a model come from


def _differs(weights: QuantizedWeights, values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which rows of a model are not those that are stored."""
    largest = np.abs(values).max(axis=1)
    return cast(NDArray[np.bool_], np.abs(weights.dequantized() - values).max(axis=1) > 1e-3 * largest + 1e-9)


def _by_part(compute: Callable[..., NDArray[Any]], *weights: QuantizedWeights) -> QuantizedWeights:
    """Weights whose codes, scales and so on are each computed from those of others."""
    parts = [[getattr(each, part) for each in weights] for part in _PARTS]
    return QuantizedWeights(weights[0].format, *(None if some[0] is None else compute(*some) for some in parts))  # type: ignore[arg-type]


def _with_changes(
    weights: QuantizedWeights, values: NDArray[np.float32], different: NDArray[np.bool_]
) -> QuantizedWeights:
    """Stored weights, of which different rows are replaced by rounded values."""

    def changed(before: NDArray[Any], after: NDArray[Any]) -> NDArray[Any]:
        replaced: NDArray[Any] = before.copy()
        replaced[different] = after
        return replaced

    return _by_part(changed, weights, quantize(values[different], weights.format.name)) if different.any() else weights


def _scaled(matrix: Matrix, factors: NDArray[np.float32]) -> Matrix:
    """A matrix whose outputs are multiplied by powers of two: scales change, and codes do not."""

    def read(some: NDArray[np.int64]) -> QuantizedWeights:
        weights, own = matrix.read(some), factors[some][:, None]

        def scaled(values: NDArray[np.generic]) -> NDArray[np.float16]:
            return (values.astype(np.float32) * own).astype(np.float16)

        if weights.factors is None:
            minima = None if weights.minima is None else scaled(weights.minima)
            return replace(weights, scales=scaled(weights.scales), minima=minima)
        minimum = None if weights.minimum_factors is None else scaled(weights.minimum_factors)
        return replace(weights, factors=scaled(weights.factors), minimum_factors=minimum)

    return replace(matrix, read=read)


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """Matrices of one format, one below the other."""
    ends = np.cumsum([matrix.outputs for matrix in matrices])

    def read(some: NDArray[np.int64]) -> QuantizedWeights:
        of = np.searchsorted(ends, some, side="right")
        back = np.argsort(np.argsort(of, kind="stable"))
        parts = [
            matrix.read(some[of == index] - (ends[index] - matrix.outputs))
            for index, matrix in enumerate(matrices)
            if (of == index).any()
        ]
        return _by_part(lambda *arrays: np.concatenate(arrays)[back], *parts)

    return Matrix(matrices[0].format, int(ends[-1]), matrices[0].inputs, read)


def gate_matrix(matrix: Matrix) -> Matrix:
    """A matrix of a gate and of up below it, in the order of GateProduct; their width is padded to whole blocks."""
    width = matrix.outputs // 2
    halves = [_padded(matrix.ordered(np.arange(start, start + width))) for start in (0, width)]
    return stacked(halves).ordered(gate_order(padded_width(width)))


def _padded(matrix: Matrix) -> Matrix:
    """A matrix with outputs of weight 0 behind its own, up to whole blocks."""

    def read(some: NDArray[np.int64]) -> QuantizedWeights:
        weights, padding = matrix.read(np.minimum(some, matrix.outputs - 1)), some >= matrix.outputs
        codes, minima = weights.codes.copy(), weights.minima
        codes[padding] = weights.format.zero
        if minima is not None:
            minima = minima.copy()
            minima[padding] = 0
        return replace(weights, codes=codes, minima=minima)

    return replace(matrix, outputs=padded_width(matrix.outputs), read=read)


def padded_width(width: int) -> int:
    """The width of an MLP with whole blocks."""
    return -(-width // BLOCK) * BLOCK


def round_weights(model: PreTrainedModel, format_name: str) -> None:
    """Let a model compute with the weights that a native graph of it has; stored weights are those of the model."""
    if format_name == "stored":
        return
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(module.weight): cast(Tensor, module.weight) for module in modules}
    matrices = [
        (module.weight, rounded(module.weight, format_of_matrix(name, module.weight, format_name)))
        for name, module in linear_modules(model).items()
    ]
    for weight, matrix in (*matrices, *((table, rounded(table, format_name, table=True)) for table in tables.values())):
        inputs = int(weight.shape[1])

        def values(rows: slice, matrix: Matrix = matrix, inputs: int = inputs) -> Tensor:
            return torch.from_numpy(matrix.read(np.arange(rows.start, rows.stop)).dequantized()[:, :inputs])

        replace_weight(weight, values)
    for weight in expert_matrices(model).values():
        replace_weight(weight, partial(_of_experts, values_of(weight).detach().float(), format_name))


def _of_experts(weight: Tensor, format_name: str, experts: slice) -> Tensor:
    matrices = [rounded(each, format_name) for each in weight[experts]]
    values = np.stack([matrix.read(np.arange(matrix.outputs)).dequantized() for matrix in matrices])
    return torch.from_numpy(values[..., : weight.shape[2]])
