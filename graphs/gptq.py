"""Round the weights of linear layers so that the error of each output is small on texts that the model samples.

Columns are rounded one after the other, and the error of each is passed on to those that are not rounded yet, by the
inverse Hessian of the squared output error (Frantar et al., 2022). One decoder layer at a time is calibrated, with
inputs that come from the rounded earlier ones, and one layer at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.attention import hooked
from spaceport.graphs.decoder import decoder_layers
from spaceport.graphs.gated import uniform_rows
from spaceport.graphs.integer_attention import AttentionRecorder
from spaceport.graphs.quantization import QuantizedWeight, WeightFormat, block_of, replace_weight
from spaceport.graphs.streamed_weights import stored_beside, values_of

_TEXTS = 64
_LENGTH = 40  # sampled tokens of each text
_SINGLE_TOKENS = 8  # random tokens that texts begin with, beside the prompts
_MEMORY = 1 << 30  # bytes of the texts' keys and values; longer or more prompts, or a larger model, get fewer texts

_DAMPING = 0.01  # added to the Hessian's diagonal, relative to its mean
_BLOCK = 128  # columns whose errors are passed on to the later ones together
_WIDEST = 4096  # inputs of a Hessian; those of a wider layer are split, and errors stay within a part

# Called with the number of decoder layers that are rounded, and of all.
OnLayers = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class CalibrationTexts:
    """Texts of one batch, padded on the left."""

    ids: Tensor  # batch x tokens
    real: Tensor  # batch x tokens, bool; False: padding


def calibration_texts(
    model: PreTrainedModel, prompts: Sequence[Tensor] = (), excluded: Sequence[int] = ()
) -> CalibrationTexts:
    """Samples of a model after random single tokens and after the given prompts, the same in each call.

    Tokens in `excluded` are neither drawn nor sampled. All texts are sampled together, because a streamed model reads
    its weights in each step. Of more prompts than there is memory for, the first are used."""
    without = set(excluded)
    config = model.config.get_text_config()
    tokens = [token for token in range(int(config.vocab_size)) if token not in without]
    drawn = torch.randint(0, len(tokens), (_SINGLE_TOKENS, 1), generator=torch.Generator().manual_seed(0))
    positions = int(getattr(config, "max_position_embeddings", None) or 2048)
    length = max(1, min(_LENGTH, positions // 2))
    starts = [*torch.tensor(tokens)[drawn], *(prompt[0, -(positions - length) :].cpu() for prompt in prompts)]
    longest = max(map(len, starts))
    most = max(_SINGLE_TOKENS, _MEMORY // ((longest + length) * kv_bytes(model)))
    rows = [starts[number % len(starts)] for number in range(min(max(_TEXTS, len(starts)), most))]
    ids = torch.stack([nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    real = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sampled = model.generate(  # type: ignore[operator]
            ids.to(model.device),
            attention_mask=real.long().to(model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=0,
            suppress_tokens=sorted(without) or None,
        )
    new = torch.ones(len(rows), sampled.shape[1] - longest, dtype=torch.bool)
    return CalibrationTexts(cast(Tensor, sampled), torch.cat((real, new), dim=1).to(model.device))


def sample_bytes(model: PreTrainedModel) -> int:
    """The memory that keys and values of the texts need with short prompts; the model may be without values."""
    return min(_MEMORY, _TEXTS * _LENGTH * kv_bytes(model))


def kv_bytes(model: PreTrainedModel) -> int:
    """The bytes of the keys and values of a token, in the model's type."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return 2 * int(config.num_hidden_layers) * kv_heads * size * model.dtype.itemsize


def rounded_layers(
    model: PreTrainedModel,
    modules: Mapping[str, nn.Linear],
    texts: CalibrationTexts,
    form: WeightFormat,
    on_layers: OnLayers = lambda done, total: None,
    recorder: AttentionRecorder | None = None,
) -> tuple[dict[str, QuantizedWeight], dict[str, float]]:
    """These modules in a format, and the relative error of each weight. The modules get the weights of the codes.
    A recorder measures the attention of each rounded layer.

    Modules outside of the decoder layers, and experts that no text is routed to, get the nearest codes."""
    layers: dict[str, QuantizedWeight] = {}
    errors: dict[str, float] = {}

    def put(name: str, layer: QuantizedWeight) -> None:
        weight = modules[name].weight
        layers[name] = replace(layer, codes=stored_beside(weight, layer.codes))
        errors[name] = replace_weight(weight, layers[name].of_outputs)

    names = {module: name for name, module in modules.items()}
    with uniform_rows(model, False), ExitStack() as attached:
        calls = _calls(model, texts)
        if recorder is not None:
            attached.enter_context(recorder.attached(model))
        states = calls[0].states if calls else torch.empty(0)
        for number, call in enumerate(calls, 1):
            inside = {names[module]: module for module in call.layer.modules() if module in names}
            with _inputs(inside, texts.real) as inputs:
                call.output(states)
            for shared in inputs:
                parts = [_Part(*_inverse_factor(hessian), hessian.diagonal()) for hessian in shared.hessians]
                for name in shared.names:
                    put(name, _rounded(values_of(modules[name].weight).float(), parts, form))
            with nullcontext() if recorder is None else recorder.measuring():
                states = call.output(states)
            on_layers(number, len(calls))
    for name in modules.keys() - layers.keys():
        put(name, form.nearest(modules[name].weight))
    return layers, errors


