"""An unmodified transformers causal LM as a module with the graph inputs and outputs of `Signature`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from spaceport.graphs import attention
from spaceport.graphs.contract.signature import Lowering, Precision, Signature, visible_length
from spaceport.graphs.heads import head_logits, heads_of
from spaceport.graphs.quantization import UNQUANTIZED, Quantization
from spaceport.graphs.traits import (
    Traits,
    comparison_ids,
    decoder_layers,
    dtype_name,
    model_errors,
    probe,
    refuse,
    refuse_by_config,
    replaced_sdpa,
    require_equal_logits,
    unmodified_logits,
)

AttentionImplementation = Literal["plain", "operator"]

_EXPERTS = "batched_mm"  # transformers' experts implementation whose graph does not depend on the routing


@contextmanager
def rows_selected(model: PreTrainedModel, select: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass only the rows that `select` returns from the hidden states (B x T x hidden) to the output embedding."""

    def before(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden, *others) = arguments
        return (select(hidden), *others)

    with attention.hooked([cast(nn.Module, model.get_output_embeddings()).register_forward_pre_hook(before)]):
        yield


class Decoder(nn.Module):
    """The module that is exported: rows and KV buffers in, logits of the requested rows and the same buffers out."""

    def __init__(
        self,
        model: PreTrainedModel,
        signature: Signature,
        attention_implementation: AttentionImplementation,
        traits: Traits,
        quantization: Quantization,
    ) -> None:
        super().__init__()
        self.model = model
        self.signature = signature
        self.attention_implementation = attention_implementation
        self.quantization = quantization
        self._repeats = traits.repeats
        self._attention_hook = traits.attention_hook
        if traits.attention_hook == "interface":
            model.set_attn_implementation(attention.NAME)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip((tensor.name for tensor in self.signature.inputs), inputs, strict=True))
        past = tuple(named[tensor.name] for tensor in self.signature.past)
        visible = named["attention_mask"]
        if self.signature.window:
            visible = torch.cat((visible, named["sliding_attention_mask"]), dim=1)
        fused = self.attention_implementation == "operator"
        mask = visible if fused else attention.additive_mask(visible, self.model.dtype)
        write: attention.Write = attention.Append(named["slot_ids"])
        if self.signature.lowering == "scatter":
            write = attention.Scatter(named["slot_ids"], self.signature.kv_heads)
        cache = attention.SlotCache(past, write, visible.shape[-1], self._repeats)
        logit_rows = named["logit_rows"]

        def select_rows(hidden: Tensor) -> Tensor:  # B x T x hidden becomes B x R x hidden
            return torch.gather(hidden, 1, logit_rows[:, :, None].expand(-1, -1, hidden.shape[-1]))

        with (
            replaced_sdpa(self._attention_hook, attention.scaled_dot_product),
            rows_selected(self.model, select_rows),
            head_logits(self.model) as heads,
        ):
            output = self.model(
                input_ids=named["input_ids"],
                position_ids=named["position_ids"],
                attention_mask=mask,
                **attention.cache_argument(self.model, cache),
                use_cache=True,
            )
        logits = output.logits
        if heads:  # B x R x (1 + heads) x V becomes B x L x V
            logits = torch.stack((logits, *heads), dim=2).flatten(1, 2)
        return (logits.float(), *cast(list[Tensor], cache.present))


def decoder_of(
    model: PreTrainedModel,
    lowering: Lowering,
    attention_implementation: AttentionImplementation,
    quantization: Quantization = UNQUANTIZED,
) -> tuple[Decoder, Traits]:
    """The model as an exportable module, checked against the unmodified model, and its traits."""
    refuse_by_config(model)
    model = model.eval()
    with torch.no_grad():
        traits = probe(model)
        if attention_implementation == "operator" and traits.attention_hook == "eager":
            reason = "has an attention implementation that cannot be replaced: use plain attention (--attention plain)"
            refuse(model, reason)
        ids = comparison_ids(model, traits)
        expected = unmodified_logits(model, ids, traits)
        freeze_rotary(model)
        if model._can_set_experts_implementation():
            model.set_experts_implementation(_EXPERTS)
        heads = heads_of(model)
        sizes = (traits.layers, traits.kv_heads, traits.head_dim, traits.vocab_size)
        lines = 1 if heads is None else 1 + heads.count
        signature = Signature(*sizes, cast(Precision, dtype_name(model)), lowering, traits.window, lines)
        decoder = Decoder(model, signature, attention_implementation, traits, quantization)
        with model_errors(model):
            _compare(decoder, ids, expected)
    return decoder, traits


