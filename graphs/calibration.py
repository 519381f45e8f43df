"""Calibration: how the inputs of a model's linear layers are scaled, from what they are on texts that the model reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.int8 import InputScale, LinearScales, best_scales, quantize_rows

# A fixed scale keeps this many times the largest value that was seen. Behind a norm that is ample; elsewhere a few tokens reach
# hundreds of times what others do: one down projection of a 135M model has inputs of up to 3,065 where most stay below 40.
_HEADROOM_BEHIND_NORMS = 2.0
_HEADROOM = 8.0
# A fixed scale keeps at most this many times the size of a usual row, so that the steps of two limbs stay below 0.2 % of it;
# beyond it each row is scaled by itself.
_WIDEST = 64.0
# Scales are moved between channels of an input and their weights by these powers of the channels' sizes.
_POWERS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75)
_ALIKE = 0.02  # a module whose output differs from a norm's by less is one
_EPSILON = 1e-6
_ROWS = 256  # of a weight, from which the power is chosen
_TEXTS = 8
_LENGTH = 48  # tokens of a text that the model writes itself


@dataclass(frozen=True, eq=False)
class _SharedInput:
    """The linear modules that are given the same rows, and what was seen of these rows."""

    names: tuple[str, ...]
    largest: Tensor  # of each channel
    sizes: Tensor  # root mean square of each channel over rows of size 1
    usual: float  # root mean square of the middle row
    reach: Tensor | None  # what no channel can exceed, if the rows come from a norm


def calibrate(
    model: PreTrainedModel, modules: Mapping[str, nn.Linear], texts: Sequence[Tensor], limbs: int, fixed: frozenset[str]
) -> dict[str, LinearScales]:
    """The scales of each of these modules. Those that are given the same rows share the scale of their input, so that the rows
    are rounded once; those in `fixed`, whose weights have another use, keep their channels and their weights' scales."""
    found = {}
    for shared in _shared_inputs(model, modules, texts):
        weights = [modules[name].weight for name in shared.names]
        move = None
        if not fixed & set(shared.names) and (limbs == 2 or shared.reach is not None):
            move = _move(weights, shared.sizes)
        scale = InputScale(_bound(shared, move, limbs), move)
        for name, weight in zip(shared.names, weights, strict=True):
            found[name] = LinearScales(scale, None if name in fixed else _outputs(weight, shared.sizes, move))
    # experts that no text reached
    return found | {name: LinearScales(InputScale(None)) for name in modules.keys() - found.keys()}


def calibration_texts(model: PreTrainedModel, prompts: Sequence[Tensor] = ()) -> list[Tensor]:
    """Texts to calibrate with, each of rows x tokens: what the model writes behind single tokens, and behind the prompts."""
    vocab = int(model.config.get_text_config().vocab_size)
    first = torch.randint(0, vocab, (_TEXTS, 1), generator=torch.Generator().manual_seed(0))
    return [_continued(model, prompt.to(model.device)) for prompt in (first, *prompts)]


