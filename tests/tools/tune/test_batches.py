"""Training batches: each epoch has the expected samples, and steps are reproducible."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.tune.batches import TrainingBatches, require_forks
from spaceport.tools.tune.samples import Prepared, Sample
from spaceport.tools.tune.settings import TrainingSettings

FORKED, FLAT, WHOLE = 1000, 2000, 3000  # first tokens, which identify the samples' kinds and numbers


def sample(first: int, number: int) -> Sample:
    ids = np.array([first + number, *range(1, 4 + number % 5)])
    return Sample(number, ids, np.arange(ids.size) - 1, np.arange(ids.size) > 0)


def prepared(forked: int, whole: int) -> Prepared:
    return Prepared(
        forked=[sample(FORKED, number) for number in range(forked)],
        unforked=[sample(FLAT, number) for number in range(forked)],
        whole=[sample(WHOLE, number) for number in range(whole)],
    )


def epoch(batches: TrainingBatches, number: int) -> Counter[int]:
    """First tokens of an epoch's rows."""
    steps = range(number * batches.epoch_steps, (number + 1) * batches.epoch_steps)
    return Counter(int(row.ids[0]) for step in steps for row in batches.rows(step))


def kinds(found: Counter[int]) -> list[int]:
    """Number of rows per epoch that fork, that could fork but do not, and that cannot fork."""
    return [
        sum(count for token, count in found.items() if token // 1000 * 1000 == kind) for kind in (FORKED, FLAT, WHOLE)
    ]


def ids_of(batches: TrainingBatches) -> list[list[bytes]]:
    """The rows of each step."""
    steps = (batches.rows(step) for step in range(batches.steps))
    return [[row.ids.tobytes() + row.parents.tobytes() + row.targets.tobytes() for row in rows] for rows in steps]


def test_every_epoch_has_each_sample_once_in_other_steps() -> None:
    batches = TrainingBatches(prepared(0, 23), TrainingSettings("apar", batch_size=5, epochs=2), ())
    assert (batches.samples, batches.epoch_steps, batches.steps) == (23, 5, 10)
    assert epoch(batches, 0) == epoch(batches, 1) == Counter(range(WHOLE, WHOLE + 23))
    steps = [frozenset(rows) for rows in ids_of(batches)]
    assert {*steps[:5]} != {*steps[5:]}


def test_rows_follow_the_seed_and_anchors_are_resampled_in_each_epoch() -> None:
    settings = TrainingSettings("both", batch_size=100, epochs=4, anchors=2, mask_slots=2)
    one, again, other = (
        ids_of(TrainingBatches(prepared(9, 9), replace(settings, seed=seed), (90,))) for seed in (0, 0, 1)
    )
    assert one == again
    assert len({*map(tuple, one), *map(tuple, other)}) == 8  # each epoch is one step
    backwards = TrainingBatches(prepared(9, 9), settings, (90,))
    assert [len(backwards.rows(step)) for step in (3, 2, 1)] == [18] * 3
    assert ids_of(backwards) == one


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 0, 0), (0.3, 40, 80), (1.0, 200, 200)])
def test_the_unforked_answers_are_resampled_every_epoch(rate: float, least: int, most: int) -> None:
    batches = TrainingBatches(prepared(200, 10), TrainingSettings("apar", batch_size=30, unfork_rate=rate), ())
    found = [epoch(batches, number) for number in range(2)]
    for one in found:
        forked, flat, whole = kinds(one)
        assert (forked + flat, whole) == (200, 10)
        assert least <= flat <= most
        assert {token % 1000 for token in one if token < WHOLE} == set(range(200))
    assert (found[0] == found[1]) == (rate in (0.0, 1.0))


@pytest.mark.parametrize(
    ("share", "forked", "whole"),
    [(None, 20, 60), (0.5, 20, 20), (0.2, 20, 5), (0.9, 20, 60), (0.0, 20, 0), (1.0, 0, 60)],
)
def test_the_unforked_share_is_respected(share: float | None, forked: int, whole: int) -> None:
    batches = TrainingBatches(
        prepared(20, 60), TrainingSettings("apar", batch_size=7, unforked_share=share, unfork_rate=0.0), ()
    )
    assert kinds(epoch(batches, 0)) == [forked, 0, whole]


def test_max_steps_limits_the_epochs() -> None:
    for epochs, most, steps in ((1.5, None, 8), (1.5, 3, 3), (0.1, None, 1), (1.0, 100, 5)):
        settings = TrainingSettings("apar", batch_size=4, epochs=epochs, max_steps=most)
        assert TrainingBatches(prepared(0, 20), settings, ()).steps == steps


def test_an_empty_training_set_and_forks_without_forking_answers_are_refused() -> None:
    with pytest.raises(InputFault, match="no training samples"):
        TrainingBatches(prepared(0, 0), TrainingSettings("apar"), ())
    for objective in ("apar", "both"):
        message = f"no answer forks, with --objective {objective}: expected answers with numbered lists"
        with pytest.raises(InputFault, match=message):
            require_forks(TrainingSettings(objective), prepared(0, 1))
    require_forks(TrainingSettings("sar"), prepared(0, 1))
    require_forks(TrainingSettings("both"), prepared(1, 0))
