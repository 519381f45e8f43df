"""Frozen base: packed rows whose tokens run once without gradients, for trainings that change mask rows only.

A gated adapter leaves ordinary rows as they are, so their keys and values are constants of the training: they are computed
in a first pass without gradients, and only the mask rows of the second pass take part in the backward pass.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from spaceport.graphs.attention import RecordedPrefix, RecordingCache
from spaceport.graphs.decoder import rows_selected
from spaceport.graphs.gated import gated_tokens, uniform_rows
from spaceport.graphs.traits import comparison_ids, model_errors, require_equal_logits
from spaceport.tools.tune.head_loss import head_loss
from spaceport.tools.tune.packed_model import PackedModel, losses_of
from spaceport.tools.tune.packing import IGNORED


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
        wanted, slots, previous = (each[:, split:][learned] for each in (targets, mask_slots, before))
        if not self.plain_head:
            logits, _ = self.split_logits(ids, positions, visible, split, learned)
            return self.sums_of(losses_of(logits, wanted, self.candidates), wanted, slots, previous)
        _, hidden = self.split_logits(ids, positions, visible, split, learned, heads=0)
        head = cast(nn.Linear, self.model.get_output_embeddings())
        found = head_loss(hidden, head.weight, head.bias, wanted, self.candidates)
        return self.sums_of(found, wanted, slots, previous)

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
                past_key_values=prefix,
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
                past_key_values=RecordedPrefix(prefix),
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