def _continued(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """What the model writes behind the end of a prompt, within the positions that it has."""
    positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048)
    length = max(1, min(_LENGTH, positions // 2))
    ids = ids[:, -(positions - length) :]
    return cast(
        Tensor,
        model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=0,
        ),
    )


def _bound(shared: _SharedInput, move: Tensor | None, limbs: int) -> float | None:
    """The largest magnitude that is kept of all rows; none: each row has its own."""
    if limbs == 1:
        return None  # 8 bits are too few to spare some for rows that were not seen
    divisor = torch.ones_like(shared.largest) if move is None else move
    usual = shared.usual * float((shared.sizes / divisor).norm() / shared.sizes.norm())
    seen = float((shared.largest / divisor).max())
    bound = _HEADROOM * seen
    if shared.reach is not None:
        bound = min(_HEADROOM_BEHIND_NORMS * seen, float((shared.reach / divisor).max()))
    return bound if 0 < bound <= _WIDEST * usual else None


def _move(weights: Sequence[Tensor], sizes: Tensor) -> Tensor | None:
    """What the channels of an input are divided by so that the error of rounded weights matters least."""
    sizes = sizes.clamp(min=1e-8)
    relative = sizes / sizes.log().mean().exp()
    sample = [weight.detach()[:: max(1, len(weight) // _ROWS)].float() for weight in weights]
    best, least = None, math.inf
    for power in _POWERS:
        move = relative**power
        error = sum(float((_rounding_error(weight * move) / move * sizes).square().sum()) for weight in sample)
        if error < least:
            best, least = (None if power == 0 else move), error
    return best


def _outputs(weight: Tensor, sizes: Tensor, move: Tensor | None) -> Tensor:
    """The scales of a weight's outputs, once scales were moved into it."""
    if move is None:
        return best_scales(weight.detach(), sizes)
    return best_scales(weight.detach().float() * move, sizes / move)


def _rounding_error(weight: Tensor) -> Tensor:
    codes, scale = quantize_rows(weight)
    return codes.float() * scale[:, None] - weight


class _Tally:
    """What was seen of the rows that some modules share."""

    def __init__(self) -> None:
        self._reach: Tensor | None = None
        self._largest: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._sizes: list[Tensor] = []  # root mean square of each row

    def add(self, states: Tensor, reach: Tensor | None) -> None:
        rows = states.detach().flatten(0, -2).float()
        self._reach = reach
        sizes = rows.square().mean(dim=-1).sqrt()
        self._largest.append(rows.abs().amax(dim=0))
        # every row counts the same: one that is 1000 times as large as others would decide alone
        self._squares.append((rows / sizes.clamp(min=1e-12)[:, None]).square().sum(dim=0))
        self._sizes.append(sizes)

    def shared(self, names: tuple[str, ...]) -> _SharedInput:
        sizes = torch.cat(self._sizes)
        channels = (torch.stack(self._squares).sum(dim=0) / sizes.numel()).sqrt()
        return _SharedInput(names, torch.stack(self._largest).amax(dim=0), channels, float(sizes.median()), self._reach)


def _shared_inputs(
    model: PreTrainedModel, modules: Mapping[str, nn.Linear], texts: Sequence[Tensor]
) -> list[_SharedInput]:
    tallies: dict[tuple[str, ...], _Tally] = {}
    for text in texts:
        with _watched(model, modules) as (inputs, outputs), torch.no_grad():
            model(input_ids=text, use_cache=False)
        together: dict[int, list[str]] = {}
        for name, states in inputs.items():
            together.setdefault(id(states), []).append(name)
        for names in map(tuple, together.values()):
            states = inputs[names[0]]
            tallies.setdefault(names, _Tally()).add(states, outputs.get(id(states), (states, None))[1])
    found, taken = [], set[str]()
    for names, tally in tallies.items():
        left = tuple(name for name in names if name not in taken)  # experts may meet in one text and not in another
        if left:
            found.append(tally.shared(left))
            taken.update(left)
    return found


@contextmanager
def _watched(
    model: PreTrainedModel, modules: Mapping[str, nn.Linear]
) -> Iterator[tuple[dict[str, Tensor], dict[int, tuple[Tensor, Tensor | None]]]]:
    """What the modules are given while the model runs, by name, and what its norms give and its channels cannot exceed, by
    the identity of the tensor."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[int, tuple[Tensor, Tensor | None]] = {}

    def note(name: str) -> Any:
        return lambda module, given: inputs.__setitem__(name, given[0])

    def give(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[id(output)] = (output, _reach(module, given[0], output))

    handles = [module.register_forward_pre_hook(note(name)) for name, module in modules.items()]
    handles += [
        module.register_forward_hook(give)
        for module in model.modules()
        if isinstance(getattr(module, "weight", None), Tensor) and cast(Tensor, module.weight).dim() == 1
    ]
    try:
        yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()


def _reach(module: nn.Module, states: Tensor, output: Tensor) -> Tensor | None:
    """What no channel of a norm's output can exceed; nothing if the module is no norm, whatever it is called."""
    weight = cast(Tensor, module.weight).float()
    bias = cast("Tensor | None", getattr(module, "bias", None))
    if output.shape[-1] != weight.numel():
        return None
    offset = torch.zeros_like(weight) if bias is None else bias.float()
    for rows in (states.float(), states.float() - states.float().mean(dim=-1, keepdim=True)):
        normed = rows * (rows.square().mean(dim=-1, keepdim=True) + _EPSILON).rsqrt()
        for gain in (weight, 1 + weight):
            expected = normed * gain + offset
            if float((output.float() - expected).norm()) <= _ALIKE * float(expected.norm()):
                return math.sqrt(weight.numel()) * gain.abs() + offset.abs()
    return None
