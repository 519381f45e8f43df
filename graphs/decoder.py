"""Decoder: an unmodified transformers causal LM as one graph module with the contract's inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from spaceport.graphs import attention, kv
from spaceport.graphs.faults import InputFault
from spaceport.graphs.signature import Lowering, Signature, visible_length

AttentionForm = Literal["plain", "operator"]
# How a family lets its attention be replaced: through transformers' interface, through torch's
# scaled_dot_product_attention, or not at all (its own matrix products, which take an additive mask as it is).
Entrance = Literal["interface", "sdpa", "eager"]

# Largest difference to the unmodified model, relative to its largest logit, that rounding explains.
PROOF_TOLERANCE = {"float32": 1e-4, "float16": 5e-2}
_PROOF_ROWS = 24
_EXPERTS = "batched_mm"  # transformers' form of mixture-of-experts layers whose graph does not depend on the routing
_PROOF_WINDOW = 512  # windows longer than this are trusted to be the same rule as shorter ones


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
    entrance: Entrance
    max_positions: int


class Decoder(nn.Module):
    """The graph: rows and KV buffers in, logits of the wanted rows and the same buffers out."""

    def __init__(self, model: PreTrainedModel, signature: Signature, form: AttentionForm, traits: Traits) -> None:
        super().__init__()
        self.model = model
        self.signature = signature
        self.form = form
        self._repeats = traits.repeats
        self._entrance: Entrance = traits.entrance
        if traits.entrance == "interface":
            model.set_attn_implementation(attention.NAME)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip((tensor.name for tensor in self.signature.inputs), inputs, strict=True))
        past = tuple(named[tensor.name] for tensor in self.signature.past)
        visible = named["attention_mask"]
        if self.signature.window:
            visible = torch.cat((visible, named["sliding_attention_mask"]), dim=1)
        mask = visible if self.form == "operator" else attention.additive(visible, past[0].dtype)
        cache = kv.SlotCache(past, self._write(named["slot_ids"]), visible.shape[-1], self._repeats)
        with _entered(self._entrance, attention.scaled_dot_product), _rows_gathered(self.model, named["logit_rows"]):
            output = self.model(
                input_ids=named["input_ids"],
                position_ids=named["position_ids"],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
        return (output.logits.float(), *cast(list[Tensor], cache.present))

    def _write(self, slot_ids: Tensor) -> kv.Write:
        if self.signature.lowering == "scatter":
            return kv.Scatter(slot_ids, self.signature.kv_heads)
        return kv.Append(slot_ids)


def decoder_of(model: PreTrainedModel, lowering: Lowering, form: AttentionForm) -> tuple[Decoder, Traits]:
    """The model as a graph module, proven equal to the unmodified model, and what is known of it."""
    refuse_by_config(model)
    model = model.eval()
    with torch.no_grad():
        traits = probe(model)
        if form == "operator" and traits.entrance == "eager":
            raise UnsupportedModel(
                f"{_name(model)} has an attention of its own that cannot be replaced: use plain attention"
            )
        ids = _proof_ids(model, traits)
        expected = _unmodified_logits(model, ids, traits)
        _freeze_rotary(model)
        if model._can_set_experts_implementation():
            model.set_experts_implementation(_EXPERTS)
        dtype = "float16" if model.dtype == torch.float16 else "float32"
        signature = Signature(
            traits.layers,
            traits.kv_heads,
            traits.head_dim,
            traits.vocab_size,
            cast(Any, dtype),
            lowering,
            traits.window,
        )
        decoder = Decoder(model, signature, form, traits)
        with _reasons(model):
            _prove(decoder, ids, expected)
    return decoder, traits


def refuse_by_config(model: PreTrainedModel) -> None:
    """Raise for models whose configuration already says that rows and slots cannot tell them."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{_name(model)} is an encoder-decoder: expected a decoder-only causal language model")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModel(
            f"{_name(model)} has layers of kind {', '.join(sorted(kinds))}: expected full or sliding-window attention only"
        )
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(
            f"{_name(model)} takes no position_ids: it goes by the order of its cache, as ALiBi does, or by a running "
            "state; expected rotary or learned positions"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel(f"{_name(model)} lets tokens see later ones: expected causal attention")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{_name(model)} has no output embedding: expected a model with a language-model head")


def probe(model: PreTrainedModel) -> Traits:
    """Run two tokens eagerly and read off what a configuration may not say or say wrongly."""
    entrance = _entrance(model)
    seen: list[dict[str, Any]] = []
    cache = kv.RecordingCache()
    ids = torch.tensor([[1, 2]], device=model.device)
    mask = torch.tensor(
        [[[[0.0, attention.HIDDEN[torch.float16]], [0.0, 0.0]]]], dtype=model.dtype, device=model.device
    )
    before = model.config._attn_implementation
    try:
        with _reasons(model), _recording(model, entrance, seen):
            output = model(
                input_ids=ids, position_ids=ids - 1, attention_mask=mask, past_key_values=cache, use_cache=True
            )
    finally:
        if entrance == "interface":
            model.set_attn_implementation(before)
    return _traits(model, entrance, cache, seen, output.logits.shape[-1])


def _traits(
    model: PreTrainedModel, entrance: Entrance, cache: kv.RecordingCache, seen: list[dict[str, Any]], vocab_size: int
) -> Traits:
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    if sorted(cache.seen) != list(range(layers)):
        raise UnsupportedModel(
            f"{_name(model)} cached keys and values in layers {sorted(cache.seen)} of {layers}: expected every layer to"
        )
    shapes = {tensor.shape for pair in cache.seen.values() for tensor in pair}
    if len(shapes) != 1:
        listed = ", ".join(str(tuple(shape)) for shape in sorted(shapes))
        raise UnsupportedModel(
            f"{_name(model)} has keys and values of shapes {listed}: expected one shape in all layers"
        )
    (_, heads, _, head_dim) = next(iter(shapes))
    if entrance == "interface" and len(seen) < layers:
        raise UnsupportedModel(
            f"{_name(model)} hands its attention over in {len(seen)} of {layers} layers: expected every layer to"
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
        entrance,
        _max_positions(config),
    )


def _window(model: PreTrainedModel, seen: list[dict[str, Any]]) -> int | None:
    """The one window size that the layers pass to attention, if any does."""
    windows = {call["sliding_window"] for call in seen if call.get("sliding_window") is not None}
    if len(windows) > 1:
        raise UnsupportedModel(f"{_name(model)} has windows of {sorted(windows)} tokens: expected one size")
    config = model.config.get_text_config()
    told = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True) and "sliding_attention" in (
        getattr(config, "layer_types", None) or ("sliding_attention",)
    )
    if told and used and not windows and told < _max_positions(config):
        raise UnsupportedModel(
            f"{_name(model)} has sliding_window {told} in its configuration, but no layer passes a window to attention: "
            "expected both or neither; set sliding_window to null if the model was trained without"
        )
    return next(iter(windows), None)


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