def freeze_rotary(model: PreTrainedModel) -> None:
    """Fix rotary frequencies at those of short texts.

    Some kinds change them with the length of the text so far; cached keys would then depend on how the text was split
    into steps."""

    def frozen(kind: str) -> str:
        return "default" if "dynamic" in kind or kind == "longrope" else kind

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = frozen(kind)  # type: ignore[assignment]
        elif isinstance(kind, dict):
            module.rope_type = {layer: frozen(value) for layer, value in kind.items()}  # type: ignore[assignment]


def _compare(decoder: Decoder, ids: Tensor, expected: Tensor) -> None:
    """Raise unless the logits equal the unmodified model's, for a text fed in two calls, the second in random order."""
    signature = decoder.signature
    length = ids.shape[1]
    half = length // 2
    capacity = visible_length(length)
    shape = (1, signature.kv_heads, capacity, signature.head_dim)
    past = [torch.zeros(shape, dtype=decoder.model.dtype, device=ids.device) for _ in signature.past]
    generator = torch.Generator().manual_seed(1)
    # positions in feeding order
    order = torch.cat((torch.arange(half), half + torch.randperm(length - half, generator=generator)))
    slots = torch.arange(capacity - length, capacity)  # of the rows in feeding order: consecutive, at the buffer's end
    if signature.lowering == "scatter":
        slots = torch.randperm(capacity, generator=generator)[:length]
    distance = order[:, None] - order[None, :]  # row x row: positions from the second back to the first
    logits = torch.empty_like(expected)
    for start, end in ((0, half), (half, length)):
        visible = torch.zeros((1, 1, end - start, capacity), dtype=torch.bool)
        in_window = torch.zeros_like(visible)
        visible[0, 0, :, slots] = distance[start:end] >= 0
        in_window[0, 0, :, slots] = (distance[start:end] >= 0) & (distance[start:end] < (signature.window or length))
        inputs = {
            "input_ids": ids[:, order[start:end].to(ids.device)],
            "position_ids": order[None, start:end],
            "slot_ids": slots[None, start:end],
            "attention_mask": visible,
            "sliding_attention_mask": in_window,
            "logit_rows": torch.arange(end - start)[None],
        }
        result = decoder(*(inputs[tensor.name].to(ids.device) for tensor in signature.rows), *past)
        logits[:, order[start:end].to(ids.device)] = result[0][:, :: signature.lines]
        past = list(result[1:])
    require_equal_logits(decoder.model, "as a graph", logits, expected)


def attention_output_name(layer: int) -> str:
    """The name of the output of a layer's attention."""
    return f"layers.{layer}.attention"


def layer_output_name(layer: int) -> str:
    """The name of the output of a layer."""
    return f"layers.{layer}.output"


class DecoderWithLayerOutputs(nn.Module):
    """A decoder that appends its layer outputs to its outputs; its parameters keep their names."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.model = decoder.model
        self._forward = decoder.forward
        self._layers = decoder_layers(decoder.model, decoder.signature.layers)
        self.names: tuple[str, ...] = ()  # of the layer outputs that the last call returned

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        recorded: dict[str, Tensor] = {}

        def record_as(name: str) -> Callable[..., None]:
            def record(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
                # Layers receive the KV cache, and of the modules in a layer only its attention does.
                if any(isinstance(value, Cache) for value in (*arguments, *named.values())):
                    recorded[name] = output[0] if isinstance(output, tuple) else output

            return record

        modules: list[tuple[nn.Module, str]] = []
        for index, layer in enumerate(self._layers):
            modules += [(child, attention_output_name(index)) for child in layer.children()]
            modules.append((layer, layer_output_name(index)))
        hooks = [module.register_forward_hook(record_as(name), with_kwargs=True) for module, name in modules]
        with attention.hooked(hooks):
            outputs = self._forward(*inputs)
        self.names = tuple(recorded)
        return (*outputs, *recorded.values())


AttentionInterface.register(attention.NAME, attention.attention_interface)
