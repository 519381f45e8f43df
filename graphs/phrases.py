"""Phrases as a mechanism: tokens that mostly follow a few others in texts like those that a model writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.graphs.contract.json_fields import JsonField
from spaceport.graphs.contract.phrases import MECHANISM, PHRASES_FILE, PhraseTable, check_phrases, write_phrases
from spaceport.graphs.mechanism import Mechanism, wrong_shapes

_TYPES = {"contexts": torch.int64, "tokens": torch.int32, "chances": torch.uint8}


@dataclass(frozen=True, eq=False)
class Phrases(Mechanism):
    """Draft tokens that need no rows of their own to be predicted: they are counted, not computed."""

    name: ClassVar[str] = MECHANISM
    refines: ClassVar[bool] = True

    table: PhraseTable

    @property
    def entry(self) -> dict[str, Any]:
        return {"entries": len(self.table.contexts)}

    def state(self) -> Mapping[str, Tensor]:
        contexts, tokens, chances = self.table
        return {
            "contexts": torch.from_numpy(contexts.view(np.int64)),
            "tokens": torch.from_numpy(tokens.astype(np.int32)),
            "chances": torch.from_numpy(chances),
        }

    @classmethod
    def read(cls, entry: JsonField, tensors: Mapping[str, Tensor]) -> Phrases:
        count = entry.exactly("entries")["entries"].whole(1)
        if {name: tensor.dtype for name, tensor in tensors.items()} != _TYPES or any(
            tuple(tensor.shape) != (count,) for tensor in tensors.values()
        ):
            raise wrong_shapes(tensors, f"contexts, tokens and chances, {count} each")
        contexts, tokens, chances = (tensors[name].numpy() for name in _TYPES)
        return cls(PhraseTable(contexts.view(np.uint64), tokens.astype(np.uint32), chances))

    def apply(self, model: PreTrainedModel, mask_ids: Sequence[int] = ()) -> None:
        """Verify that the tokens are those of a model; its graph does not change."""
        embedding = cast(nn.Embedding, model.get_input_embeddings())
        check_phrases(self.table, embedding.weight.shape[0])

    def write_files(self, bundle: Path, model: PreTrainedModel, vocab_size: int) -> None:
        with (bundle / PHRASES_FILE).open("wb") as file:
            write_phrases(file, self.table)