@dataclass(frozen=True)
class _Call:
    """A decoder layer, and what it was called with."""

    layer: nn.Module
    states: Tensor
    others: tuple[Any, ...]
    named: dict[str, Any]

    def output(self, states: Tensor) -> Tensor:
        """The layer's output for other hidden states."""
        output = self.layer(states, *self.others, **self.named)
        return output if isinstance(output, Tensor) else output[0]


class _Stop(Exception):
    """Ends a run of the model before its last layer."""


def _calls(model: PreTrainedModel, texts: CalibrationTexts) -> list[_Call]:
    """The calls of the decoder layers; empty if a layer takes anything but the output of the one before it."""
    layers = decoder_layers(model, int(model.config.get_text_config().num_hidden_layers))
    calls: list[_Call] = []
    outputs: list[Tensor] = []

    def before(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        others = {name: value for name, value in named.items() if name != "hidden_states"}
        states = arguments[0] if arguments else named["hidden_states"]
        chained = not outputs or states is outputs[-1]
        if chained:
            calls.append(_Call(layer, states if not outputs else torch.empty(0), arguments[1:], others))
        if not chained or layer is layers[-1]:
            raise _Stop

    def after(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        outputs[:] = [output if isinstance(output, Tensor) else output[0]]

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    with hooked(handles), suppress(_Stop):
        model(input_ids=texts.ids, attention_mask=texts.real.long(), use_cache=False)
    return calls if len(calls) == len(layers) else []


@dataclass(eq=False)
class _Input:
    """An input that several modules share: their names, and the sums of outer products of its rows, by parts."""

    names: list[str] = field(default_factory=list)
    hessians: list[Tensor] = field(default_factory=list)  # float32


@contextmanager
def _inputs(modules: Mapping[str, nn.Linear], real: Tensor) -> Iterator[list[_Input]]:
    """The inputs of these modules, filled while their layer runs."""
    known: dict[int, _Input] = {}  # by the `id` of the tensor
    held = []  # so that no other tensor gets its id
    inputs: list[_Input] = []

    def measure(name: str) -> Any:
        def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            states = arguments[0]
            if id(states) not in known:
                held.append(states)
                rows = states.reshape(-1, states.shape[-1]).float()
                if len(rows) == real.numel():  # not those that are routed to an expert
                    rows = rows[real.flatten()]
                if bool(torch.isfinite(rows).all()) and len(rows):
                    parts = -(-rows.shape[1] // _WIDEST)
                    known[id(states)] = _Input([], [part.T @ part for part in rows.tensor_split(parts, dim=1)])
                    inputs.append(known[id(states)])
            if id(states) in known:
                known[id(states)].names.append(name)

        return before

    handles = [module.register_forward_pre_hook(measure(name)) for name, module in modules.items()]
    with hooked(handles):
        yield inputs


@dataclass(frozen=True)
class _Part:
    """Consecutive input channels whose errors are passed on to each other."""

    factor: Tensor  # upper Cholesky factor of the inverse Hessian, of the channels in the order of `order`
    order: Tensor
    squares: Tensor  # of the size of each channel, up to a factor

    @property
    def width(self) -> int:
        return len(self.order)


def _inverse_factor(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """The upper Cholesky factor of the inverse of a damped Hessian, and the order of columns that it is for."""
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True)
    damped = hessian.double()[order][:, order]
    damped.diagonal().add_(_DAMPING * float(diagonal.double().mean()) + 1e-12)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float(), order


def _rounded(weight: Tensor, parts: list[_Part], form: WeightFormat) -> QuantizedWeight:
    """A weight (outputs x inputs) in a format."""
    scale = form.scales(weight, torch.cat([part.squares for part in parts]).sqrt()).T.contiguous()
    blocks = torch.arange(weight.shape[1]) // (weight.shape[1] // len(scale))
    widths = [part.width for part in parts]
    columns = zip(weight.T.split_with_sizes(widths), blocks.split_with_sizes(widths), parts, strict=True)
    codes = torch.cat([_codes(some, theirs, scale.float(), form.limits, part) for some, theirs, part in columns])
    block = block_of(weight.shape[1], form.blocks)
    return QuantizedWeight(codes, scale[0] if block is None else scale, block)


def _codes(columns: Tensor, blocks: Tensor, scale: Tensor, limits: tuple[float, float], part: _Part) -> Tensor:
    """The codes (inputs x outputs) of weights, given as inputs x outputs with the block of each input."""
    columns, blocks, factor, width = columns[part.order], blocks[part.order], part.factor, part.width
    codes = torch.empty_like(columns, dtype=torch.int8)
    for start in range(0, width, _BLOCK):
        end = min(start + _BLOCK, width)
        errors = torch.empty(end - start, columns.shape[1])
        for column in range(start, end):
            step = scale[blocks[column]]
            values = (columns[column] / step).round_().clamp_(*limits)
            codes[column] = values.to(torch.int8)
            error = (columns[column] - values * step) / float(factor[column, column])
            columns[column + 1 : end] -= torch.outer(factor[column, column + 1 : end], error)
            errors[column - start] = error
        columns[end:] -= factor[start:end, end:].T @ errors
    in_order = torch.empty_like(codes)
    in_order[part.order] = codes
    return in_order
