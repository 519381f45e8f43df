"""Traits: what is known of a model before it becomes a graph, read off one eager run instead of guessed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from spaceport.graphs import attention, kv
from spaceport.graphs.contract.faults import InputFault

# How a family lets its attention be replaced: through transformers' interface, through torch's
# scaled_dot_product_attention, or not at all (its own matrix products, which take an additive_mask mask as it is).
AttentionHook = Literal["interface", "sdpa", "eager"]


class UnsupportedModel(InputFault):
    """A model that cannot be told exactly by the graph's contract; the message says why."""


@dataclass(frozen=True)
class Traits:
    """What one eager run of a model shows of it."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    window: int | None
    repeats: int  # how often the family repeats each KV head before it caches it
    attention_hook: AttentionHook
    max_positions: int


def dtype_name(model: PreTrainedModel) -> str:
    """The type of a model's weights, such as float16."""
    return str(model.dtype).removeprefix("torch.")


def name_of(model: PreTrainedModel) -> str:
    return type(model).__name__


def _max_positions(config: Any) -> int:
    """How many positions the model can be given with frequencies that do not depend on the length of the text."""
    limit = int(getattr(config, "max_position_embeddings", None) or 2048)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in nested or [parameters]:
        kind = str(entry.get("rope_type", "default"))
        if kind == "longrope":
            limit = min(limit, int(entry.get("original_max_position_embeddings") or limit))
    return limit


def _repeats(config: Any, cache: kv.RecordingCache, heads: int) -> int:
    told = getattr(config, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None) or heads
    repeats = int(heads // told) if told and heads % told == 0 else 1
    if repeats < 2:
        return 1
    for pair in cache.seen.values():
        for states in pair:
            if not torch.equal(states, states[:, ::repeats].repeat_interleave(repeats, dim=1)):
                return 1
    return repeats


def _window(model: PreTrainedModel, seen: list[dict[str, Any]]) -> int | None:
    """The one window size that the layers pass to attention, if any does."""
    windows = {call["sliding_window"] for call in seen if call.get("sliding_window") is not None}
    if len(windows) > 1:
        raise UnsupportedModel(f"{name_of(model)} has windows of {sorted(windows)} tokens: expected one size")
    config = model.config.get_text_config()
    told = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True) and "sliding_attention" in (
        getattr(config, "layer_types", None) or ("sliding_attention",)
    )
    if told and used and not windows and told < _max_positions(config):
        raise UnsupportedModel(
            f"{name_of(model)} has sliding_window {told} in its configuration, but no layer passes a window to attention: "
            "expected both or neither; set sliding_window to null if the model was trained without"
        )
    return next(iter(windows), None)


def _traits(
    model: PreTrainedModel,
    attention_hook: AttentionHook,
    cache: kv.RecordingCache,
    seen: list[dict[str, Any]],
    vocab_size: int,
) -> Traits:
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    if sorted(cache.seen) != list(range(layers)):
        raise UnsupportedModel(
            f"{name_of(model)} cached keys and values in layers {sorted(cache.seen)} of {layers}: expected every layer to"
        )
    shapes = {tensor.shape for pair in cache.seen.values() for tensor in pair}
    if len(shapes) != 1:
        listed = ", ".join(str(tuple(shape)) for shape in sorted(shapes))
        raise UnsupportedModel(
            f"{name_of(model)} has keys and values of shapes {listed}: expected one shape in all layers"
        )
    (_, heads, _, head_dim) = next(iter(shapes))
    if attention_hook == "interface" and len(seen) < layers:
        raise UnsupportedModel(
            f"{name_of(model)} hands its attention over in {len(seen)} of {layers} layers: expected every layer to"
        )
    window = _window(model, seen)
    repeats = _repeats(config, cache, heads)
    return Traits(
        layers,
        heads // repeats,
        head_dim,
        vocab_size,
        window,
        repeats,
        attention_hook,
        _max_positions(config),
    )


def _entrance(model: PreTrainedModel) -> AttentionHook:
    if model._can_set_attn_implementation():
        return "interface"
    return "sdpa" if model.config._attn_implementation == "sdpa" else "eager"


@contextmanager
def replaced_sdpa(attention_hook: AttentionHook, function: Callable[..., Tensor]) -> Iterator[None]:
    """Replace torch's scaled_dot_product_attention for the families that know no other attention_hook."""
    if attention_hook != "sdpa":
        yield
        return
    original = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = function
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


@contextmanager
def _recording(model: PreTrainedModel, attention_hook: AttentionHook, seen: list[dict[str, Any]]) -> Iterator[None]:
    def interface(*arguments: Any, **named: Any) -> tuple[Tensor, None]:
        seen.append(named)
        return attention.attention_interface(*arguments, **named)

    if attention_hook == "interface":
        AttentionInterface.register(attention.NAME + "-probe", interface)
        model.set_attn_implementation(attention.NAME + "-probe")
    with replaced_sdpa(attention_hook, attention.scaled_dot_product):
        yield


@contextmanager
def reasons(model: PreTrainedModel) -> Iterator[None]:
    """Tell what a model raises when it is run over rows and slots as a reason against it."""
    try:
        yield
    except UnsupportedModel:
        raise
    except attention.UnsupportedAttention as error:
        raise UnsupportedModel(f"{name_of(model)} cannot be exported: {error}") from error
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UnsupportedModel(f"{name_of(model)} does not run over a plain KV cache: {first}") from error


def refuse_by_config(model: PreTrainedModel) -> None:
    """Raise for models whose configuration already says that rows and slots cannot tell them."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name_of(model)} is an encoder-decoder: expected a decoder-only causal language model")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModel(
            f"{name_of(model)} has layers of kind {', '.join(sorted(kinds))}: expected full or sliding-window attention only"
        )
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(
            f"{name_of(model)} takes no position_ids: it goes by the order of its cache, as ALiBi does, or by a running "
            "state; expected rotary or learned positions"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel(f"{name_of(model)} lets tokens see later ones: expected causal attention")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name_of(model)} has no output embedding: expected a model with a language-model head")


def probe(model: PreTrainedModel) -> Traits:
    """Run two tokens eagerly and read off what a configuration may not say or say wrongly."""
    attention_hook = _entrance(model)
    seen: list[dict[str, Any]] = []
    cache = kv.RecordingCache()
    ids = torch.tensor([[1, 2]], device=model.device)
    mask = torch.tensor(
        [[[[0.0, attention.MASKED_SCORE[torch.float16]], [0.0, 0.0]]]], dtype=model.dtype, device=model.device
    )
    before = model.config._attn_implementation
    try:
        with reasons(model), _recording(model, attention_hook, seen):
            output = model(
                input_ids=ids, position_ids=ids - 1, attention_mask=mask, past_key_values=cache, use_cache=True
            )
    finally:
        if attention_hook == "interface":
            model.set_attn_implementation(before)
    return _traits(model, attention_hook, cache, seen, output.logits.shape[-1])
