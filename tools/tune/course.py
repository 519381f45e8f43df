"""Course: what is learned in which step; the same settings and samples give the same steps, whenever they are asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.tune.packing import PackedRow, draw_groups, pack, successors
from spaceport.tools.tune.samples import Prepared, Sample
from spaceport.tools.tune.settings import TrainingSettings

_SORTED_STEPS = 16  # samples of so many steps are sorted by length, so that little of a batch is padding


@dataclass(frozen=True)
class Place:
    """Where a step stands in a training."""

    epoch: int
    index: int  # of the step in its epoch


class Course:
    """The steps of a training."""

    def __init__(self, prepared: Prepared, settings: TrainingSettings, masks: Sequence[int]) -> None:
        self._settings = settings
        self._masks = tuple(masks) if len(masks) != 1 else tuple(masks) * settings.slots
        self._forked, self._unforked = prepared.forked, prepared.unforked
        self._whole = prepared.whole
        self._taken = _taken(len(self._forked), len(self._whole), settings.unforked_share)
        self.samples = sum(self._taken)
        if not self.samples:
            raise InputFault(
                "nothing to learn: every sample was dropped; expected at least one conversation that can be used"
            )
        self.epoch_steps = math.ceil(self.samples / settings.batch)
        whole = math.ceil(settings.epochs * self.epoch_steps)
        self.steps = min(whole, settings.max_steps) if settings.max_steps else whole
        self._epoch = lru_cache(maxsize=1)(self._order)

    def place(self, step: int) -> Place:
        return Place(*divmod(step, self.epoch_steps))

    def rows(self, step: int) -> list[PackedRow]:
        """The rows of a step, the longest first."""
        place = self.place(step)
        chosen = self._epoch(place.epoch)[place.index]
        return sorted((self._row(sample, place.epoch) for sample in chosen), key=lambda row: -row.ids.size)

    def _row(self, sample: Sample, epoch: int) -> PackedRow:
        settings = self._settings
        if not settings.slots:
            return pack(sample, (), ())
        dice = np.random.default_rng((settings.seed, epoch, sample.line, sample.size, int(sample.ids[-1])))
        groups = draw_groups(successors(sample), settings.anchors, settings.slots, settings.drop_rate, dice)
        return pack(sample, groups, self._masks)

    def _order(self, epoch: int) -> list[list[Sample]]:
        """The samples of each step of an epoch: a shuffle, with samples of like length side by side."""
        settings = self._settings
        dice = np.random.default_rng((settings.seed, epoch))
        forked, whole = self._taken
        flat = dice.random(len(self._forked)) < settings.whole_rate
        chosen = [
            (self._unforked if flat[place] else self._forked)[place] for place in _pick(len(self._forked), forked, dice)
        ]
        chosen += [self._whole[place] for place in _pick(len(self._whole), whole, dice)]
        order = dice.permutation(len(chosen))
        steps: list[list[Sample]] = []
        span = settings.batch * _SORTED_STEPS
        for first in range(0, len(order), span):
            near = sorted(order[first : first + span], key=lambda place: chosen[place].size)
            steps += [
                [chosen[place] for place in near[start : start + settings.batch]]
                for start in range(0, len(near), settings.batch)
            ]
        return [steps[place] for place in dice.permutation(len(steps))]


def hold_to_objective(settings: TrainingSettings, prepared: Prepared) -> None:
    """Raise if nothing in the data teaches how to fork, though that is asked for."""
    if settings.forks and not prepared.forked:
        raise InputFault(
            f"no answer forks, with --objective {settings.objective}: expected lists or paragraphs; `spaceport tune data` says "
            "why each answer has no tree"
        )


def _taken(forked: int, whole: int, share: float | None) -> tuple[int, int]:
    """How many forked and unforked samples an epoch has, for a share of unforked ones."""
    if share is None or not forked:
        return forked, whole
    if share == 1:
        return 0, whole
    wanted = round(forked * share / (1 - share))
    return forked, min(whole, wanted)


def _pick(among: int, count: int, dice: np.random.Generator) -> list[int]:
    """Places of so many, all of them in order if that is all there are."""
    return list(range(among)) if count == among else sorted(dice.choice(among, count, replace=False).tolist())
