"""Packing: samples and their mask groups as rows, and the rows of each training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spaceport.graphs.contract.draft_methods import CAUSAL, Group, MaskLayout
from spaceport.graphs.contract.faults import InputFault
from spaceport.training.samples import NO_PARENT, Prepared, Sample
from spaceport.training.settings import TrainingSettings

IGNORED = -100  # target without a loss, the ignore_index of torch's cross entropy
LEAD = -1  # number of the mask row before those of the mask slots of a group without shift


@dataclass(frozen=True)
class MaskGroup:
    """Mask slots that follow one token of a sample."""

    anchor: int  # index of the last token that they see
    depth: int  # number of mask slots


@dataclass(frozen=True)
class PackedRow:
    """Tokens of a sample followed by its mask groups."""

    ids: NDArray[np.int64]  # token ids
    parents: NDArray[np.int64]  # index of the parent, NO_PARENT for the first token
    targets: NDArray[np.int64]  # token to predict, or IGNORED
    mask_slots: NDArray[np.int64]  # 0: text token; i: mask slot i of its group, from 1; or LEAD
    before: NDArray[np.int64]  # index of the token before the target in the text


class PackedBatch(NamedTuple):
    """Rows padded to one length, as the arguments of a packed model."""

    ids: Tensor  # B x T, int64
    positions: Tensor  # B x T, int64
    visible: Tensor  # B x T x T, bool, True = may see
    targets: Tensor  # B x T, int64
    mask_slots: Tensor  # B x T, int64
    before: Tensor  # B x T, int64: column of the token before the target in the text

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(*(tensor.to(device, non_blocking=True) for tensor in self))


def successors(sample: Sample) -> NDArray[np.int64]:
    """For each token, the index of the token that it is trained to predict, or NO_PARENT."""
    following = np.full(sample.ids.size, NO_PARENT, np.int64)
    learned = np.flatnonzero(sample.learned)
    following[sample.parents[learned]] = learned
    return following


def anchors(following: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of possible anchors: the token after next is known, so a mask group has a target."""
    first = np.flatnonzero(following != NO_PARENT)
    known: NDArray[np.bool_] = following[following[first]] != NO_PARENT
    return first[known]


def sample_groups(
    following: NDArray[np.int64], count: int, mask_slots: int, drop_rate: float, rng: np.random.Generator
) -> list[MaskGroup]:
    """Mask groups at `count` random anchors; each group ends before a later mask slot with probability `drop_rate`."""
    candidates = anchors(following)
    chosen = np.sort(rng.choice(candidates, min(count, candidates.size), replace=False))
    kept = rng.random((chosen.size, mask_slots)) >= drop_rate
    kept[:, 0] = True
    depths = np.where(kept.all(axis=1), mask_slots, kept.argmin(axis=1))
    return [MaskGroup(int(anchor), int(depth)) for anchor, depth in zip(chosen, depths, strict=True)]


def pack(
    sample: Sample, groups: Sequence[MaskGroup], masks: Sequence[int], mask_layout: MaskLayout = CAUSAL
) -> PackedRow:
    """Pack a sample and its mask groups into one row.

    If y1 y2 y3 ... follow a group's anchor, mask slot i predicts y(i+1) and takes the position of y(i), or without shift
    that of y(i+1), behind a row at the position of y1. `masks` is the mask token of each mask row of a group.
    """
    following, size = successors(sample), sample.ids.size
    masked: list[tuple[int, int, int, int, int]] = []  # rows, as the fields of PackedRow
    for group in groups:
        replaced = int(following[group.anchor])  # index of the token whose position the mask slot takes
        above = group.anchor
        if mask_layout.lead and following[replaced] != NO_PARENT:
            masked.append((masks[0], above, IGNORED, LEAD, group.anchor))
            above = size + len(masked) - 1
        for slot in range(group.depth):
            previous, replaced = replaced, int(following[replaced])
            if replaced == NO_PARENT:
                break
            masked.append((masks[slot + mask_layout.lead], above, int(sample.ids[replaced]), slot + 1, previous))
            above = size + len(masked) - 1
    targets = np.where(following == NO_PARENT, IGNORED, sample.ids[following])
    tokens = (sample.ids, sample.parents, targets, np.zeros(size, np.int64), np.arange(size))
    columns = np.array(masked, np.int64).reshape(-1, len(tokens)).T
    return PackedRow(*map(np.concatenate, zip(tokens, columns, strict=True)))