def _freeze_rotary(model: PreTrainedModel) -> None:
    """Keep rotary frequencies at their first values: some kinds change them with the length of the text seen so far,
    and then what is cached would depend on how the text was cut into steps."""

    def frozen(kind: str) -> str:
        return "default" if "dynamic" in kind or kind == "longrope" else kind

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = frozen(kind)  # type: ignore[assignment]
        elif isinstance(kind, dict):
            module.rope_type = {layer: frozen(value) for layer, value in kind.items()}  # type: ignore[assignment]


def _proof_ids(model: PreTrainedModel, traits: Traits) -> Tensor:
    rows = _PROOF_ROWS + (traits.window if traits.window and traits.window <= _PROOF_WINDOW else 0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, traits.vocab_size, (1, min(rows, traits.max_positions)), generator=generator)
    return ids.to(model.device)


def _unmodified_logits(model: PreTrainedModel, ids: Tensor, traits: Traits) -> Tensor:
    if traits.entrance == "interface":
        model.set_attn_implementation("eager")
    return cast(Tensor, model(input_ids=ids, use_cache=False).logits.float())


def _prove(decoder: Decoder, ids: Tensor, expected: Tensor) -> None:
    """Feed a text in two calls, the second in no order, and hold the logits against the unmodified model's."""
    signature = decoder.signature
    length = ids.shape[1]
    half = length // 2
    capacity = visible_length(length)
    shape = (1, signature.kv_heads, capacity, signature.head_dim)
    past = [torch.zeros(shape, dtype=decoder.model.dtype, device=ids.device) for _ in signature.past]
    dice = torch.Generator().manual_seed(1)
    order = torch.cat((torch.arange(half), half + torch.randperm(length - half, generator=dice)))  # positions as fed
    slots = torch.arange(capacity - length, capacity)  # of the rows as fed: a run up to the end of the buffer
    if signature.lowering == "scatter":
        slots = torch.randperm(capacity, generator=dice)[:length]
    before = order[:, None] - order[None, :]  # row x row: how many positions the second lies before the first
    logits = torch.empty_like(expected)
    for start, end in ((0, half), (half, length)):
        visible = torch.zeros((1, 1, end - start, capacity), dtype=torch.bool)
        near = torch.zeros_like(visible)
        visible[0, 0, :, slots] = before[start:end] >= 0
        near[0, 0, :, slots] = (before[start:end] >= 0) & (before[start:end] < (signature.window or length))
        given = {
            "input_ids": ids[:, order[start:end].to(ids.device)],
            "position_ids": order[None, start:end],
            "slot_ids": slots[None, start:end],
            "attention_mask": visible,
            "sliding_attention_mask": near,
            "logit_rows": torch.arange(end - start)[None],
        }
        result = decoder(*(given[tensor.name].to(ids.device) for tensor in signature.rows), *past)
        logits[:, order[start:end].to(ids.device)] = result[0]
        past = list(result[1:])
    difference = float((logits - expected).abs().max())
    allowed = PROOF_TOLERANCE[signature.dtype] * max(1.0, float(expected.abs().max()))
    if not difference <= allowed:
        raise UnsupportedModel(
            f"{_name(decoder.model)} as a graph differs from the model by {difference:.3g} in its logits (at most "
            f"{allowed:.3g} expected): something in its attention depends on more than positions and visibility"
        )


