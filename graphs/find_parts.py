"""Find the parts of a decoder in the modules of a model, and verify them by its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.attention import hooked
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.gated import uniform_rows
from spaceport.graphs.mechanism import embedding_scale
from spaceport.graphs.parts import BLOCK, Activation, DecoderParts, Experts, LayerParts, Linear, Mlp, Norm, Rotation
from spaceport.graphs.quantization import expert_matrices
from spaceport.graphs.streamed_weights import values_of
from spaceport.graphs.traits import Traits, class_name, comparison_ids, decoder_layers, require_equal_logits

_HEAD_MULTIPLE = 8

# Modules of activations and names of functions that are these.
_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
_ATTENTION = ("self_attn", "attention", "attn", "self_attention")
_OUTPUT = ("o_proj", "dense", "out_proj")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
_QUERY_NORMS = ("_norm", "_layernorm")  # behind "q" or "k"
_PLAIN = (("c_fc", "c_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h"))


class UnsupportedParts(InputFault):
    """A model that native operators cannot compute as a whole; the message says why."""


@torch.no_grad()
def parts_of(model: PreTrainedModel, traits: Traits) -> DecoderParts:
    """The parts of a model whose weights are in float32; raises unless they give its logits.

    Adapters of mask rows are left out."""
    found = require_known_parts(model, traits)
    ids = comparison_ids(model, traits)
    last = traits.max_positions - ids.shape[1]
    model.set_attn_implementation("eager")
    with uniform_rows(model, False):
        reason = InputFault("")
        for interleaved in (False, True):
            parts = replace(found, interleaved=interleaved)
            try:
                for first in (0, last):
                    positions = torch.arange(first, first + ids.shape[1])[None]
                    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
                    require_equal_logits(model, "by native operators", parts.logits(ids, first), expected)
            except InputFault as error:
                reason = error
            else:
                return replace(parts, layers=tuple(_balanced(parts, layer) for layer in parts.layers))
    raise UnsupportedParts(str(reason))


@torch.no_grad()
def require_known_parts(model: PreTrainedModel, traits: Traits) -> DecoderParts:
    """The parts of a model by their names, not compared with it; raises for an unknown one. It may be without values."""
    if traits.attention_hook != "interface" or traits.repeats != 1:
        raise UnsupportedParts(f"{class_name(model)} has an attention of its own: expected transformers' interface")
    return _Finder(model, traits).parts()


def _balanced(parts: DecoderParts, layer: LayerParts) -> LayerParts:
    """A layer whose queries and keys lose least when heads are rounded to 8 bits with one scale.

    Channels of keys are divided by a power of two, and those of queries multiplied by it, so that both are about equally
    large: products stay the same. Channels that are rotated together have the same factor. Without this, a large bias of
    a few channels of keys takes the bits of all others. Factors are at least 1, and scores are divided by what that makes
    of them: small scales of weights, which are stored in float16, would lose bits if they were divided."""
    if layer.row_norms:
        return layer
    size, shared = parts.head_dim, parts.heads // parts.kv_heads
    keys, queries = parts.kv_heads * size, parts.heads * size
    if layer.head_norms:
        q, k = (norm.gain.abs()[None] for norm in layer.head_norms)
    else:
        sizes = torch.cat([_output_sizes(linear, layer.attention_norm) for linear in layer.qkv])
        q = sizes[:queries].view(parts.kv_heads, shared, size).square().mean(1).sqrt()
        k = sizes[queries : queries + keys].view(parts.kv_heads, size)
    if layer.rotation is not None:
        half = len(parts.rotations[layer.rotation].frequencies)
        q, k = (_of_pairs(each, half, parts.interleaved) for each in (q, k))
    factors = (k.clamp(min=1e-9) / q.clamp(min=1e-9)).log2().div(2).round().clamp(-8, 8).exp2()
    if layer.head_norms:
        norms = zip(layer.head_norms, (factors[0], 1 / factors[0]), strict=True)
        first, second = (replace(norm, gain=norm.gain * factor) for norm, factor in norms)
        return replace(layer, head_norms=(first, second))
    lowest, highest = factors.min(), factors.max()
    up, down = factors / lowest, highest / factors
    every = torch.cat([up.repeat_interleave(shared, 0).flatten(), down.flatten(), torch.ones(keys)])
    parted = every.split([linear.outputs for linear in layer.qkv])  # type: ignore[no-untyped-call]
    qkv = tuple(replace(each, factor=own) for each, own in zip(layer.qkv, parted, strict=True))
    return replace(layer, qkv=qkv, scale=layer.scale * float(lowest / highest))


def _output_sizes(linear: Linear, norm: Norm | None) -> Tensor:
    """About the root mean square of each output of a linear module, for inputs of size 1 behind a norm."""
    squares = linear.weight.square()
    sizes = squares.sum(1) if norm is None else squares @ norm.gain.square()
    return (sizes if linear.bias is None else sizes + linear.bias.square()).sqrt()


def _of_pairs(sizes: Tensor, half: int, interleaved: bool) -> Tensor:
    """The sizes of channels (heads x channels), of those that are rotated together their root mean square."""
    turned, rest = sizes[:, : 2 * half].square(), sizes[:, 2 * half :]
    if interleaved:
        turned = turned.reshape(len(turned), -1, 2).mean(2).sqrt().repeat_interleave(2, 1)
    else:
        turned = turned.reshape(len(turned), 2, -1).mean(1).sqrt().repeat(1, 2)
    return torch.cat([turned, rest], 1)


class _Finder:
    """Finds parts by the names that transformers gives to modules."""

    def __init__(self, model: PreTrainedModel, traits: Traits) -> None:
        self.model, self.traits = model, traits
        self.config: Any = model.config.get_text_config()
        self.heads: int = self.config.num_attention_heads
        self.rotations: list[Rotation] = []

    def parts(self) -> DecoderParts:
        model, traits = self.model, self.traits
        if traits.head_dim % _HEAD_MULTIPLE:
            self.refuse(f"heads of size {traits.head_dim}: expected a multiple of {_HEAD_MULTIPLE}")
        if "llama_4_scaling_beta" in (getattr(self.config, "rope_parameters", None) or {}):
            self.refuse("queries that are scaled by their position")
        blocks = decoder_layers(model, traits.layers) or self.refuse("no list of layers")
        final = self.child(model.base_model, ("norm", "final_layernorm", "final_layer_norm", "ln_f"))
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            self.refuse(f"an output embedding of class {type(head).__name__}: expected a linear module")
        scale, turns = self.observed(blocks)
        layers = tuple(self.layer(block, turn) for block, turn in zip(blocks, turns, strict=True))
        norm = self.norm(final)
        factor = self.config.to_dict().get("logit_scale") or 1 / (self.config.to_dict().get("logits_scaling") or 1)
        norm = replace(norm, gain=norm.gain * factor)
        parts = DecoderParts(
            embedding=cast(nn.Embedding, model.get_input_embeddings()),
            embedding_scale=scale,
            rotations=tuple(self.rotations),
            interleaved=False,
            layers=layers,
            norm=norm,
            head=self.linear(head),
            cap=float(self.config.to_dict().get("final_logit_softcapping") or 0.0),
            heads=self.heads,
            kv_heads=traits.kv_heads,
            head_dim=traits.head_dim,
            window=traits.window,
        )
        mlps = [layer.mlp if isinstance(layer.mlp, Mlp) else layer.mlp.shared for layer in layers]
        padded = [mlp.down for mlp in mlps if mlp is not None and mlp.gated]
        for linear in (*(each for layer in layers for each in layer.linears), parts.head):
            if linear.module.in_features % BLOCK and linear not in padded:
                self.refuse(f"{linear.name} with {linear.module.in_features} inputs: expected a multiple of {BLOCK}")
        return parts

    def refuse(self, what: str) -> Any:
        raise UnsupportedParts(f"{class_name(self.model)} has {what}")

    def child(self, module: nn.Module, names: Sequence[str]) -> nn.Module:
        found = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        return cast(nn.Module, found) if found is not None else self.refuse(f"no {names[0]} in {type(module).__name__}")

    def name_of(self, module: nn.Module) -> str:
        return next(str(name) for name, each in self.model.named_modules() if each is module)

    def linear(self, module: Any, order: Tensor | None = None) -> Linear:
        if not isinstance(module, nn.Linear):
            self.refuse(f"a {type(module).__name__}: expected a linear module")
        return Linear(module, self.name_of(module), order)

    def norm(self, module: Any) -> Norm:
        """A norm; its gain is measured, since some families store it minus 1."""
        epsilon: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight: Any = getattr(module, "weight", None)
        if epsilon is None or weight is None:
            self.refuse(f"a {type(module).__name__}: expected a norm with gains")
        if "LayerNorm" in type(module).__name__:
            bias = getattr(module, "bias", None)
            return Norm("layer", weight.detach().float(), None if bias is None else bias.detach().float(), epsilon)
        gain = weight.detach().float()
        ones = cast(Tensor, module(torch.ones_like(weight)[None])[0]).float()
        if not weight.is_meta and (ones - gain).abs().max() > 0.5:
            gain = 1 + gain
        return Norm("rms", gain, None, epsilon)

    def observed(self, blocks: Sequence[nn.Module]) -> tuple[float, list[tuple[Tensor, Tensor] | None]]:
        """The factor of the embeddings, and the cosines and sines of positions 0 and 1 of each layer."""
        if self.model.device.type == "meta":
            return 1.0, [None] * len(blocks)
        ids = torch.tensor([[1, 2]])
        seen: list[Tensor] = []
        turns: list[Any] = []

        def before(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.append(arguments[0] if arguments else named["hidden_states"])
            turns.append(named.get("position_embeddings"))

        handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
        with hooked(handles), uniform_rows(self.model, False):
            self.model(input_ids=ids, use_cache=False)
        rows = cast(Tensor, self.model.get_input_embeddings()(ids)).float()
        states = seen[0].float()
        scale = float((states * rows).sum() / rows.square().sum())
        if not torch.allclose(states, rows * scale, rtol=1e-4, atol=1e-5 * float(states.abs().max())):
            self.refuse("inputs of its first layer that are not its embeddings times a number")
        scale = 1.0 if abs(scale - 1) < 1e-6 else scale
        return scale * float(embedding_scale(cast(nn.Embedding, self.model.get_input_embeddings()))), turns

    def rotation(self, turn: tuple[Tensor, Tensor]) -> int:
        """The index of a rotation, which is added if it is new; its frequencies are those of a buffer of the model."""
        cos, sin = (part.reshape(-1, part.shape[-1])[:2].float() for part in turn)
        factor, half = float(cos[0, 0]), cos.shape[-1] // 2
        angles = torch.atan2(sin[1], cos[1])
        halves = torch.equal(cos[:, :half], cos[:, half:])
        measured = angles[:half] if halves else angles[0::2]
        buffers = [b for b in self.model.buffers() if b.shape == measured.shape and b.is_floating_point()]
        exact = [b.float() for b in buffers if torch.allclose(b.float(), measured, rtol=1e-4, atol=1e-9)]
        frequencies = exact[0] if exact else measured
        for index, known in enumerate(self.rotations):
            if torch.equal(known.frequencies, frequencies) and known.factor == factor:
                return index
        self.rotations.append(Rotation(frequencies, factor))
        return len(self.rotations) - 1

    def layer(self, block: nn.Module, turn: tuple[Tensor, Tensor] | None) -> LayerParts:
        attention: Any = self.child(block, _ATTENTION)
        mlp: Any = getattr(block, "mlp", block)
        output = self.linear(self.child(attention, _OUTPUT))
        residual = getattr(block, "residual_multiplier", None)
        factor = None if residual is None else torch.full((output.outputs,), float(residual))
        rotated = turn is not None and bool(getattr(attention, "use_rope", True))
        attention_norm, after_attention, mlp_norm, after_mlp = self.norms(block)
        head_norms, row_norms = self.query_norms(attention)
        return LayerParts(
            attention_norm=attention_norm,
            qkv=self.projections(attention),
            head_norms=head_norms,
            row_norms=row_norms,
            rotation=self.rotation(turn) if rotated and turn else None,
            scale=float(attention.scaling),
            cap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
            windowed=self.windowed(attention),
            output=replace(output, factor=factor),
            after_attention=after_attention,
            parallel=bool(getattr(block, "use_parallel_residual", not hasattr(block, "post_attention_layernorm"))),
            mlp_norm=mlp_norm,
            mlp=self.experts(mlp) if hasattr(mlp, "experts") else self.mlp(mlp, factor),
            after_mlp=after_mlp,
        )

    def mlp(self, module: nn.Module, factor: Tensor | None) -> Mlp:
        names = next((names for names in (*_GATED, *_PLAIN) if all(hasattr(module, name) for name in names)), None)
        names = names or self.refuse(f"a {type(module).__name__}, which is neither a gated nor a plain MLP")
        *up, down = (self.linear(getattr(module, name)) for name in names)
        return Mlp(tuple(up), names in _GATED, self.activation(module), replace(down, factor=factor))

    def experts(self, module: nn.Module) -> Experts:
        experts, router = cast(nn.Module, module.experts), cast(Any, getattr(module, "gate", None))
        matrices = expert_matrices(experts)
        if len(matrices) != 2 or getattr(experts, "has_bias", False) or not hasattr(router, "top_k"):
            self.refuse(f"a {type(module).__name__}: expected gated experts without biases, and a router")
        inputs = matrices["gate_up_proj"].shape[2]
        if inputs % BLOCK or matrices["down_proj"].shape[1] != inputs:
            self.refuse(f"experts with {inputs} inputs: expected a multiple of {BLOCK}, and as many outputs")
        shared = getattr(module, "shared_expert", None)
        return Experts(
            experts,
            values_of(router.weight).detach().float(),
            int(router.top_k),
            bool(getattr(router, "norm_topk_prob", True)),
            self.activation(experts),
            None if shared is None else self.mlp(shared, None),
            None if shared is None else self.linear(getattr(module, "shared_expert_gate", None)),
        )

    def norms(self, block: nn.Module) -> tuple[Norm | None, Norm | None, Norm | None, Norm | None]:
        """Before and after the attention, before and after the MLP."""
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward", "post_self_attn", "post_mlp")
        norms = [getattr(block, f"{name}_layernorm", None) for name in names]
        first, second, before, after, own, last = (None if norm is None else self.norm(norm) for norm in norms)
        if before is not None:
            return first, second, before, after
        if own is not None:
            return first, own, second, last
        if first is None:
            return None, second, None, after
        return first, None, first if second is None else second, None

    def projections(self, attention: nn.Module) -> tuple[Linear, ...]:
        if hasattr(attention, "query_key_value"):
            module = cast(nn.Linear, attention.query_key_value)
            size = self.traits.head_dim
            if module.out_features != 3 * self.heads * size or self.traits.kv_heads != self.heads:
                self.refuse("queries, keys and values in one matrix in an order that is not known")
            order = torch.arange(module.out_features).view(self.heads, 3, size).transpose(0, 1).flatten()
            return (self.linear(module, order),)
        if hasattr(attention, "qkv_proj"):
            return (self.linear(attention.qkv_proj),)
        return tuple(self.linear(self.child(attention, (f"{part}_proj",))) for part in "qkv")

    def query_norms(self, attention: nn.Module) -> tuple[tuple[Norm, Norm] | None, tuple[Norm, Norm] | None]:
        names = next((ends for ends in _QUERY_NORMS if getattr(attention, f"q{ends}", None) is not None), None)
        if names is None:
            return None, None
        heads = (self.heads, self.traits.kv_heads)
        q, k = (self.head_norm(getattr(attention, f"{part}{names}"), n) for part, n in zip("qk", heads, strict=True))
        if q.gain.shape == k.gain.shape == (self.traits.head_dim,):
            if q.epsilon != k.epsilon:
                self.refuse("norms of queries and keys that differ")
            return (q, k), None
        return None, (q, k)

    def head_norm(self, module: nn.Module, heads: int) -> Norm:
        """A norm of queries or keys: RMS norms of heads have one gain for all of them, layer norms one for each."""
        if isinstance(each := getattr(module, "norms", None), nn.ModuleList):
            norms = [self.norm(norm) for norm in each]
            return replace(norms[0], gain=torch.stack([norm.gain for norm in norms]))
        norm = self.norm(module)
        if norm.kind == "rms" or norm.gain.dim() == 2:
            return norm
        return replace(
            norm, gain=norm.gain.expand(heads, -1), bias=None if norm.bias is None else norm.bias.expand(heads, -1)
        )

    def windowed(self, attention: nn.Module) -> bool:
        """Whether a layer's attention has the window of the model."""
        if self.traits.window is None:
            return False
        own = getattr(attention, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        index = getattr(attention, "layer_idx", None)
        if kinds is not None and index is not None:
            return bool(kinds[index] == "sliding_attention")
        return own is not None or not hasattr(attention, "sliding_window")

    def activation(self, mlp: nn.Module) -> Activation:
        module = self.child(mlp, ("act_fn", "activation_fn", "act"))
        kind = type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "?")
        if kind not in _ACTIVATIONS:
            self.refuse(f"the activation {kind}: expected {', '.join(sorted(set(_ACTIVATIONS.values())))}")
        return _ACTIVATIONS[kind]
