"""Failures on a fake engine: affected requests fail, their slots are cleared, and the others continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.selector import NotANumber
from spaceport.runtime.engine import Batch, EngineFault, Moves
from support.arrivals import Arrival, Scene, SharedEngine, Trap, steps_of
from support.hash_engine import Language


def test_of_a_failed_call_only_those_fail_who_took_part() -> None:
    wide = DraftConfig(mask_slots=5, shape="chain")
    arrivals = [
        Arrival([1], max_tokens=60, draft_config=wide),
        Arrival([2], max_tokens=12),
        Arrival([3], at=1, max_tokens=9),
    ]
    scene = Scene(Language(8, end_every=10**9), arrivals, 2)
    while scene.now < 4:
        scene.turn()
    scene.engine.faulty = scene.engine.calls  # the narrow call of two that a round has by now
    scene.play()
    assert isinstance(scene.tasks[1].fault, EngineFault)
    assert [scene.tasks[number].fault for number in (0, 2)] == [None, None]
    assert [scene.text(number) for number in (0, 2)] == [scene.alone[number] for number in (0, 2)]


def test_buffers_that_a_failed_request_leaves_behind_are_cleared_before_the_next_one_has_them() -> None:
    arrivals = [Arrival([1], trouble="number", when=2), Arrival([2]), Arrival([3])]
    scene = Scene(Language(8, end_every=10**9), arrivals, 1)
    cleared: list[tuple[int, int]] = []
    clear = scene.engine.clear

    def noted(request: int) -> None:
        cleared.append((scene.now, request))
        clear(request)

    scene.engine.clear = noted  # type: ignore[method-assign]
    scene.play()
    assert isinstance(scene.tasks[0].fault, NotANumber)
    assert cleared == [(3, 0)]
    assert [scene.text(number) for number in (1, 2)] == scene.alone[1:]


def test_when_buffers_cannot_be_cleared_the_next_request_fails() -> None:
    arrivals = [Arrival([1], trouble="number", when=2), Arrival([2]), Arrival([3])]
    scene = Scene(Language(8, end_every=10**9), arrivals, 1)

    def broken(request: int) -> None:
        raise EngineFault("lost the device")

    scene.engine.clear = broken  # type: ignore[method-assign]
    scene.play()
    assert [type(task.fault) for task in scene.tasks] == [NotANumber, EngineFault, EngineFault]
    assert all(task.done for task in scene.tasks)


def test_failing_all_requests_reports_to_each_even_if_one_raises() -> None:
    arrivals = [Arrival([1], trouble="progress", when=1), *(Arrival([2]) for _ in range(4))]
    scene = Scene(Language(8, end_every=10**9), arrivals, 2)
    scene.turn()
    scene.scheduler.fail(EngineFault("gone"))
    assert all(task.done for task in scene.tasks)
    assert [reports[-1] for reports in scene.reports] == [True] * 5
    assert not scene.scheduler.busy


def test_an_observer_that_raises_affects_no_other_request() -> None:
    scene = Scene(Language(8, end_every=10**9), [Arrival([1], trouble="progress", when=2), Arrival([2])], 2)
    scene.play()
    assert isinstance(scene.tasks[0].fault, Trap)
    assert scene.reports[0] == [False, False, False, True]
    assert steps_of(scene.tasks[0]) == 3
    assert scene.text(1) == scene.alone[1]


def test_who_has_just_ended_does_not_fail_of_what_comes_after() -> None:
    draft_config = DraftConfig(mask_slots=3)
    arrivals = [Arrival([1], max_tokens=1), Arrival([2] * 30, draft_config=draft_config)]
    scene = Scene(Language(8, quality=50, end_every=10**9), arrivals, 2, "append")

    def broken(first: int, moves: Sequence[Moves]) -> None:
        raise EngineFault("lost the device")

    scene.engine.move = broken  # type: ignore[method-assign]
    scene.play()
    assert scene.tasks[0].fault is None
    assert scene.text(0) == scene.alone[0]
    assert isinstance(scene.tasks[1].fault, EngineFault)


def test_the_time_of_a_call_counts_for_a_request_that_fails_in_it() -> None:
    scene = Scene(Language(8, end_every=10**9), [Arrival([1], trouble="on_token", when=0), Arrival([2])], 2)
    scene.play()
    failed, other = (task.request.statistics for task in scene.tasks)
    assert 0 < failed.engine_seconds < other.engine_seconds
    assert (failed.steps, failed.tokens) == (0, 0)


@dataclass
class SpreadingEngine(SharedEngine):
    """A fake engine in which some tokens leave NaN in their KV slots; masked NaN spreads to all rows of the request."""

    nan_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.nan_slots = np.zeros((self.requests, self.capacity), np.bool_)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        logits = super().run(batch)
        for line in range(batch.requests):
            nan = self.nan_slots[batch.first + line]
            nan[batch.slot_ids[line]] = np.isin(batch.input_ids[line], list(self.nan_tokens))
            if nan[: batch.attention_mask.shape[-1]].any():
                logits[line] = np.nan
        return logits

    def clear(self, request: int) -> None:
        super().clear(request)
        self.nan_slots[request] = False


def spreading(scene: Scene, *nan_tokens: int) -> Scene:
    """A scene of one request at a time whose engine lets NaN spread."""
    old = scene.engine
    engine = SpreadingEngine(old.language, old.capacity, 1, guests=old.guests, nan_tokens=frozenset(nan_tokens))
    scene.engine = scene.scheduler.engine = engine
    return scene


def test_nan_of_a_prompt_that_was_cancelled_does_not_reach_the_next_request() -> None:
    arrivals = [Arrival([1, 2, 3, 4, 9, 6, 7, 8], cancelled=2), Arrival([2, 1])]
    scene = spreading(Scene(Language(8, end_every=10**9), arrivals, 1, prompt_rows=3), 9)
    scene.play()
    assert scene.tasks[0].request.threads[0].ending == "cancelled"
    assert scene.tasks[1].fault is None
    assert scene.text(1) == scene.alone[1]
