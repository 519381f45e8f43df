"""Mechanisms: what a model needs to draft besides its base weights, as named tensors and a few numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from spaceport.graphs.contract.draft_methods import CORRECTION_FILE, CorrectionTables, write_tables
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField
from spaceport.graphs.contract.phrases import PHRASES, PHRASES_FILE, PhraseTable, check_phrases, write_phrases
from spaceport.graphs.streamed_weights import keep_values, values_of
from spaceport.graphs.traits import different_names

Shapes = Mapping[str, tuple[int, ...]]
M = TypeVar("M", bound="Mechanism")


class MechanismError(InputFault):
    """Tensors or numbers that do not belong together or to the model; the message names them."""


class Mechanism(ABC):
    """A part of a model with which it drafts: a subclass, and an entry of `exporter.draft_files`."""

    # Of its entry in sar_config.json and in a manifest, and of its file of tensors.
    name: ClassVar[str]
    # Whether it acts on mask rows, so that a mask token is needed; False: it drafts instead of them; None: neither.
    needs_mask_token: ClassVar[bool | None] = None
    # Whether it only refines the drafts of others, and adds no parameters to the model.
    refines: ClassVar[bool] = False

    @property
    @abstractmethod
    def entry(self) -> dict[str, Any]:
        """Its numbers, as sar_config.json and a manifest have them."""

    @abstractmethod
    def state(self) -> Mapping[str, Tensor]:
        """Its tensors by name, as its file has them."""

    @classmethod
    @abstractmethod
    def read(cls: type[M], entry: JsonField, tensors: Mapping[str, Tensor]) -> M:
        """The mechanism with these numbers and tensors; raises if they do not belong together."""

    @abstractmethod
    def apply(self, model: PreTrainedModel, mask_ids: Sequence[int]) -> None:
        """Add it to a model; raises if it does not fit."""

    @property
    def heads(self) -> int:
        """Draft heads: lines of logits that it adds to each row."""
        return 0

    def write_files(self, bundle: Path, model: PreTrainedModel, vocab_size: int) -> None:  # noqa: B027
        """Write what a runtime needs besides the graph into a bundle's folder."""


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """The shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def require_shapes(shapes: Shapes, expected: Shapes, what: str) -> None:
    """Raise unless tensors have exactly the names and shapes that a base model needs; `what` says what they are."""
    if wrong := different_names(shapes.keys(), expected.keys()):
        raise MechanismError(f"{wrong}: expected {len(expected)} {what}")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise MechanismError(f"{name} has shape {shape}: expected {expected[name]}, which the base model has")


def wrong_shapes(tensors: Mapping[str, Tensor], expected: str) -> MechanismError:
    """The error for tensors that do not have the expected names and shapes."""
    return MechanismError(f"has tensors with the shapes {shapes_of(tensors)}: expected {expected}")


_INPUT_ROWS = "input_rows"  # buffer of an embedding


@dataclass(frozen=True, eq=False)
class InputRows(Mechanism):
    """Input embeddings of single tokens that differ from their rows in the embedding table.

    Tied embeddings have one row for two purposes: the token's meaning as an input, and its logit as an output. A token that
    is trained beside a frozen model, such as [Fork], needs two rows: the table keeps the one of its logit.
    """

    name: ClassVar[str] = _INPUT_ROWS
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
        embedding.register_buffer(_INPUT_ROWS, rows, persistent=False)  # stored in a file of its own
        replace_rows(embedding, self.tokens, _INPUT_ROWS)


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


@dataclass(frozen=True, eq=False)
class Factors(Mechanism):
    """Draft correction: how the token before a mask slot's candidate raises or lowers its score.

    The mask slots of a step predict their tokens independently: they do not know which token is chosen before theirs. The
    correction of a candidate is a product of two vectors, one of the token before it and one of its own. Both are low-rank
    projections (H x rank) of the model's token embeddings, so that rare tokens profit from similar ones.
    """

    name: ClassVar[str] = "draft_correction"
    refines: ClassVar[bool] = True

    before: Tensor
    after: Tensor

    @property
    def rank(self) -> int:
        return self.before.shape[1]

    @property
    def entry(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def state(self) -> Mapping[str, Tensor]:
        return {"before": self.before.half(), "after": self.after.half()}

    @classmethod
    def read(cls, entry: JsonField, tensors: Mapping[str, Tensor]) -> Factors:
        rank = entry.exactly("rank")["rank"].whole(1)
        shapes = {tuple(tensor.shape[1:]) for tensor in tensors.values()} | {(rank,)}
        if tensors.keys() != {"before", "after"} or len(shapes) > 1 or len(tensors["before"]) != len(tensors["after"]):
            raise wrong_shapes(tensors, f"before and after, H x {rank}")
        return cls(tensors["before"].float(), tensors["after"].float())

    def apply(self, model: PreTrainedModel, mask_ids: Sequence[int] = ()) -> None:
        """Verify that the factors are those of a model; its graph does not change."""
        size, expected = self.before.shape[0], cast(nn.Embedding, model.get_input_embeddings()).weight.shape[1]
        if size != expected:
            raise MechanismError(f"is for embeddings of size {size}: expected {expected}, that of the model")

    def write_files(self, bundle: Path, model: PreTrainedModel, vocab_size: int) -> None:
        """Write the tables of all tokens; tokens without an embedding have none."""
        embeddings = cast(nn.Embedding, model.get_input_embeddings()).weight
        missing = max(0, vocab_size - embeddings.shape[0])
        before, after = (
            nn.functional.pad(table[:vocab_size], (0, 0, 0, missing)).half().numpy()
            for table in self.tables(values_of(embeddings))
        )
        with (bundle / CORRECTION_FILE).open("wb") as file:
            write_tables(file, CorrectionTables(before, after))

    def tables(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors of all tokens, each V x rank, for a table of token embeddings (V x H)."""
        table = embeddings.detach().float()
        return table @ self.before, table @ self.after


