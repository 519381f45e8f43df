"""Fold an orthogonal matrix into the weights of a model, so that no channel of its activations is an outlier.

Eight bits per activation fail on outliers: a few channels are hundreds of times larger than the others. An orthogonal
matrix spreads them over all channels. The residual stream is rotated by the weights that write to it and back by those
that read it, and so are the values of each attention head; norms without mean do not depend on the rotation. Only the
input of a down projection is rotated in the graph, by blocks, because it comes from a product of two activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from spaceport.graphs.attention import hooked
from spaceport.graphs.gated import GatedLinear
from spaceport.graphs.heads import heads_of
from spaceport.graphs.streamed_weights import (
    Parts,
    Streamed,
    in_parts,
    keep_values,
    rows_of,
    source_of,
    stream,
)
from spaceport.graphs.traits import UnsupportedModel, class_name, model_errors

_SEED = 1
_LARGEST_BLOCK = 128  # of a rotation in the graph
_LARGEST_FACTOR = 64  # of a rotation that is folded into weights: it is applied as a few small products
_SMALLEST_BLOCK = 8
_ROWS = 24  # of the compared text
_TOLERANCE = 0.02  # largest relative difference from the formula of a norm
_LOGIT_TOLERANCE = 1e-4  # largest difference of a logit after a rotation, relative to the largest one


@dataclass(frozen=True, eq=False)
class Orthogonal:
    """An orthogonal matrix Q: random signs, then the Kronecker product of small orthogonal matrices."""

    signs: Tensor  # float64
    factors: tuple[Tensor, ...]  # float64

    def times(self, rows: Tensor) -> Tensor:
        """rows @ Q, float64."""
        rotated = rows.double() * self.signs
        shape, before = rotated.shape, 1
        for factor in self.factors:
            size = len(factor)
            rotated = torch.einsum("abc,bd->adc", rotated.reshape(math.prod(shape[:-1]) * before, size, -1), factor)
            before *= size
        return rotated.reshape(shape)

    @property
    def matrix(self) -> Tensor:
        return self.times(torch.eye(len(self.signs)))


def orthogonal(size: int, seed: int = _SEED) -> Orthogonal:
    """A random orthogonal matrix of this size, the same in each call."""
    generator = torch.Generator().manual_seed(seed)
    odd = size // (size & -size)
    factors = []
    if odd > 1:
        q, _ = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64))
        factors.append(q.contiguous())
    rest = size // odd
    while rest > 1:
        factors.append(hadamard(min(rest, _LARGEST_FACTOR)))
        rest //= len(factors[-1])
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    return Orthogonal(signs, tuple(factors))


def hadamard(size: int) -> Tensor:
    """The orthogonal matrix of a power of two whose values have one magnitude, float64; it is its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def block_size(width: int, largest: int = _LARGEST_BLOCK) -> int | None:
    """The largest power of two that divides a width; None if it is too small to spread an outlier."""
    size = min(width & -width, largest)
    return size if size >= _SMALLEST_BLOCK else None


class NotRotatable(UnsupportedModel):
    """A model whose residual stream cannot be rotated by its weights; the message says why."""


@dataclass
class _Norm:
    """A norm of the residual stream, and what reads its output."""

    module: nn.Module
    offset: float  # the gain is this plus the weight
    readers: list[nn.Module] = field(default_factory=list)

    @property
    def gain(self) -> Tensor:
        return cast(Tensor, self.module.weight).detach().double() + self.offset

    def make_plain(self) -> None:
        weight = cast(nn.Parameter, self.module.weight)
        keep_values(weight)
        weight.data.fill_(1 - self.offset)


def is_rotatable(model: PreTrainedModel) -> bool:
    """Whether the residual stream of a model can be rotated by its weights; the model may be without values."""
    try:
        with model_errors(model):
            _stream_of(model)
    except UnsupportedModel:
        return False
    return True


@torch.no_grad()
def rotate_model(model: PreTrainedModel) -> Orthogonal:
    """Rotate a model in place, and check its logits for a text; returns the rotation of its residual stream."""
    vocab_size = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(0, vocab_size, (1, _ROWS), generator=torch.Generator().manual_seed(0)).to(model.device)
    expected = model(input_ids=ids, use_cache=False).logits.float()
    residual = _stream_of(model)
    rotation = orthogonal(residual.width)
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    head = cast(nn.Linear, model.get_output_embeddings())
    tied = head.weight is embedding.weight
    _change(embedding.weight, rotation.times)
    if (rows := getattr(embedding, "input_rows", None)) is not None:
        rows.copy_(rotation.times(rows))
    for norm in residual.norms.values():
        gain = norm.gain
        for reader in norm.readers:
            if reader is head and tied:  # the rotated embeddings without the gain, which has to act before the rotation
                _multiply_input(head, rotation.times(rotation.matrix.T * gain))
                continue
            for parameter in _read_by(reader):
                _change(parameter, partial(_rotated, rotation=rotation, gain=gain))
        if head in norm.readers and (heads := heads_of(model)) is not None:
            heads.rotate_back(rotation.matrix.T * gain)
        norm.make_plain()
    _rotate_values(model, residual)
    for name, writer in residual.writers.items():
        joins_heads = _values_of(model.get_submodule(name.rpartition(".")[0])) is not None
        if type(writer) in (nn.Linear, GatedLinear) and not joins_heads:
            _rotate_in_graph(cast(nn.Linear, writer))
        for parameter in _written_by(writer):
            _change_outputs(parameter, rotation.times)
    difference = float((model(input_ids=ids, use_cache=False).logits.float() - expected).abs().max())
    if not difference <= _LOGIT_TOLERANCE * max(1.0, float(expected.abs().max())):
        raise UnsupportedModel(
            f"the logits of {class_name(model)} change by {difference:.3g} when its weights are rotated: expected equal "
            "ones; export it with --activations int8x2, which does not rotate it"
        )
    return rotation


