"""Input rows: input embeddings of single tokens that differ from their rows in the embedding table.

Tied embeddings have one row for two purposes: the token's meaning as an input, and its logit as an output. A token that is
trained beside a frozen model, such as [Fork], needs two rows: the table keeps the one of its logit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from spaceport.graphs.contract.json_fields import JsonField
from spaceport.graphs.mechanism import Mechanism, MechanismError, wrong_shapes
from spaceport.graphs.streamed_weights import keep_values

_BUFFER = "input_rows"


@dataclass(frozen=True, eq=False)
class InputRows(Mechanism):
    """Tokens and their input embeddings."""

    name: ClassVar[str] = _BUFFER
    refines: ClassVar[bool] = True

    tokens: tuple[int, ...]
    rows: Tensor  # N x H

    @property
    def entry(self) -> dict[str, Any]:
        return {"tokens": list(self.tokens)}

    def state(self) -> Mapping[str, Tensor]:
        return {"rows": self.rows.float()}

    @classmethod
    def read(cls, entry: JsonField, tensors: Mapping[str, Tensor]) -> InputRows:
        tokens = entry.exactly("tokens")["tokens"].wholes()
        if len(set(tokens)) < len(tokens):
            raise MechanismError(f"has the tokens {list(tokens)[:8]}: expected token ids, each once")
        rows = tensors.get("rows")
        if len(tensors) != 1 or rows is None or rows.dim() != 2 or len(rows) != len(tokens):
            raise wrong_shapes(tensors, f"rows, {len(tokens)} x H")
        return cls(tokens, rows.float())

    def apply(self, model: PreTrainedModel, mask_ids: Sequence[int] = ()) -> None:
        """Let a model read the input embeddings of the tokens from these rows instead of its embedding table."""
        embedding = cast(nn.Embedding, model.get_input_embeddings())
        tokens, hidden_size = embedding.weight.shape
        if self.rows.shape[1] != hidden_size or not all(token < tokens for token in self.tokens):
            raise MechanismError(
                f"has rows of size {self.rows.shape[1]} for the ids {list(self.tokens)[:8]}: expected size "
                f"{hidden_size} and ids below {tokens}, those of the model"
            )
        for table in (embedding.weight, model.get_output_embeddings().weight):  # rows of these tables are replaced
            keep_values(cast(nn.Parameter, table))
        rows = self.rows.to(embedding.weight)
        embedding.register_buffer(_BUFFER, rows, persistent=False)  # stored in a file of its own
        replace_rows(embedding, self.tokens, _BUFFER)


def replace_rows(embedding: nn.Embedding, tokens: tuple[int, ...], name: str) -> RemovableHandle:
    """Replace the output of an embedding for some tokens by the rows in its attribute `name`."""
    scale = embedding_scale(embedding)

    def replace(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        (ids, *_) = arguments
        for token, row in zip(tokens, getattr(module, name) * scale, strict=True):
            output = torch.where((ids == token)[..., None], row.to(output.dtype), output)
        return output

    return embedding.register_forward_hook(replace)


def embedding_scale(embedding: nn.Embedding) -> float | Tensor:
    """The factor of families whose embedding module scales its output, else 1."""
    return cast("float | Tensor", getattr(embedding, "embed_scale", 1.0))
