"""Packed model: a transformers causal LM that runs on packed rows and returns their losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from spaceport.graphs import attention
from spaceport.graphs.attention import RecordedPrefix, RecordingCache
from spaceport.graphs.contract.draft_methods import CANDIDATES
from spaceport.graphs.decoder import freeze_rotary, rows_selected
from spaceport.graphs.gated import gated_tokens, uniform_rows
from spaceport.graphs.mechanism import DraftCorrection
from spaceport.graphs.traits import (
    Traits,
    comparison_ids,
    model_errors,
    probe,
    refuse_by_config,
    require_equal_logits,
    unmodified_logits,
)
from spaceport.training.packing import IGNORED, PackedBatch

_ROWS = 128  # whose logits are held at once
_ATTENDING = 64  # mask rows that attend together
_NEVER = -1e4  # logit of a token that is never generated: its probability is 0


class RowLosses(NamedTuple):
    """Losses of rows, and the best tokens of each as candidates of its draft."""

    losses: Tensor  # N: cross entropy
    correct: Tensor  # N: 1 if the most probable token is the target, else 0
    candidates: Tensor  # N x C: the most probable tokens, best first
    scores: Tensor  # N x C: their logits, without gradients


class _HeadLoss(torch.autograd.Function):
    """Losses of rows, with the gradient of each stored in place of its logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        most: int,
        forbidden: Sequence[int],
    ) -> tuple[Tensor, ...]:
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        correct = torch.empty_like(losses)
        gradients = torch.empty_like(hidden)
        count = min(most, len(weight))
        scores = hidden.new_empty(len(hidden), count, dtype=torch.float32)
        candidates = torch.empty_like(scores, dtype=torch.int64)
        for first in range(0, len(hidden), _ROWS):
            rows = slice(first, first + _ROWS)
            logits = without(linear(hidden[rows], weight, bias), forbidden)
            wanted = targets[rows, None]
            scores[rows], candidates[rows] = logits.topk(count)
            correct[rows] = (candidates[rows, :1] == wanted)[:, 0].float()
            gradient = torch.log_softmax(logits, -1, dtype=torch.float32)
            losses[rows] = -gradient.gather(1, wanted)[:, 0]
            gradient.exp_().scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=torch.float32))
            gradients[rows] = gradient.to(weight.dtype) @ weight
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(correct, candidates, scores)
        return losses, correct, candidates, scores

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return outer[0][:, None].to(gradients.dtype) * gradients, *(None,) * 5


def without(logits: Tensor, forbidden: Sequence[int]) -> Tensor:
    """The logits, in place, without those of tokens that are never generated."""
    if forbidden:
        logits[:, list(forbidden)] = _NEVER
    return logits


def head_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, most: int, forbidden: Sequence[int] = ()
) -> RowLosses:
    """The cross entropy of rows of hidden states (N x H), with up to `most` candidates each."""
    with torch.autocast(hidden.device.type, enabled=False):
        found = _HeadLoss.apply(hidden.to(weight.dtype), weight, bias, targets, most, forbidden)  # type: ignore[no-untyped-call]
    return RowLosses(*found)


NAME = "spaceport-tune"

# Rows of a batch's sums, 6 x (1 + mask slots): losses, correct predictions, predictions; losses and correct predictions with
# the draft correction; predictions that are correct as all before them in their mask group are. Column 0 is next-token
# prediction, column i is mask slot i.
LOSS, CORRECT, COUNT, CORRECTED_LOSS, CORRECTED, REACHED = range(6)
SUMS = 6


