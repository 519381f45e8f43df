"""Common prompts: requests that arrive together compute what their prompts have in common once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spaceport.graphs.contract.signature import LOWERINGS, Lowering
from spaceport.runtime.scheduling.prefix_cache import PrefixCache
from support.arrivals import Arrival, Scene, Trap
from support.hash_engine import Language

NEVER_ENDS = Language(8, end_every=10**9)
SYSTEM = [1, 2, 3, 4] * 10


def play(arrivals: Sequence[Arrival], requests: int = 4, prompt_rows: int = 7, lowering: Lowering = "scatter") -> Scene:
    scene = Scene(NEVER_ENDS, arrivals, requests, lowering, prompt_rows, cache=PrefixCache())
    scene.play()
    for number, arrival in enumerate(arrivals):
        if (arrival.trouble, arrival.cancelled, arrival.patience) == (None, None, None):
            assert scene.text(number) == scene.alone[number]
    return scene


def reused(scene: Scene) -> list[int]:
    return [task.request.statistics.cached_tokens for task in scene.tasks]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_choices_of_one_prompt_compute_it_once(lowering: Lowering) -> None:
    scene = play([Arrival(SYSTEM, max_tokens=5, salt="") for _ in range(4)], lowering=lowering)
    assert reused(scene) == [0, 39, 39, 39]
    assert [task.index for task in scene.tasks] == [0, 1, 2, 3]


def test_choices_beyond_the_buffers_reuse_the_prompt_later() -> None:
    scene = play([Arrival(SYSTEM, max_tokens=5, salt="") for _ in range(5)], requests=2)
    assert reused(scene) == [0, 39, 39, 39, 39]


def test_a_request_waits_for_the_common_part_only() -> None:
    arrivals = [Arrival([*SYSTEM, *[5] * 70], max_tokens=3, salt=""), Arrival([*SYSTEM, 6], max_tokens=3, salt="")]
    scene = Scene(NEVER_ENDS, arrivals, 2, prompt_rows=10, cache=PrefixCache())
    while not scene.tasks[1].done:
        scene.turn()
    assert scene.tasks[0].request.prefilling
    scene.play()
    assert reused(scene) == [0, 40]
    assert [scene.text(number) for number in range(2)] == scene.alone


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None), (None, None)])
def test_requests_of_other_salts_wait_for_nothing(salts: tuple[str | None, str | None]) -> None:
    scene = Scene(NEVER_ENDS, [Arrival(SYSTEM, salt=salt) for salt in salts], 2, prompt_rows=7, cache=PrefixCache())
    scene.turn()
    assert [task.leader for task in scene.tasks] == [None, None]
    scene.play()
    assert reused(scene) == [0, 0]


def test_few_common_tokens_are_not_waited_for() -> None:
    scene = Scene(
        NEVER_ENDS,
        [Arrival([*SYSTEM[:31], chat] * 2, salt="") for chat in (5, 6)],
        2,
        prompt_rows=7,
        cache=PrefixCache(),
    )
    scene.turn()
    assert [task.leader for task in scene.tasks] == [None, None]


@pytest.mark.parametrize("fails", [False, True])
def test_one_request_goes_on_in_place_of_a_leader_that_ended(fails: bool) -> None:
    first = Arrival(SYSTEM, trouble="choice", salt="") if fails else Arrival(SYSTEM, cancelled=3, salt="")
    scene = play([first, *(Arrival([*SYSTEM, chat], max_tokens=3, salt="") for chat in range(3))])
    assert isinstance(scene.tasks[0].fault, Trap) == fails
    assert reused(scene) == [0, 0, 40, 40]


def test_a_request_that_waits_can_be_cancelled_and_reach_its_deadline() -> None:
    waiting = [Arrival([*SYSTEM, 1], cancelled=2, salt=""), Arrival([*SYSTEM, 2], patience=2, salt="")]
    scene = play([Arrival(SYSTEM, max_tokens=4, salt=""), *waiting, Arrival([*SYSTEM, 3], max_tokens=4, salt="")])
    assert [task.request.threads[0].ending for task in scene.tasks] == ["length", "cancelled", "deadline", "length"]
    assert [len(scene.text(number)[()]) for number in (1, 2)] == [0, 0]
    assert reused(scene) == [0, 0, 0, 40]


def test_a_request_that_waits_follows_a_better_leader_then() -> None:
    longer = [*SYSTEM, *[5, 6] * 20]
    scene = play([Arrival(prompt, max_tokens=3, salt="") for prompt in (SYSTEM, [*longer, 7], [*longer, 8])])
    assert reused(scene) == [0, 40, 80]


def test_a_prefix_in_a_buffer_is_enough_unless_more_is_being_computed() -> None:
    longer = [*SYSTEM, *[5, 6] * 20]
    arrivals = [Arrival(SYSTEM, max_tokens=1, salt="")]
    arrivals += [Arrival([*longer, chat], at=20, max_tokens=3, salt="") for chat in (7, 8)]
    assert reused(play(arrivals)) == [0, 40, 80]


def test_time_that_a_request_waits_for_its_leader_is_time_in_the_queue() -> None:
    scene = play([Arrival(SYSTEM, max_tokens=5, salt="") for _ in range(2)])
    first, second = (task.request.statistics for task in scene.tasks)
    assert second.waiting_seconds > first.waiting_seconds
    assert second.first_token_seconds > second.waiting_seconds
