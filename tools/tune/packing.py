"""Packing: a token tree with mask groups at its end as one row of a batch; parents are stored, the rest is derived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spaceport.tools.tune.samples import NO_PARENT, Sample

IGNORED = -100  # a row without a loss, as torch's cross entropy has it


@dataclass(frozen=True)
class MaskGroup:
    """Mask slots behind one token of a sample."""

    anchor: int  # place of the last token that they see
    depth: int  # how many there are


@dataclass(frozen=True)
class PackedRow:
    """A sample's tokens and, behind them, its mask groups."""

    ids: NDArray[np.int64]
    parents: NDArray[np.int64]  # NO_PARENT: the first token
    targets: NDArray[np.int64]  # what each place predicts, or IGNORED
    mask_slots: NDArray[np.int64]  # 0: a token; i: mask slot i of its group, from 1


@dataclass(frozen=True)
class PackedBatch:
    """Rows side by side, filled up to one length."""

    ids: Tensor  # B x T, int64
    positions: Tensor  # B x T, int64
    visible: Tensor  # B x T x T, bool, True = may see
    targets: Tensor  # B x T, int64
    mask_slots: Tensor  # B x T, int64

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.ids, self.positions, self.visible, self.targets, self.mask_slots)

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(*(tensor.to(device, non_blocking=True) for tensor in self.tensors))


def successors(sample: Sample) -> NDArray[np.int64]:
    """For each token the place of the one that it learns to predict, or NO_PARENT where there is none."""
    following = np.full(sample.ids.size, NO_PARENT, np.int64)
    places = np.flatnonzero(sample.learned)
    following[sample.parents[places]] = places
    return following


def anchors(following: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places where a mask group learns something: the token after next is known."""
    first = np.flatnonzero(following != NO_PARENT)
    known: NDArray[np.bool_] = following[following[first]] != NO_PARENT
    return first[known]


def draw_groups(
    following: NDArray[np.int64], count: int, mask_slots: int, drop_rate: float, dice: np.random.Generator
) -> list[MaskGroup]:
    """Groups at different places; a mask slot beyond the first is left out, with all that follow, at the drop rate."""
    places = anchors(following)
    chosen = np.sort(dice.choice(places, min(count, places.size), replace=False))
    kept = dice.random((chosen.size, mask_slots)) >= drop_rate
    kept[:, 0] = True
    depths = np.where(kept.all(axis=1), mask_slots, kept.argmin(axis=1))
    return [MaskGroup(int(anchor), int(depth)) for anchor, depth in zip(chosen, depths, strict=True)]


def pack(sample: Sample, groups: Sequence[MaskGroup], masks: Sequence[int]) -> PackedRow:
    """The row of a sample: if y1 y2 y3 ... follow a group's anchor, mask slot i stands in the place of y(i) and predicts y(i+1).

    `masks` is the mask token of each mask slot.
    """
    following = successors(sample)
    ids, parents, targets, slots = [], [], [], []
    for group in groups:
        told = int(following[group.anchor])  # what stands in the place of the mask slot
        above = group.anchor
        for slot in range(group.depth):
            told = int(following[told])
            if told == NO_PARENT:
                break
            ids.append(masks[slot])
            parents.append(above)
            targets.append(int(sample.ids[told]))
            slots.append(slot + 1)
            above = sample.ids.size + len(ids) - 1
    own = np.where(following == NO_PARENT, IGNORED, sample.ids[following])
    return PackedRow(
        np.concatenate((sample.ids, np.array(ids, np.int64))),
        np.concatenate((sample.parents, np.array(parents, np.int64))),
        np.concatenate((own, np.array(targets, np.int64))),
        np.concatenate((np.zeros(sample.ids.size, np.int64), np.array(slots, np.int64))),
    )


def see(parents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Positions and visibility of rows from their parents (B x T): one place after the parent; its ancestors and itself."""
    batch, length = parents.shape
    lines = np.arange(batch)
    positions = np.zeros((batch, length), np.int64)
    visible = np.zeros((batch, length, length), np.bool_)
    for place in range(length):
        above = parents[:, place]
        real = above != NO_PARENT
        positions[real, place] = positions[lines, above][real] + 1
        visible[real, place] = visible[lines, above][real]
        visible[:, place, place] = True
    return positions, visible


def collate(rows: Sequence[PackedRow], multiple: int = 1) -> PackedBatch:
    """Rows as one batch; what fills a row up sees itself alone and has no loss."""
    longest = max(row.ids.size for row in rows)
    length = -(-longest // multiple) * multiple
    ids = np.zeros((len(rows), length), np.int64)
    parents = np.full((len(rows), length), NO_PARENT, np.int64)
    targets = np.full((len(rows), length), IGNORED, np.int64)
    slots = np.zeros((len(rows), length), np.int64)
    for line, row in enumerate(rows):
        size = row.ids.size
        ids[line, :size], parents[line, :size] = row.ids, row.parents
        targets[line, :size], slots[line, :size] = row.targets, row.mask_slots
    positions, visible = see(parents)
    return PackedBatch(*(torch.from_numpy(array) for array in (ids, positions, visible, targets, slots)))