class _Stream:
    """What reads and writes the residual stream of a model, recorded while it runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.width = cast(Tensor, model.get_input_embeddings().weight).shape[1]
        self.names = {module: name for name, module in model.named_modules()}
        self.norms: dict[int, _Norm] = {}  # by the memory of their outputs
        self.writers: dict[str, nn.Module] = {}
        self.reasons: list[str] = []  # why the model cannot be rotated
        self._held: list[Tensor] = []  # outputs of norms, so that their memory is not used twice
        self._read: set[nn.Module] = set()

    def attach(self) -> list[RemovableHandle]:
        """Watch the norms, and the modules with matrices."""
        handles = []
        for module, name in self.names.items():
            own = [parameter for parameter in module.parameters(recurse=False) if parameter.numel()]
            if any(parameter.dim() > 1 for parameter in own) and not isinstance(module, nn.Embedding):
                handles.append(module.register_forward_pre_hook(self._before_matrix))
                if isinstance(getattr(module, "down_proj", None), nn.Parameter):  # experts in one tensor
                    self.writers[name] = module
            elif [parameter.shape for parameter in own] in ([(self.width,)], [(self.width,), (self.width,)]):
                handles.append(module.register_forward_hook(partial(self._after_norm, _offset_of(module))))
        return handles

    def _after_norm(self, offset: float | None, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or output.shape[-1] != self.width:
            return
        if offset is None:
            self.reasons.append(f"{self.names[module]} is no RMSNorm")
            return
        self._held.append(output)
        self.norms[_memory_of(output)] = _Norm(module, offset)

    def _before_matrix(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        states = next((argument for argument in arguments if isinstance(argument, Tensor)), None)
        if states is None or states.dtype == torch.int64:
            return
        norm = self.norms.get(_memory_of(states))
        if norm is not None and states.shape[-1] == self.width:
            if module not in self._read:
                self._read.add(module)
                norm.readers.append(module)
        elif isinstance(module, nn.Linear) and module.out_features == self.width:
            self.writers[self.names[module]] = module


def _stream_of(model: PreTrainedModel) -> _Stream:
    """The readers and writers of the residual stream, from the tensors that modules pass on in one run."""
    residual = _Stream(model)
    # arguments that a model need not look into, which it cannot do without values
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    mask = torch.zeros(1, 1, 2, 2, dtype=model.dtype, device=model.device)
    with torch.no_grad(), hooked(residual.attach()):
        model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    norms = residual.norms.values()
    reasons = [
        *residual.reasons,
        *(f"nothing reads {residual.names[norm.module]}" for norm in norms if not norm.readers),
    ]
    if not any(model.get_output_embeddings() in norm.readers for norm in norms):
        reasons.append("no norm stands before its output embedding")
    if reasons:
        raise NotRotatable(f"{class_name(model)} cannot be rotated: {reasons[0]}")
    return residual


def _memory_of(tensor: Tensor) -> int:
    """What views of one tensor share, also where they have no values."""
    return int(tensor.untyped_storage()._cdata)


def _offset_of(module: nn.Module) -> float | None:
    """What is added to the weight of an RMSNorm to get its gain: 0 or 1; None for another module."""
    if getattr(module, "bias", None) is not None:
        return None
    weight = cast(nn.Parameter, module.weight)
    generator = torch.Generator().manual_seed(0)
    values, rows = (torch.randn(size, len(weight), generator=generator) for size in (1, 3))
    tried = copy(module)
    tried._parameters = {**module._parameters, "weight": nn.Parameter(values[0], requires_grad=False)}
    try:
        output = tried(rows)
    except (TypeError, ValueError, RuntimeError):
        return None
    normed = rows * (rows.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
    for offset in (0.0, 1.0):
        expected = normed * (values + offset)
        if output.shape == rows.shape and float((output - expected).norm()) <= _TOLERANCE * float(expected.norm()):
            return offset
    return None


def _read_by(module: nn.Module) -> list[Tensor]:
    """The parameters of a module that read the stream, by their last axis."""
    named = module.named_parameters(recurse=False)
    return [parameter for name, parameter in named if parameter.dim() > 1 and name not in ("B", "down_proj")]


def _written_by(module: nn.Module) -> list[Tensor]:
    """The parameters of a module that write to the stream, by their axis before the last, or their only one."""
    if not isinstance(module, nn.Linear):  # experts in one tensor
        return [cast(Tensor, module.down_proj)]
    return [module.weight, *([] if module.bias is None else [module.bias]), *_outputs_of_adapter(module)]


def _outputs_of_adapter(module: nn.Linear) -> list[Tensor]:
    return [module.B] if isinstance(module, GatedLinear) else []


def _inputs_of(module: nn.Linear) -> list[Tensor]:
    return [module.weight, *([module.A] if isinstance(module, GatedLinear) else [])]


def _values_of(attention: nn.Module) -> nn.Linear | None:
    """The linear module of an attention whose last outputs are the values."""
    values = getattr(attention, "v_proj", None) or getattr(attention, "qkv_proj", None)
    return values if isinstance(values, nn.Linear) else None


def _rotate_values(model: PreTrainedModel, residual: _Stream) -> None:
    """Rotate the values of each attention head, and the inputs of the modules that join the heads."""
    for name, joining in residual.writers.items():
        attention = model.get_submodule(name.rpartition(".")[0])
        values, size = _values_of(attention), getattr(attention, "head_dim", None)
        block = block_size(size) if isinstance(size, int) else None
        if values is None or block is None or not isinstance(joining, nn.Linear):
            continue
        config = model.config.get_text_config()
        count = size * (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        for parameter in (values.weight, *([] if values.bias is None else [values.bias]), *_outputs_of_adapter(values)):
            _change_outputs(parameter, partial(_by_blocks, block=block), count)
        for parameter in _inputs_of(joining):
            _change(parameter, partial(_by_blocks, block=block))


def _rotate_in_graph(linear: nn.Linear) -> None:
    """Rotate the input of a linear module, by blocks, where it is used."""
    block = block_size(linear.in_features)
    if block is not None:
        for parameter in _inputs_of(linear):
            _change(parameter, partial(_by_blocks, block=block))
        _multiply_input(linear, hadamard(block))


def _multiply_input(linear: nn.Linear, matrix: Tensor) -> None:
    """Multiply each block of a linear module's input by a matrix, from now on."""
    linear.register_buffer("input_rotation", matrix.to(linear.weight.dtype), persistent=False)

    def rotate(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states, matrix = arguments[0], cast(Tensor, module.input_rotation)
        if states.shape[-1] == len(matrix):
            return (torch.matmul(states, matrix), *arguments[1:])
        blocks = states.reshape(*states.shape[:-1], -1, len(matrix))
        return (torch.matmul(blocks, matrix).reshape(states.shape), *arguments[1:])

    linear.register_forward_pre_hook(rotate)


def _rotated(rows: Tensor, rotation: Orthogonal, gain: Tensor) -> Tensor:
    """Rows that read a rotated stream behind a norm without gain."""
    return rotation.times(rows.double() * gain)


def _by_blocks(rows: Tensor, block: int) -> Tensor:
    """Rows times a block-diagonal Hadamard matrix, float64."""
    return (rows.double().reshape(*rows.shape[:-1], -1, block) @ hadamard(block)).reshape(rows.shape)


def _change(parameter: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the values of a parameter by a function of its rows."""
    source = source_of(parameter)
    if source is not None:
        stream(parameter, Streamed(lambda: ((rows, change(values)) for rows, values in source.parts()), source.folder))
        return
    for rows, values in rows_of(parameter):
        parameter.data[rows] = change(values).to(parameter.dtype)


def _change_outputs(parameter: Tensor, change: Callable[[Tensor], Tensor], last: int | None = None) -> None:
    """Replace the values of a parameter by a function of its columns, or of the `last` values of each column."""
    source = source_of(parameter)
    if source is not None:
        parts = partial(_changed_columns, parameter, source.parts, change, last)
        stream(parameter, Streamed(parts, source.folder))
        return
    parameter.data = _with_changed_columns(parameter.data, change, last)


def _changed_columns(
    parameter: Tensor, parts: Callable[[], Parts], change: Callable[[Tensor], Tensor], last: int | None
) -> Parts:
    values = torch.cat([part.to(parameter.dtype) for _, part in parts()])
    return in_parts(parameter.shape, _with_changed_columns(values, change, last).__getitem__)


def _with_changed_columns(values: Tensor, change: Callable[[Tensor], Tensor], last: int | None) -> Tensor:
    columns = values.transpose(-1, -2) if values.dim() > 1 else values
    changed = columns.clone()
    kept = columns.shape[-1] - (last or columns.shape[-1])
    changed[..., kept:] = change(columns[..., kept:]).to(values.dtype)
    return changed.transpose(-1, -2).contiguous() if values.dim() > 1 else changed