class PackedModel(nn.Module):
    """A model of any exportable family that takes packed rows with arbitrary tree visibility."""

    def __init__(self, model: PreTrainedModel, traits: Traits, mask_slots: int) -> None:
        super().__init__()
        self.model = model
        self.traits = traits
        self.mask_slots = mask_slots
        self.correction: DraftCorrection | None = None
        self.forbidden: tuple[int, ...] = ()  # tokens that are never generated: mask rows do not learn to avoid them
        if traits.attention_hook == "interface":
            model.set_attn_implementation(NAME)

    @property
    def positions(self) -> int:
        """Maximum positions of the model."""
        return self.traits.max_positions

    @property
    def candidates(self) -> int:
        """Candidates of a row: those that a draft correction scores, else the best one, for the accuracy."""
        return 1 if self.correction is None else CANDIDATES

    def forward(
        self, ids: Tensor, positions: Tensor, visible: Tensor, targets: Tensor, mask_slots: Tensor, before: Tensor
    ) -> Tensor:
        learned = targets != IGNORED
        logits = without(self.logits(ids, positions, visible, learned), self.forbidden)
        losses = losses_of(logits, targets[learned], self.candidates)
        return self.sums_of(losses, targets[learned], mask_slots[learned], ids.gather(1, before)[learned])

    def sums_of(self, found: RowLosses, targets: Tensor, slots: Tensor, before: Tensor) -> Tensor:
        """The sums of a batch from its rows with targets, their mask slots and the tokens before their targets."""
        each, correct = found.losses, found.correct
        if self.forbidden:  # an answer may name such a token, but no draft can contain it
            each = each * ~torch.isin(targets, torch.tensor(self.forbidden, device=targets.device))
        corrected = [torch.zeros_like(each)] * 2
        if self.correction is not None:
            table = cast(nn.Embedding, self.model.get_input_embeddings()).weight
            losses = self.correction.losses(table, before, found.candidates, found.scores, targets)
            corrected = [line * (slots > 0) for line in losses]
            correct = corrected[1]
        lines = (each, found.correct, torch.ones_like(each), *corrected, reached(correct, slots))
        sums = torch.zeros(SUMS, self.mask_slots + 1, dtype=each.dtype, device=each.device)
        return sums.index_add(1, slots, torch.stack(lines))

    def logits(self, ids: Tensor, positions: Tensor, visible: Tensor, wanted: Tensor) -> Tensor:
        """Logits of the wanted rows (B x T, bool), concatenated: N x V."""
        with rows_selected(self.model, lambda hidden: hidden[wanted][None]):  # B x T x hidden becomes 1 x N x hidden
            output = self.model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self._mask(visible, positions, positions),
                use_cache=False,
            )
        return cast(Tensor, output.logits)[0].float()

    def _mask(self, visible: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """The attention mask of rows (B x T x A, bool) at these positions."""
        planes = visible[:, None]
        if self.traits.window is not None:
            near = queries[:, :, None] - keys[:, None, :] < self.traits.window
            planes = torch.cat((planes, (visible & near)[:, None]), dim=1)
        if self.traits.attention_hook == "interface":
            return planes
        return attention.additive_mask(planes, _working_type(self.model))


def reached(correct: Tensor, slots: Tensor) -> Tensor:
    """Which mask slots are correct as all before them in their group are (N); groups are whole and begin with slot 1."""
    wrong = (1 - correct) * (slots > 0)
    sums = wrong.cumsum(0)
    before = torch.where(slots == 1, sums - wrong, -1).cummax(0).values  # wrong slots before the group
    return (slots > 0) * (sums == before).to(correct.dtype)


def losses_of(logits: Tensor, targets: Tensor, most: int) -> RowLosses:
    """The losses of rows of logits (N x V), with up to `most` candidates each."""
    each = cross_entropy(logits, targets, reduction="none")
    scores, candidates = logits.detach().topk(min(most, logits.shape[-1]))
    return RowLosses(each, (candidates[:, 0] == targets).to(each.dtype), candidates, scores)


def packed_model_of(model: PreTrainedModel, mask_slots: int) -> PackedModel:
    """Wrap a model, after verifying that packed rows give the logits of its own forward pass; raise if they differ."""
    refuse_by_config(model)
    model.eval()
    with torch.no_grad():
        traits = probe(model)
        ids = comparison_ids(model, traits)
        expected = unmodified_logits(model, ids, traits)
        freeze_rotary(model)
        packed_model = PackedModel(model, traits, mask_slots)
        with model_errors(model):
            _verify(packed_model, ids, expected)
    return packed_model


def run(packed_model: nn.Module, batch: PackedBatch) -> Tensor:
    """Sums of a batch (see LOSS, CORRECT, COUNT); works through wrappers such as DDP."""
    return cast(Tensor, packed_model(*batch))


def _verify(packed_model: PackedModel, ids: Tensor, expected: Tensor) -> None:
    """Feed a text in shuffled order and compare the logits with the unmodified model's."""
    order = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(1)).to(ids.device)
    visible = (order[:, None] >= order[None, :])[None]
    wanted = torch.ones_like(ids, dtype=torch.bool)
    logits = packed_model.logits(ids[:, order], order[None], visible, wanted)
    require_equal_logits(packed_model.model, "over packed rows", logits, expected[0, order])


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,  # B x planes x T x T, bool
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers; uses torch's fused kernels unless the model has a softcap."""
    attention.refuse_unknown(others)
    mask = attention.mask_plane(attention_mask, sliding_window is not None)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if softcap is not None:
        output = attention.grouped_attention(query, key, value, mask, scale, softcap)
        return output.transpose(1, 2).contiguous(), None
    grouped = query.shape[1] != key.shape[1]
    outputs = [
        scaled_dot_product_attention(part, keys, values, visible, dropout, scale=scale, enable_gqa=grouped)
        for part, keys, values, visible in _visible_parts(query, key, value, mask)
    ]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1), None