class DraftCorrection(nn.Module):
    """The factors as trainable parameters, for embeddings scaled to a mean square of 1."""

    def __init__(self, embeddings: Tensor, rank: int, factors: Factors | None = None) -> None:
        super().__init__()
        hidden = embeddings.shape[1]
        self.scale = float(embeddings.detach().float().pow(2).mean().rsqrt())
        if factors is None:
            factors = Factors(torch.randn(hidden, rank) * self.scale / hidden**0.5, torch.zeros(hidden, rank))
        self.before = nn.Parameter((factors.before.float() / self.scale).to(embeddings.device))
        self.after = nn.Parameter((factors.after.float() / self.scale).to(embeddings.device))

    def forward(self, embeddings: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """The corrections (N x C) of candidates (N x C token ids) behind the tokens `before` (N)."""
        left = self._scaled(embeddings, before) @ self.before
        right = self._scaled(embeddings, candidates) @ self.after
        return torch.einsum("nr,ncr->nc", left, right)

    def losses(
        self, embeddings: Tensor, before: Tensor, candidates: Tensor, scores: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross entropy of each row over its candidates, and whether the best of them is the target.

        A row whose target is not among its candidates has no loss: no correction can choose it.
        """
        corrected = scores.float() + self(embeddings, before, candidates)
        equal = candidates == targets[:, None]
        entropy = cross_entropy(corrected, equal.to(torch.uint8).argmax(-1), reduction="none")
        correct = equal.gather(1, corrected.argmax(-1, keepdim=True))[:, 0]
        return torch.where(equal.any(-1), entropy, torch.zeros_like(entropy)), correct.to(entropy.dtype)

    def factors(self) -> Factors:
        """The trained factors for unscaled embeddings."""
        return Factors(*((factor.detach() * self.scale).float().cpu() for factor in (self.before, self.after)))

    def _scaled(self, embeddings: Tensor, tokens: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens, embeddings.detach()).float() * self.scale


_PHRASE_TYPES = {"contexts": torch.int64, "tokens": torch.int32, "chances": torch.uint8}


@dataclass(frozen=True, eq=False)
class Phrases(Mechanism):
    """Draft tokens that need no rows of their own to be predicted: they are counted, not computed."""

    name: ClassVar[str] = PHRASES
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
        if {name: tensor.dtype for name, tensor in tensors.items()} != _PHRASE_TYPES or any(
            tuple(tensor.shape) != (count,) for tensor in tensors.values()
        ):
            raise wrong_shapes(tensors, f"contexts, tokens and chances, {count} each")
        contexts, tokens, chances = (tensors[name].numpy() for name in _PHRASE_TYPES)
        return cls(PhraseTable(contexts.view(np.uint64), tokens.astype(np.uint32), chances))

    def apply(self, model: PreTrainedModel, mask_ids: Sequence[int] = ()) -> None:
        """Verify that the tokens are those of a model; its graph does not change."""
        embedding = cast(nn.Embedding, model.get_input_embeddings())
        check_phrases(self.table, embedding.weight.shape[0])

    def write_files(self, bundle: Path, model: PreTrainedModel, vocab_size: int) -> None:
        with (bundle / PHRASES_FILE).open("wb") as file:
            write_phrases(file, self.table)
