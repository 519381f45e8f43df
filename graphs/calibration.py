"""Calibration: choose the activation scales of a model's linear layers from activations on calibration texts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.draft_heads import head_logits
from spaceport.graphs.int8 import InputScale, LinearScales, best_scales, quantize_rows
from spaceport.graphs.streamed_weights import rows_of

# The clipping range of a static scale is the largest calibrated value times this headroom. Elsewhere than behind norms,
# a few tokens reach hundreds of times the usual values: one down projection of a 135M model has inputs of up to 3,065
# where most stay below 40.
_NORM_HEADROOM = 2.0
_HEADROOM = 8.0
# A static scale covers at most this multiple of the median row's root mean square, so that the steps of two limbs stay
# below 0.2 % of it. Inputs with a larger range get a dynamic scale per row.
_MAX_RANGE = 64.0
# Smoothing factors are powers of the channels' sizes; these exponents are tried.
_SMOOTHING_EXPONENTS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75)
_NORM_TOLERANCE = 0.02  # largest relative difference from a norm's formula with which a module counts as a norm
_EPSILON = 1e-6
_SAMPLED_ROWS = 256  # of a weight, for choosing the smoothing exponent
_TEXTS = 8
_LENGTH = 48  # generated tokens per calibration text


@dataclass(frozen=True, eq=False)
class _SharedInput:
    """Linear modules that receive the same activations, and statistics of these activations."""

    names: tuple[str, ...]
    channel_max: Tensor  # largest magnitude of each channel
    channel_rms: Tensor  # root mean square of each channel, over rows that were normalized to a root mean square of 1
    median_rms: float  # median of the rows' root mean squares
    norm_bound: Tensor | None  # largest magnitude that each channel can have, if the activations come from a norm


def calibrate(
    model: PreTrainedModel, modules: Mapping[str, nn.Linear], texts: Sequence[Tensor], limbs: int, tied: frozenset[str]
) -> dict[str, LinearScales]:
    """The scales of each module. Modules with the same input share its scale, so that the input is quantized once.

    Modules in `tied` share their weight with the input embedding: they get neither smoothing nor weight scales."""
    found = {}
    for shared in _shared_inputs(model, modules, texts):
        weights = [modules[name].weight for name in shared.names]
        smoothing = None
        if not tied & set(shared.names) and (limbs == 2 or shared.norm_bound is not None):
            smoothing = _smoothing(weights, shared.channel_rms)
        scale = InputScale(_static_clip(shared, smoothing, limbs), smoothing)
        for name, weight in zip(shared.names, weights, strict=True):
            found[name] = LinearScales(
                scale, None if name in tied else best_scales(weight, shared.channel_rms, smoothing)
            )
    # experts that no calibration text was routed to
    return found | {name: LinearScales(InputScale(None)) for name in modules.keys() - found.keys()}


def calibration_texts(
    model: PreTrainedModel, prompts: Sequence[Tensor] = (), excluded: Sequence[int] = ()
) -> list[Tensor]:
    """Calibration texts (batch x tokens): greedy completions of random single tokens and of the given prompts.

    Tokens in `excluded` are neither sampled nor generated."""
    without = set(excluded)
    tokens = [token for token in range(int(model.config.get_text_config().vocab_size)) if token not in without]
    sampled = torch.randint(0, len(tokens), (_TEXTS, 1), generator=torch.Generator().manual_seed(0))
    first = torch.tensor(tokens)[sampled]
    return [_completed(model, prompt.to(model.device), sorted(without)) for prompt in (first, *prompts)]


def _completed(model: PreTrainedModel, ids: Tensor, excluded: list[int]) -> Tensor:
    """The end of a prompt and its greedy completion, within the model's maximum number of positions."""
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
            suppress_tokens=excluded or None,
        ),
    )


def _static_clip(shared: _SharedInput, smoothing: Tensor | None, limbs: int) -> float | None:
    """The clipping range of a static scale, or None for a dynamic scale per row."""
    if limbs == 1:
        return None  # 8 bits are too few for headroom
    divisor = torch.ones_like(shared.channel_max) if smoothing is None else smoothing
    median = shared.median_rms * float((shared.channel_rms / divisor).norm() / shared.channel_rms.norm())
    largest = float((shared.channel_max / divisor).max())
    clip = _HEADROOM * largest
    if shared.norm_bound is not None:
        clip = min(_NORM_HEADROOM * largest, float((shared.norm_bound / divisor).max()))
    return clip if 0 < clip <= _MAX_RANGE * median else None


def _smoothing(weights: Sequence[Tensor], channel_rms: Tensor) -> Tensor | None:
    """Smoothing factors of an input's channels with the least error from quantized weights; None: no smoothing."""
    channel_rms = channel_rms.clamp(min=1e-8)
    relative = channel_rms / channel_rms.log().mean().exp()
    sample = [_sampled_rows(weight) for weight in weights]
    best, least = None, math.inf
    for exponent in _SMOOTHING_EXPONENTS:
        factors = relative**exponent
        errors = ((_quantization_error(weight * factors) / factors * channel_rms).square().sum() for weight in sample)
        error = sum(map(float, errors))
        if error < least:
            best, least = (None if exponent == 0 else factors), error
    return best


