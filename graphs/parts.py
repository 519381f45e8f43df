"""The parts of a decoder that native operators compute, and the logits that they compute if nothing is rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from spaceport.graphs.mechanism import embedding_scale
from spaceport.graphs.streamed_weights import values_of

Activation = Literal["silu", "gelu", "gelu_tanh"]

BLOCK = 32  # inputs of a product that are rounded together


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over a row, or over each head of a row."""

    kind: Literal["rms", "layer"]
    gain: Tensor  # channels, or heads x channels of a head
    bias: Tensor | None  # of the same shape
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.view(*x.shape[:-1], *self.gain.shape)
        if self.kind == "layer":
            rows = rows - rows.mean(-1, keepdim=True)
        y = rows * (rows.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * self.gain
        return (y if self.bias is None else y + self.bias).flatten(x.dim() - 1)


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear module, whose outputs may be in another order and multiplied by factors."""

    module: nn.Linear
    name: str
    order: Tensor | None = None
    factor: Tensor | None = None  # of each output in that order

    @property
    def outputs(self) -> int:
        return self.module.out_features

    def ordered(self, values: Tensor) -> Tensor:
        """Values of outputs (first axis) in their order."""
        return values if self.order is None else values[self.order]

    @property
    def weight(self) -> Tensor:
        """outputs x inputs, float32."""
        return self.scaled(self.ordered(values_of(self.module.weight).detach().float()))

    @property
    def bias(self) -> Tensor | None:
        return None if self.module.bias is None else self.scaled(self.ordered(self.module.bias.detach().float()))

    def scaled(self, values: Tensor) -> Tensor:
        return values if self.factor is None else values * self.factor.view(-1, *[1] * (values.dim() - 1))

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary angles: position times frequency; cosines and sines are multiplied by a factor."""

    frequencies: Tensor  # one for each rotated pair
    factor: float


@dataclass(frozen=True, eq=False)
class Mlp:
    """A gated or a plain MLP."""

    up: tuple[Linear, ...]  # whose outputs together are those of the gate, if there is one, and of up
    gated: bool
    activation: Activation
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.up, self.down)

    def __call__(self, x: Tensor) -> Tensor:
        states = torch.cat([linear(x) for linear in self.up], -1)
        if not self.gated:
            return self.down(_activated(states, self.activation))
        gate, up = states.chunk(2, -1)
        return self.down(_activated(gate, self.activation) * up)


@dataclass(frozen=True, eq=False)
class Experts:
    """Gated MLPs, of which each row uses those that a router chooses."""

    module: nn.Module  # gate_up_proj: experts x 2 * width x inputs; down_proj: experts x inputs x width
    router: Tensor  # experts x inputs
    chosen: int  # experts of a row
    normalized: bool  # whether the shares of the chosen experts add up to 1
    activation: Activation
    shared: Mlp | None  # which every row uses, by a share of its own
    shared_share: Linear | None  # one output: the logit of that share

    @property
    def linears(self) -> tuple[Linear, ...]:
        return () if self.shared is None or self.shared_share is None else (*self.shared.linears, self.shared_share)

    def weights(self, name: str) -> Tensor:
        """One of the matrices of all experts, float32."""
        return values_of(getattr(self.module, name)).detach().float()

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        if self.shared is not None and self.shared_share is not None:
            y = self.shared_share(x).sigmoid() * self.shared(x)
        shares, chosen = (x @ self.router.T).softmax(-1).topk(self.chosen)
        if self.normalized:
            shares = shares / shares.sum(-1, keepdim=True)
        gates, downs = self.weights("gate_up_proj"), self.weights("down_proj")
        for expert in chosen.unique().tolist():  # type: ignore[no-untyped-call]
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = nn.functional.linear(x[rows], gates[expert]).chunk(2, -1)
            states = nn.functional.linear(_activated(gate, self.activation) * up, downs[expert])
            y.index_add_(0, rows, states * shares[rows, places, None])
        return y


