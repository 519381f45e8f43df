"""Properties of a model, measured in one eager run because configurations can be wrong, and its logits to compare with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from spaceport.graphs import attention
from spaceport.graphs.contract.faults import InputFault

# How the attention of a model family is replaced: through transformers' attention interface, by replacing torch's
# scaled_dot_product_attention, or not at all (eager: the model's own matmuls, which accept an additive mask).
AttentionHook = Literal["interface", "sdpa", "eager"]

# Largest difference that rounding explains, relative to the largest logit; measured over the model families of the
# tests: up to 5e-3 in float16 and 4e-2 in bfloat16. contract.exactness.TOLERANCE is another bound: it compares engines
# that run the same graph, this one compares the wrapped model with the unmodified model.
_TOLERANCE = {"float32": 1e-4, "float16": 5e-2, "bfloat16": 1e-1}
_COMPARED_ROWS = 24
_COMPARED_WINDOW = 512  # the compared text is longer than the attention window only up to this window size


class UnsupportedModel(InputFault):
    """A model that cannot be exported exactly; the message states the reason."""


@dataclass(frozen=True)
class Traits:
    """Properties of a model, measured in one eager run."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    window: int | None  # sliding attention window in tokens
    repeats: int  # how often the model repeats each KV head before caching
    attention_hook: AttentionHook
    max_positions: int


def dtype_name(model: PreTrainedModel) -> str:
    """The type of a model's weights, such as float16."""
    return str(model.dtype).removeprefix("torch.")


def class_name(model: PreTrainedModel) -> str:
    return type(model).__name__