def _sampled_rows(weight: Tensor) -> Tensor:
    """Evenly spaced rows of a weight, in float32."""
    step = max(1, len(weight) // _SAMPLED_ROWS)
    return torch.cat([values[-rows.start % step :: step].float() for rows, values in rows_of(weight)])


def _quantization_error(weight: Tensor) -> Tensor:
    codes, scale = quantize_rows(weight)
    return codes.float() * scale[:, None] - weight


@dataclass(frozen=True, eq=False)
class _Measured:
    """Statistics of the input of some modules, of one text."""

    states: weakref.ref[Tensor]  # the input itself is in memory only while its layer runs
    channel_max: Tensor
    squares: Tensor  # of each channel, summed over normalized rows
    row_rms: Tensor
    norm_bound: Tensor | None

    @staticmethod
    def of(states: Tensor, norm_bound: Tensor | None) -> _Measured:
        rows = states.detach().flatten(0, -2).float()
        row_rms = rows.square().mean(dim=-1).sqrt()
        # Each row has the same weight: without normalization, one row that is 1000 times as large would decide alone.
        squares = (rows / row_rms.clamp(min=1e-12)[:, None]).square().sum(dim=0)
        return _Measured(weakref.ref(states), rows.abs().amax(dim=0), squares, row_rms, norm_bound)


def _shared_input(names: tuple[str, ...], texts: Sequence[_Measured]) -> _SharedInput:
    row_rms = torch.cat([text.row_rms for text in texts])
    channel_rms = (torch.stack([text.squares for text in texts]).sum(dim=0) / row_rms.numel()).sqrt()
    channel_max = torch.stack([text.channel_max for text in texts]).amax(dim=0)
    return _SharedInput(names, channel_max, channel_rms, float(row_rms.median()), texts[-1].norm_bound)


def _shared_inputs(
    model: PreTrainedModel, modules: Mapping[str, nn.Linear], texts: Sequence[Tensor]
) -> list[_SharedInput]:
    """The groups of modules that receive the same activations on these texts, with statistics."""
    statistics: dict[tuple[str, ...], list[_Measured]] = {}
    for text in texts:
        with _measured(model, modules) as inputs, head_logits(model), torch.no_grad():
            model(input_ids=text, use_cache=False)
        groups: dict[int, list[str]] = {}
        for name, measured in inputs.items():
            groups.setdefault(id(measured), []).append(name)
        for names in map(tuple, groups.values()):
            statistics.setdefault(names, []).append(inputs[names[0]])
    found, assigned = [], set[str]()
    for names, measured_texts in statistics.items():
        # a text may reach an expert that another text does not reach, so groups can overlap
        remaining = tuple(name for name in names if name not in assigned)
        if remaining:
            found.append(_shared_input(remaining, measured_texts))
            assigned.update(remaining)
    return found


@contextmanager
def _measured(model: PreTrainedModel, modules: Mapping[str, nn.Linear]) -> Iterator[dict[str, _Measured]]:
    """Measure the modules' inputs while the model runs, by name; modules with the same input have the same statistics."""
    inputs: dict[str, _Measured] = {}
    known: dict[int, _Measured] = {}  # by `id` of the input, which may be that of another tensor later
    bounds: dict[int, tuple[weakref.ref[Tensor], Tensor | None]] = {}  # of the outputs of norms, by their `id`

    def measure_input(name: str) -> Any:
        def measure(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            states = arguments[0]
            found = known.get(id(states))
            if found is None or found.states() is not states:
                normed, bound = bounds.get(id(states), (None, None))
                found = _Measured.of(states, bound if normed is not None and normed() is states else None)
                known[id(states)] = found
            inputs[name] = found

        return measure

    def measure_norm(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            bounds[id(output)] = (weakref.ref(output), _norm_bound(module, arguments[0], output))

    handles = [module.register_forward_pre_hook(measure_input(name)) for name, module in modules.items()]
    handles += [
        module.register_forward_hook(measure_norm)
        for module in model.modules()
        if isinstance(getattr(module, "weight", None), Tensor) and cast(Tensor, module.weight).dim() == 1
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def _norm_bound(module: nn.Module, states: Tensor, output: Tensor) -> Tensor | None:
    """The largest magnitude of each channel of a norm's output; None if the module does not compute a norm.

    Norms are recognized by their result, not by their class name."""
    weight = cast(Tensor, module.weight).float()
    bias = cast("Tensor | None", getattr(module, "bias", None))
    if output.shape[-1] != weight.numel():
        return None
    offset = torch.zeros_like(weight) if bias is None else bias.float()
    for rows in (states.float(), states.float() - states.float().mean(dim=-1, keepdim=True)):
        normed = rows * (rows.square().mean(dim=-1, keepdim=True) + _EPSILON).rsqrt()
        for gain in (weight, 1 + weight):
            expected = normed * gain + offset
            if float((output.float() - expected).norm()) <= _NORM_TOLERANCE * float(expected.norm()):
                return math.sqrt(weight.numel()) * gain.abs() + offset.abs()
    return None