def positions_and_visibility(parents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Positions and visibility from parents (B x T): position of the parent + 1; ancestors and the token itself."""
    batch, length = parents.shape
    lines = np.arange(batch)
    positions = np.zeros((batch, length), np.int64)
    visible = np.zeros((batch, length, length), np.bool_)
    for index in range(length):
        above = parents[:, index]
        real = above != NO_PARENT
        positions[real, index] = positions[lines, above][real] + 1
        visible[real, index] = visible[lines, above][real]
        visible[:, index, index] = True
    return positions, visible


def blocks(parents: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Visibility within mask groups whose rows see each other (B x T x T): the rows of a group follow each other."""
    masked = slots != 0
    first = masked & (np.take_along_axis(slots, parents.clip(0), axis=1) == 0)
    group = np.cumsum(first, axis=1) * masked  # 0: a token of the text
    same: NDArray[np.bool_] = (group[:, :, None] == group[:, None, :]) & masked[:, :, None]
    return same


def collate(rows: Sequence[PackedRow], group: Group = "causal") -> PackedBatch:
    """Rows padded to a batch: tokens first, then mask groups from one column on; padding sees only itself, without a loss."""
    counts = [int(np.count_nonzero(row.mask_slots == 0)) for row in rows]  # tokens
    split = max(counts)
    length = split + max(row.ids.size - count for row, count in zip(rows, counts, strict=True))
    padding = {"ids": 0, "parents": NO_PARENT, "targets": IGNORED, "mask_slots": 0, "before": 0}
    batch = {name: np.full((len(rows), length), value, np.int64) for name, value in padding.items()}
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        columns = np.r_[0:count, split : split + row.ids.size - count]
        for name, array in batch.items():
            array[index, columns] = getattr(row, name)
        of_masks = batch["parents"][index] >= count
        batch["parents"][index, of_masks] += split - count
    positions, visible = positions_and_visibility(batch["parents"])
    if group == "block":
        visible |= blocks(batch["parents"], batch["mask_slots"])
    arrays = (batch["ids"], positions, visible, batch["targets"], batch["mask_slots"], batch["before"])
    return PackedBatch(*map(torch.from_numpy, arrays))


_SORTED_STEPS = 16  # samples of this many steps are sorted by length together, to reduce padding


class TrainingBatches:
    """The batches of a training."""

    def __init__(self, prepared: Prepared, settings: TrainingSettings, masks: Sequence[int]) -> None:
        self._settings = settings
        layout = settings.mask_layout
        self._masks = tuple(masks) if len(masks) != 1 else tuple(masks) * layout.rows(settings.slots)
        self._forked, self._unforked = prepared.forked, prepared.unforked
        self._whole = prepared.whole
        self.samples = len(self._forked) + len(self._whole)
        if not self.samples:
            raise InputFault("no training samples: every sample was dropped; expected at least one usable conversation")
        self.epoch_steps = math.ceil(self.samples / settings.batch_size)
        whole = math.ceil(settings.epochs * self.epoch_steps)
        self.steps = min(whole, settings.max_steps) if settings.max_steps else whole
        self._epoch = lru_cache(maxsize=1)(self._order)

    def rows(self, step: int) -> list[PackedRow]:
        """Rows of a step, longest first."""
        epoch, index = divmod(step, self.epoch_steps)
        return sorted((self._row(sample, epoch) for sample in self._epoch(epoch)[index]), key=lambda row: -row.ids.size)

    def _row(self, sample: Sample, epoch: int) -> PackedRow:
        settings = self._settings
        if not settings.slots:
            return pack(sample, (), ())
        rng = np.random.default_rng((settings.seed, epoch, sample.line, sample.size, int(sample.ids[-1])))
        groups = sample_groups(successors(sample), settings.anchors, settings.slots, settings.drop_rate, rng)
        return pack(sample, groups, self._masks, settings.mask_layout)

    def _order(self, epoch: int) -> list[list[Sample]]:
        """Samples of each step of an epoch: shuffled, with samples of similar length in one step."""
        settings = self._settings
        rng = np.random.default_rng((settings.seed, epoch))
        unfork = rng.random(len(self._forked)) < settings.unfork_rate
        pairs = zip(self._forked, self._unforked or self._forked, unfork, strict=True)
        chosen = [flat if unforks else forked for forked, flat, unforks in pairs] + self._whole
        order = rng.permutation(len(chosen))
        steps: list[list[Sample]] = []
        span = settings.batch_size * _SORTED_STEPS
        for first in range(0, len(order), span):
            near = sorted(order[first : first + span], key=lambda index: chosen[index].size)
            steps += [
                [chosen[index] for index in near[start : start + settings.batch_size]]
                for start in range(0, len(near), settings.batch_size)
            ]
        return [steps[index] for index in rng.permutation(len(steps))]


def require_forks(settings: TrainingSettings, prepared: Prepared) -> None:
    """Raise if the objective includes forks and no sample forks."""
    if settings.forks and not prepared.forked:
        reasons = ", ".join(f"{count} {name}" for name, count in prepared.counts.items() if count) or "no samples"
        raise InputFault(
            f"no answer forks, with --objective {settings.objective} ({reasons}): expected answers with numbered lists or "
            "paragraphs"
        )