@dataclass(frozen=True, eq=False)
class LayerParts:
    """A decoder layer."""

    attention_norm: Norm | None
    qkv: tuple[Linear, ...]  # whose outputs together are queries, keys and values
    head_norms: tuple[Norm, Norm] | None  # of each head of queries and of keys
    row_norms: tuple[Norm, Norm] | None  # of the queries and of the keys of all heads, by standard operators
    rotation: int | None  # index among those of the model; None: not rotated
    scale: float  # of scores
    cap: float  # of scores; 0: none
    windowed: bool
    output: Linear
    after_attention: Norm | None
    parallel: bool  # the MLP reads what the attention reads
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    after_mlp: Norm | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.qkv, self.output, *self.mlp.linears)


@dataclass(frozen=True, eq=False)
class DecoderParts:
    """A decoder as native operators compute it."""

    embedding: nn.Embedding
    embedding_scale: float  # of the rows of its table
    rotations: tuple[Rotation, ...]
    interleaved: bool  # rotated pairs are neighbours, instead of half of the rotated channels apart
    layers: tuple[LayerParts, ...]
    norm: Norm
    head: Linear
    cap: float  # of logits; 0: none
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    @property
    def tied(self) -> bool:
        """Whether input and output embeddings are one table."""
        return self.head.module.weight is self.embedding.weight

    def logits(self, ids: Tensor, first: int) -> Tensor:
        """The logits of a text (1 x tokens) from a position on: what the operators compute if nothing is rounded."""
        positions = torch.arange(first, first + ids.shape[1]).float()
        angles = [positions[:, None] * rotation.frequencies for rotation in self.rotations]
        turns = [
            (angle.cos() * rotation.factor, angle.sin() * rotation.factor)
            for angle, rotation in zip(angles, self.rotations, strict=True)
        ]
        distance = positions[:, None] - positions
        causal = distance >= 0
        near = causal & (distance < (self.window or len(positions)))
        x = self.embedding(ids)[0].float() * (self.embedding_scale / float(embedding_scale(self.embedding)))
        for layer in self.layers:
            turn = None if layer.rotation is None else turns[layer.rotation]
            x = self._layer(layer, x, turn, near if layer.windowed else causal)
        return _capped(self.head(self.norm(x)), self.cap)[None]

    def _layer(self, layer: LayerParts, x: Tensor, turn: tuple[Tensor, Tensor] | None, visible: Tensor) -> Tensor:
        normed = x if layer.attention_norm is None else layer.attention_norm(x)
        sizes = [self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2]
        q, k, v = torch.cat([linear(normed) for linear in layer.qkv], -1).split(sizes, -1)  # type: ignore[no-untyped-call]
        if layer.row_norms:
            q, k = (norm(states) for norm, states in zip(layer.row_norms, (q, k), strict=True))
        q, k, v = (states.unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for states in (q, k, v))
        if layer.head_norms:
            q, k = (norm(states) for norm, states in zip(layer.head_norms, (q, k), strict=True))
        if turn:
            q, k = (self._turned(states, *turn) for states in (q, k))
        k, v = (states.repeat_interleave(self.heads // self.kv_heads, 0) for states in (k, v))
        scores = _capped(q @ k.mT * layer.scale, layer.cap).masked_fill(~visible, -torch.inf)
        attended = layer.output((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        middle = x + (attended if layer.after_attention is None else layer.after_attention(attended))
        source = x if layer.parallel else middle
        states = layer.mlp(source if layer.mlp_norm is None else layer.mlp_norm(source))
        return middle + (states if layer.after_mlp is None else layer.after_mlp(states))

    def _turned(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = 2 * cos.shape[-1]
        turned, rest = states[..., :rotated], states[..., rotated:]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, -1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat((turned, rest), -1)


def _capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def _activated(x: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return nn.functional.silu(x)
    return nn.functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
