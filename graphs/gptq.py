"""Round the weights of linear layers so that the error of each output is small on texts that the model samples.

Columns are rounded one after the other, and the error of each is passed on to those that are not rounded yet, by the
inverse Hessian of the squared output error (Frantar et al., 2022). One decoder layer at a time is calibrated, with
inputs that come from the rounded earlier ones, and one layer at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.attention import hooked
from spaceport.graphs.decoder import decoder_layers
from spaceport.graphs.gated import uniform_rows
from spaceport.graphs.quantization import QuantizedWeight, WeightFormat, block_of, replace_weight
from spaceport.graphs.streamed_weights import return_free_memory, stored_beside, values_of

_TEXTS = 64
_LENGTH = 40  # sampled tokens of each text
_SINGLE_TOKENS = 8  # random tokens that texts begin with, beside the prompts
_MEMORY = 1 << 30  # bytes of the texts' keys and values; longer or more prompts, or a larger model, get fewer texts

_DAMPING = 0.01  # added to the Hessian's diagonal, relative to its mean
_BLOCK = 128  # columns whose errors are passed on to the later ones together
_WIDEST = 4096  # inputs of a Hessian; those of a wider layer are split, and errors stay within a part

# Called with a sentence that has places for two numbers, with what is done, and with its total.
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class CalibrationTexts:
    """Texts of one batch, padded on the left."""

    ids: Tensor  # batch x tokens
    real: Tensor  # batch x tokens, bool; False: padding


def calibration_texts(
    model: PreTrainedModel,
    prompts: Sequence[Tensor] = (),
    excluded: Sequence[int] = (),
    on_progress: OnProgress = lambda sentence, done, total: None,
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
    done, sentence = count(1), "sampled {} of {} tokens of each text to calibrate with"
    watched = model.register_forward_hook(lambda *_: on_progress(sentence, next(done), length))
    with torch.random.fork_rng(), hooked([watched]):
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
    on_progress: OnProgress = lambda sentence, done, total: None,
) -> tuple[dict[str, QuantizedWeight], dict[str, float]]:
    """These modules in a format, and the relative error of each weight. The modules get the weights of the codes.

    Modules outside of the decoder layers, and experts that no text is routed to, get the nearest codes."""
    layers: dict[str, QuantizedWeight] = {}
    errors: dict[str, float] = {}

    def put(name: str, layer: QuantizedWeight) -> None:
        weight = modules[name].weight
        layers[name] = replace(layer, codes=stored_beside(weight, layer.codes))
        errors[name] = replace_weight(weight, layers[name].of_outputs)

    names = {module: name for name, module in modules.items()}

    def round_layer(layer: nn.Module, run: Callable[[], object]) -> None:
        inside = {names[module]: module for module in layer.modules() if module in names}
        with _inputs(inside, texts.real) as inputs:
            run()
        for shared in inputs:
            parts = [_Part(*_inverse_factor(hessian), hessian.diagonal()) for hessian in shared.hessians]
            for name in shared.names:
                put(name, _rounded(values_of(modules[name].weight).float(), parts, form))

    with uniform_rows(model, False):
        _run(model, texts, round_layer, on_progress)
    for name in modules.keys() - layers.keys():
        put(name, form.nearest(modules[name].weight))
    return layers, errors


class _Stop(Exception):
    """Ends a run of the model before its output embedding."""


def _run(
    model: PreTrainedModel,
    texts: CalibrationTexts,
    round_layer: Callable[[nn.Module, Callable[[], object]], None],
    on_progress: OnProgress,
) -> None:
    """Run a model on the texts; each decoder layer is rounded first, by a function that can run it on the same inputs.

    Layers that do not run in the order of their numbers are not rounded, nor are those after them."""
    layers = decoder_layers(model, int(model.config.get_text_config().num_hidden_layers))
    begun: list[nn.Module] = []
    rounded: list[nn.Module] = []

    def before(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if layer in begun:
            return
        if layer is not layers[len(begun)]:
            raise _Stop
        begun.append(layer)
        round_layer(layer, partial(layer, *arguments, **named))
        rounded.append(layer)
        return_free_memory()
        on_progress("quantized {} of {} layers", len(rounded), len(layers))

    def after(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if len(rounded) == len(layers):
            raise _Stop

    # prepended, since a streamed layer reads its weights in a hook
    handles = [layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    with hooked(handles), suppress(_Stop):
        model(input_ids=texts.ids, attention_mask=texts.real.long(), use_cache=False)


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
    """The upper Cholesky factor of the inverse of a damped Hessian, and the order of columns that it is for.

    It is the inverse of the lower factor of the Hessian with its rows and columns backwards."""
    order = hessian.diagonal().argsort(descending=True)
    damped = hessian.double()[order][:, order]
    damped.diagonal().add_(_DAMPING * float(damped.diagonal().mean()) + 1e-12)
    return _triangular_inverse(torch.linalg.cholesky(damped.flip(0, 1))).flip(0, 1).float(), order


def _triangular_inverse(lower: Tensor) -> Tensor:
    """The inverse of a lower triangular matrix, by quarters: a third of the products of a triangular solution."""
    middle = len(lower) // 2
    if middle < _BLOCK:
        solution: Tensor = torch.linalg.solve_triangular(lower, torch.eye(len(lower), dtype=lower.dtype), upper=False)
        return solution
    first, last = _triangular_inverse(lower[:middle, :middle]), _triangular_inverse(lower[middle:, middle:])
    inverse = torch.zeros_like(lower)
    inverse[:middle, :middle], inverse[middle:, middle:] = first, last
    inverse[middle:, :middle] = -(last @ (lower[middle:, :middle] @ first))
    return inverse


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
    columns, block_numbers, factor = columns[part.order], blocks[part.order].tolist(), part.factor
    diagonal = factor.diagonal().tolist()
    codes = torch.empty_like(columns, dtype=torch.int8)
    for start in range(0, part.width, _BLOCK):
        end = min(start + _BLOCK, part.width)
        errors = torch.empty(end - start, columns.shape[1])
        for column in range(start, end):
            before = column - start
            values = columns[column].addmv_(errors[:before].T, factor[start:column, column], alpha=-1)
            step = scale[block_numbers[column]]
            rounded = (values / step).round_().clamp_(*limits)
            codes[column] = rounded
            torch.sub(values, rounded.mul_(step), out=errors[before]).div_(diagonal[column])
        columns[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    in_order = torch.empty_like(codes)
    in_order[part.order] = codes
    return in_order
