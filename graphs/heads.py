"""Heads: small networks over the last hidden state, each of which predicts a token further ahead, as in Medusa."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.attention import hooked
from spaceport.graphs.contract.json_fields import JsonField
from spaceport.graphs.mechanism import Mechanism, Shapes, require_shapes, shapes_of

_HEADS = "draft_heads"  # submodule of a model
MAX_HEADS = 64


class ResidualBlock(nn.Module):
    """x + silu(W x + b)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + nn.functional.silu(self.linear(hidden))


class DraftHeads(nn.Module):
    """Heads of residual blocks and an output matrix; head i predicts the token i + 1 after that of the output embedding.

    The names of the parameters are those of published files: `{head}.{block}.linear.weight`, `{head}.{blocks}.weight`.
    """

    def __init__(self, count: int, blocks: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        for head in range(count):
            layers = [*(ResidualBlock(hidden_size) for _ in range(blocks))]
            self.add_module(str(head), nn.Sequential(*layers, nn.Linear(hidden_size, vocab_size, bias=False)))

    @property
    def count(self) -> int:
        return len(self._modules)

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """The logits of each head, in the shape of those of the output embedding."""
        return [head(hidden) for head in self.children()]


@dataclass(frozen=True)
class Heads(Mechanism):
    """Draft heads: small networks over the last hidden state, each of which predicts a token further ahead."""

    name: ClassVar[str] = _HEADS
    needs_mask_token: ClassVar[bool | None] = False

    count: int
    blocks: int
    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)

    @property
    def entry(self) -> dict[str, Any]:
        return {"count": self.count, "blocks": self.blocks}

    def state(self) -> Mapping[str, Tensor]:
        return self.tensors

    @property
    def heads(self) -> int:
        return self.count

    @classmethod
    def read(cls, entry: JsonField, tensors: Mapping[str, Tensor]) -> Heads:
        entries = entry.exactly("count", "blocks")
        return cls(entries["count"].whole(1, MAX_HEADS), entries["blocks"].whole(0, MAX_HEADS), tensors)

    def apply(self, model: PreTrainedModel, mask_ids: Sequence[int] = ()) -> None:
        vocab_size, hidden_size = cast(Tensor, model.get_output_embeddings().weight).shape
        shapes = expected_shapes(self.count, self.blocks, hidden_size, vocab_size)
        require_shapes(shapes_of(self.tensors), shapes, "of heads")
        with torch.device("meta"):
            heads = DraftHeads(self.count, self.blocks, hidden_size, vocab_size)
        own = {name: tensor.to(model.device, model.dtype) for name, tensor in self.tensors.items()}
        heads.load_state_dict(own, assign=True)
        model.add_module(_HEADS, heads.requires_grad_(False).eval())


def expected_shapes(count: int, blocks: int, hidden_size: int, vocab_size: int) -> Shapes:
    """The shapes of the tensors of heads by name."""
    with torch.device("meta"):
        heads = DraftHeads(count, blocks, hidden_size, vocab_size)
    return shapes_of(heads.state_dict())


def heads_of(model: PreTrainedModel) -> DraftHeads | None:
    """The heads of a model; None if it has none."""
    return cast("DraftHeads | None", getattr(model, _HEADS, None))


@contextmanager
def head_logits(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """The logits of each head for the rows that the output embedding gets, filled while the model runs."""
    logits: list[Tensor] = []
    heads = heads_of(model)
    if heads is None:
        yield logits
        return

    def before(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        logits[:] = heads(arguments[0])

    with hooked([model.get_output_embeddings().register_forward_pre_hook(before)]):
        yield logits