def _visible_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows in parts, each with the keys and values that it sees: of mask rows behind a text, not those of all groups."""
    prefix = key.shape[2] - query.shape[2]  # keys before those of the rows
    if not prefix:
        yield query, key, value, mask
        return
    for first in range(0, query.shape[2], _ATTENDING):
        rows = slice(first, first + _ATTENDING)
        columns = mask[:, 0, rows].flatten(0, 1).any(dim=0).nonzero()[:, 0]
        yield query[:, :, rows], key[:, :, columns], value[:, :, columns], mask[:, :, rows, columns]


def _working_type(model: PreTrainedModel) -> torch.dtype:
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


AttentionInterface.register(NAME, _attend)


class FrozenBaseModel(PackedModel):
    """A packed model whose loss is that of the mask rows; all tokens of a batch stand before all of its mask rows."""

    def __init__(self, packed: PackedModel) -> None:
        super().__init__(packed.model, packed.traits, packed.mask_slots)
        self.plain_head = False  # whether logits are the output embedding's own, so that they need not be stored

    def forward(
        self, ids: Tensor, positions: Tensor, visible: Tensor, targets: Tensor, mask_slots: Tensor, before: Tensor
    ) -> Tensor:
        masks = (mask_slots != 0).any(dim=0)
        if not self.training or not masks.any():  # validation; or padding of a process that has no sample left
            return super().forward(ids, positions, visible, targets, mask_slots, before)
        split = int(masks.to(torch.uint8).argmax())
        learned = (targets[:, split:] != IGNORED) & (mask_slots[:, split:] > 0)
        wanted, slots = targets[:, split:][learned], mask_slots[:, split:][learned]
        previous = ids.gather(1, before)[:, split:][learned]
        logits, hidden = self.split_logits(
            ids, positions, visible, split, learned, heads=0 if self.plain_head else None
        )
        if self.plain_head:
            head = cast(nn.Linear, self.model.get_output_embeddings())
            losses = head_loss(hidden, head.weight, head.bias, wanted, self.candidates, self.forbidden)
        else:
            losses = losses_of(without(logits, self.forbidden), wanted, self.candidates)
        return self.sums_of(losses, wanted, slots, previous)

    def split_logits(
        self, ids: Tensor, positions: Tensor, visible: Tensor, split: int, wanted: Tensor, heads: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits and last hidden states of the wanted rows from column `split` on; those before run without gradients.

        With `heads`, only the first `heads` rows get logits.
        """
        prefix = RecordingCache()
        with torch.no_grad(), uniform_rows(self.model, masks=False):
            self.model.base_model(
                input_ids=ids[:, :split],
                position_ids=positions[:, :split],
                attention_mask=self._mask(visible[:, :split, :split], positions[:, :split], positions[:, :split]),
                **attention.cache_argument(self.model.base_model, prefix),
                use_cache=True,
            )
        states: list[Tensor] = []

        def select(hidden: Tensor) -> Tensor:
            states.append(hidden[wanted])
            return states[0][None, :heads]

        with rows_selected(self.model, select), uniform_rows(self.model, masks=True):
            output = self.model(
                input_ids=ids[:, split:],
                position_ids=positions[:, split:],
                attention_mask=self._mask(visible[:, split:], positions[:, split:], positions),
                **attention.cache_argument(self.model, RecordedPrefix(prefix)),
                use_cache=True,
            )
        return cast(Tensor, output.logits)[0].float(), states[0]


def frozen_base_model_of(packed: PackedModel) -> FrozenBaseModel:
    """A packed model in two passes, after verifying that they give the logits of one pass; raise if they differ."""
    model = FrozenBaseModel(packed)
    with torch.no_grad(), model_errors(packed.model):
        ids = comparison_ids(packed.model, packed.traits)
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device)[None]
        visible = (positions[0, :, None] >= positions[0, None, :])[None]
        wanted = torch.ones_like(ids, dtype=torch.bool)
        split = length // 2
        ids[:, split:] = gated_tokens(packed.model)[0] if gated_tokens(packed.model) else ids[:, split:]
        expected = packed.logits(ids, positions, visible, wanted)
        found, hidden = model.split_logits(ids, positions, visible, split, wanted[:, split:])
        require_equal_logits(packed.model, "in two passes", found, expected[split:])
        head = packed.model.get_output_embeddings()
        model.plain_head = type(head) is nn.Linear and torch.equal(head(hidden).float(), found)
    return model
