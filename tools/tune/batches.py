"""Training batches: the rows of each training step, reproducible from settings, samples and step number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.tune.packing import PackedRow, pack, sample_groups, successors
from spaceport.tools.tune.samples import Prepared, Sample
from spaceport.tools.tune.settings import TrainingSettings

_SORTED_STEPS = 16  # samples of this many steps are sorted by length together, to reduce padding


@dataclass(frozen=True)
class BatchIndex:
    """Index of a training step."""

    epoch: int
    step: int  # within the epoch


class TrainingBatches:
    """The batches of a training."""

    def __init__(self, prepared: Prepared, settings: TrainingSettings, masks: Sequence[int]) -> None:
        self._settings = settings
        layout = settings.mask_layout
        self._masks = tuple(masks) if len(masks) != 1 else tuple(masks) * layout.rows(settings.slots)
        self._forked, self._unforked = prepared.forked, prepared.unforked
        self._whole = prepared.whole
        self._sizes = _epoch_sizes(len(self._forked), len(self._whole), settings.unforked_share)
        self.samples = sum(self._sizes)
        if not self.samples:
            raise InputFault("no training samples: every sample was dropped; expected at least one usable conversation")
        self.epoch_steps = math.ceil(self.samples / settings.batch_size)
        whole = math.ceil(settings.epochs * self.epoch_steps)
        self.steps = min(whole, settings.max_steps) if settings.max_steps else whole
        self._epoch = lru_cache(maxsize=1)(self._order)

    def index_of(self, step: int) -> BatchIndex:
        return BatchIndex(*divmod(step, self.epoch_steps))

    def rows(self, step: int) -> list[PackedRow]:
        """Rows of a step, longest first."""
        index = self.index_of(step)
        chosen = self._epoch(index.epoch)[index.step]
        return sorted((self._row(sample, index.epoch) for sample in chosen), key=lambda row: -row.ids.size)

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
        forked, whole = self._sizes
        unfork = rng.random(len(self._forked)) < settings.unfork_rate
        chosen = [
            (self._unforked if unfork[index] else self._forked)[index]
            for index in _pick(len(self._forked), forked, rng)
        ]
        chosen += [self._whole[index] for index in _pick(len(self._whole), whole, rng)]
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
        raise InputFault(
            f"no answer forks, with --objective {settings.objective}: expected answers with numbered lists or paragraphs; "
            "`spaceport tune data` shows why answers do not fork"
        )


def _epoch_sizes(forked: int, whole: int, share: float | None) -> tuple[int, int]:
    """Number of forked and unforked samples per epoch, for a given share of unforked ones."""
    if share is None or not forked:
        return forked, whole
    if share == 1:
        return 0, whole
    wanted = round(forked * share / (1 - share))
    return forked, min(whole, wanted)


def _pick(among: int, count: int, rng: np.random.Generator) -> list[int]:
    """Sorted random indices, `count` of `among`."""
    return list(range(among)) if count == among else sorted(rng.choice(among, count, replace=False).tolist())