def decoder_layers(module: nn.Module, count: int) -> tuple[nn.Module, ...]:
    """The decoder layers: the outermost module list of this length; empty if there is none."""
    lists = (part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
    return tuple(next(lists, ()))


def refuse(model: PreTrainedModel, reason: str) -> NoReturn:
    """Raise for a model that cannot be exported exactly."""
    raise UnsupportedModel(f"{class_name(model)} {reason}")


def different_names(names: Set[str], expected: Set[str]) -> str | None:
    """How the names of tensors differ from a model's, such as "has no tensor a.weight and 2 more"; None: not at all."""
    for wrong, tensors in (("has no", expected - names), ("has the unknown", names - expected)):
        if tensors:
            more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
            return f"{wrong} tensor {min(tensors)}{more}"
    return None


def _max_positions(config: Any) -> int:
    """The number of positions up to which the rotary frequencies do not depend on the text's length."""
    limit = int(getattr(config, "max_position_embeddings", None) or 2048)
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_kind = [value for value in parameters.values() if isinstance(value, dict)]
    for parameters_of_kind in by_layer_kind or [parameters]:
        kind = str(parameters_of_kind.get("rope_type", "default"))
        if kind == "longrope":
            limit = min(limit, int(parameters_of_kind.get("original_max_position_embeddings") or limit))
    return limit


def _repeats(config: Any, cache: attention.RecordingCache, heads: int) -> int:
    """How often the model repeats each KV head before caching: 1 unless the recorded heads are equal in groups.

    On the meta device there are no values to compare, and the configuration decides."""
    configured = getattr(config, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None) or heads
    repeats = int(heads // configured) if configured and heads % configured == 0 else 1
    if repeats < 2:
        return 1
    for pair in cache.recorded.values():
        for states in pair:
            if not states.is_meta and not torch.equal(states, states[:, ::repeats].repeat_interleave(repeats, dim=1)):
                return 1
    return repeats


def _cached_shape(model: PreTrainedModel, cache: attention.RecordingCache, layers: int) -> tuple[int, int]:
    """The number of heads of the cached keys and values, and their size; raise unless they are those of all layers."""
    if sorted(cache.recorded) != list(range(layers)):
        refuse(
            model,
            f"cached keys and values in layers {sorted(cache.recorded)} of {layers}: expected a cache in every layer",
        )
    shapes = {tensor.shape for pair in cache.recorded.values() for tensor in pair}
    if len(shapes) != 1:
        listed = ", ".join(str(tuple(shape)) for shape in sorted(shapes))
        refuse(model, f"has keys and values of shapes {listed}: expected one shape in all layers")
    (_, heads, _, head_dim) = next(iter(shapes))
    return heads, head_dim


def _window(model: PreTrainedModel, calls: list[dict[str, Any]]) -> int | None:
    """The window size that the layers pass to attention; None if no layer passes one."""
    windows = {call["sliding_window"] for call in calls if call.get("sliding_window") is not None}
    if len(windows) > 1:
        refuse(model, f"has attention windows of {sorted(windows)} tokens: expected one size for all layers")
    config = model.config.get_text_config()
    configured = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True) and "sliding_attention" in (
        getattr(config, "layer_types", None) or ("sliding_attention",)
    )
    if configured and used and not windows and configured < _max_positions(config):
        refuse(
            model,
            f"has sliding_window {configured} in its configuration, but no layer passes a window to attention: "
            "expected both or neither; set sliding_window to null if the model was trained without",
        )
    return next(iter(windows), None)


def _attention_hook(model: PreTrainedModel) -> AttentionHook:
    if model._can_set_attn_implementation():
        return "interface"
    return "sdpa" if model.config._attn_implementation == "sdpa" else "eager"


@contextmanager
def replaced_sdpa(attention_hook: AttentionHook, function: Callable[..., Tensor]) -> Iterator[None]:
    """Replace torch's scaled_dot_product_attention inside the block if the model's attention hook is "sdpa"."""
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
def _recording(model: PreTrainedModel, attention_hook: AttentionHook, calls: list[dict[str, Any]]) -> Iterator[None]:
    def interface(*arguments: Any, **named: Any) -> tuple[Tensor, None]:
        calls.append(named)
        return attention.attention_interface(*arguments, **named)

    if attention_hook == "interface":
        AttentionInterface.register(attention.NAME + "-probe", interface)
        model.set_attn_implementation(attention.NAME + "-probe")
    with replaced_sdpa(attention_hook, attention.scaled_dot_product):
        yield


@contextmanager
def model_errors(model: PreTrainedModel) -> Iterator[None]:
    """Convert what a model raises inside the block into `UnsupportedModel`."""
    try:
        yield
    except UnsupportedModel:
        raise
    except attention.UnsupportedAttention as error:
        raise UnsupportedModel(f"{class_name(model)} cannot be exported: {error}") from error
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UnsupportedModel(f"{class_name(model)} does not run with a plain KV cache: {first}") from error


def refuse_by_config(model: PreTrainedModel) -> None:
    """Raise for models whose configuration shows that they cannot be exported."""
    config, parameters = model.config, inspect.signature(model.forward).parameters
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if getattr(config, "is_encoder_decoder", False):
        refuse(model, "is an encoder-decoder: expected a decoder-only causal language model")
    # gpt_neox has the same entry, unused: only an encoder's modules take it over
    in_modules = any(getattr(module, "is_decoder", None) is False for module in model.modules())
    if getattr(config, "is_decoder", None) is False and in_modules:
        refuse(
            model,
            "is an encoder, whose tokens see later ones (is_decoder is false in its configuration): "
            "expected a decoder-only causal language model",
        )
    if kinds:
        refuse(model, f"has layers of kind {', '.join(sorted(kinds))}: expected full or sliding-window attention only")
    if getattr(config, "alibi", False) or "position_ids" not in parameters:
        refuse(
            model,
            "takes no position_ids: its positions come from the order of its cache (ALiBi) or from a recurrent state; "
            "expected rotary or learned positions",
        )
    if not {"past_key_values", "cache"} & set(parameters):
        refuse(model, "has no KV cache: expected a model that takes past_key_values or cache")
    if getattr(config, "use_bidirectional_attention", None):
        refuse(model, "has bidirectional attention: expected causal attention")
    if model.get_output_embeddings() is None:
        refuse(model, "has no output embedding: expected a model with a language-model head")


def probe(model: PreTrainedModel) -> Traits:
    """The traits of a model, from an eager run over two tokens and its configuration."""
    attention_hook = _attention_hook(model)
    calls: list[dict[str, Any]] = []
    cache = attention.RecordingCache()
    ids = torch.tensor([[1, 2]], device=model.device)
    mask = torch.tensor(
        [[[[0.0, attention.MASKED_SCORE[torch.float16]], [0.0, 0.0]]]], dtype=model.dtype, device=model.device
    )
    previous = model.config._attn_implementation
    try:
        with model_errors(model), _recording(model, attention_hook, calls):
            named_cache = attention.cache_argument(model, cache)
            output = model(input_ids=ids, position_ids=ids - 1, attention_mask=mask, use_cache=True, **named_cache)
    finally:
        if attention_hook == "interface":
            model.set_attn_implementation(previous)
    config = model.config.get_text_config()
    heads, head_dim = _cached_shape(model, cache, config.num_hidden_layers)
    if attention_hook == "interface" and len(calls) < config.num_hidden_layers:
        refuse(
            model,
            f"calls the attention interface in {len(calls)} of {config.num_hidden_layers} layers: expected all of them",
        )
    repeats = _repeats(config, cache, heads)
    return Traits(
        layers=config.num_hidden_layers,
        kv_heads=heads // repeats,
        head_dim=head_dim,
        vocab_size=output.logits.shape[-1],
        window=_window(model, calls),
        repeats=repeats,
        attention_hook=attention_hook,
        max_positions=_max_positions(config),
    )


def comparison_ids(model: PreTrainedModel, traits: Traits) -> Tensor:
    """Token ids of the compared text, 1 x tokens; it is longer than the model's window if that is at most 512."""
    rows = _COMPARED_ROWS + (traits.window if traits.window and traits.window <= _COMPARED_WINDOW else 0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, traits.vocab_size, (1, min(rows, traits.max_positions)), generator=generator)
    return ids.to(model.device)


def unmodified_logits(model: PreTrainedModel, ids: Tensor, traits: Traits) -> Tensor:
    """The logits of a text with the model's own attention."""
    if traits.attention_hook == "interface":
        model.set_attn_implementation("eager")
    return cast(Tensor, model(input_ids=ids, use_cache=False).logits.float())


def require_equal_logits(model: PreTrainedModel, how: str, logits: Tensor, expected: Tensor) -> None:
    """Raise unless the logits equal the expected ones up to rounding; `how` names the compared way to run the model."""
    difference = float((logits - expected).abs().max())
    allowed = _TOLERANCE.get(dtype_name(model), _TOLERANCE["float16"]) * max(1.0, float(expected.abs().max()))
    if not difference <= allowed:
        raise UnsupportedModel(
            f"the logits of {class_name(model)} {how} differ from the unmodified model's by {difference:.3g} (expected at "
            f"most {allowed:.3g}): its attention depends on more than positions and visibility"
        )