def _entrance(model: PreTrainedModel) -> Entrance:
    if model._can_set_attn_implementation():
        return "interface"
    return "sdpa" if model.config._attn_implementation == "sdpa" else "eager"


@contextmanager
def _entered(entrance: Entrance, function: Callable[..., Tensor]) -> Iterator[None]:
    """Replace torch's scaled_dot_product_attention for the families that know no other entrance."""
    if entrance != "sdpa":
        yield
        return
    original = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = function
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


@contextmanager
def _recording(model: PreTrainedModel, entrance: Entrance, seen: list[dict[str, Any]]) -> Iterator[None]:
    def interface(*arguments: Any, **named: Any) -> tuple[Tensor, None]:
        seen.append(named)
        return attention.attention_interface(*arguments, **named)

    if entrance == "interface":
        AttentionInterface.register(attention.NAME + "-probe", interface)
        model.set_attn_implementation(attention.NAME + "-probe")
    with _entered(entrance, attention.scaled_dot_product):
        yield


@contextmanager
def _reasons(model: PreTrainedModel) -> Iterator[None]:
    """Tell what a model raises when it is run over rows and slots as a reason against it."""
    try:
        yield
    except UnsupportedModel:
        raise
    except attention.UnsupportedAttention as error:
        raise UnsupportedModel(f"{_name(model)} cannot be exported: {error}") from error
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UnsupportedModel(f"{_name(model)} does not run over a plain KV cache: {first}") from error


@contextmanager
def _rows_gathered(model: PreTrainedModel, logit_rows: Tensor) -> Iterator[None]:
    """Let only the wanted rows reach the output embedding: B x T x hidden becomes B x R x hidden."""

    def gather(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden, *others) = arguments
        wanted = logit_rows[:, :, None].expand(-1, -1, hidden.shape[-1])
        return (torch.gather(hidden, 1, wanted), *others)

    handle = cast(nn.Module, model.get_output_embeddings()).register_forward_pre_hook(gather)
    try:
        yield
    finally:
        handle.remove()


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__


AttentionInterface.register(attention.NAME, attention.attention_interface)
