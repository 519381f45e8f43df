"""Many requests on one fake engine: each generates what it would alone, whatever others do."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.signature import LOWERINGS, Lowering
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.selector import NotANumber
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.queue import QueueFull
from spaceport.runtime.scheduling.scheduler import BESIDE_ROWS
from spaceport.runtime.scheduling.task import Task
from support.arrival_strategies import ARRIVALS, LANGUAGES, begins
from support.arrivals import Arrival, Scene, Trap, steps_of
from support.hash_engine import END, Language, request_for


@pytest.mark.parametrize("examples", [pytest.param(300), pytest.param(5_000, marks=pytest.mark.nightly)])
def test_each_request_writes_what_it_would_alone_whoever_comes_goes_or_fails(examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        language=LANGUAGES,
        arrivals=st.lists(ARRIVALS, min_size=1, max_size=7),
        requests=st.integers(1, 5),
        lowering=st.sampled_from(LOWERINGS),
        prompt_rows=st.sampled_from((1, 7, 20, 512)),
        faulty=st.none() | st.integers(0, 30),
        row_cost=st.sampled_from((0.0, 0.08, 0.5)),
    )
    def holds(
        language: Language,
        arrivals: list[Arrival],
        requests: int,
        lowering: Lowering,
        prompt_rows: int,
        faulty: int | None,
        row_cost: float,
    ) -> None:
        scene = Scene(language, arrivals, requests, lowering, prompt_rows, faulty=faulty, row_cost=row_cost)
        while scene.now <= 12 or scene.scheduler.busy:
            before = [(task.request.statistics.steps, task.done) for task in scene.tasks]
            scene.turn()
            hold_pace(scene, before)
            assert scene.now < 2000
        for number in range(len(arrivals)):
            hold_ending(scene, number)
        hold_everything_is_free(scene)

    holds()


def hold_pace(scene: Scene, before: list[tuple[int, bool]]) -> None:
    """Who writes has taken a step in the last round, unless it has ended."""
    for task, (steps, done) in zip(scene.tasks, before, strict=True):
        if steps and not done:
            assert task.done or task.request.statistics.steps == steps + 1


def hold_ending(scene: Scene, number: int) -> None:
    """A request has ended as expected, its slots are free, and its end was reported once."""
    arrival, task, alone = scene.arrivals[number], scene.tasks[number], scene.alone[number]
    assert scene.reports[number].count(True) == 1
    assert scene.reports[number][-1]
    assert task.done
    assert task.request.slots.held == 0
    text = scene.text(number)
    ended = {thread.ending for thread in task.request.threads}
    if task.fault is not None:
        assert isinstance(task.fault, (Trap, NotANumber, EngineFault))
        assert isinstance(task.fault, EngineFault) or arrival.trouble is not None
    elif ended & {"cancelled", "deadline"}:
        assert arrival.cancelled is not None or "deadline" in ended
        assert arrival.patience is not None or "cancelled" in ended
        assert begins(text, alone)
    else:
        assert text == alone
        assert ended <= {"end", "length"}


def hold_everything_is_free(scene: Scene) -> None:
    """As many requests as have capacity are admitted at once, and write what they would on a new engine."""
    engine = scene.engine
    engine.faulty = None
    fresh = [Task(request=request_for(engine, [3, 1, 4], 1, 0)) for _ in range(engine.requests)]
    engine.guests[:] = fresh
    for task in fresh:
        scene.scheduler.submit(task)
    scene.scheduler.round()
    assert sorted(task.index for task in fresh if task.index is not None) == list(range(engine.requests))
    while scene.scheduler.busy:
        scene.scheduler.round()
    assert all(task.request.threads[0].generated == scene.language.write([3, 1, 4], 1) for task in fresh)


@settings(max_examples=150)
@given(
    prompts=st.lists(st.lists(st.integers(0, END - 1), min_size=1, max_size=60), min_size=1, max_size=8),
    requests=st.integers(1, 4),
    prompt_rows=st.integers(1, 40),
)
def test_requests_begin_in_the_order_in_which_they_came_and_no_prompt_waits_for_ever(
    prompts: list[list[int]], requests: int, prompt_rows: int
) -> None:
    arrivals = [Arrival(prompt, at=number // 2, max_tokens=4) for number, prompt in enumerate(prompts)]
    scene = Scene(Language(8), arrivals, requests, prompt_rows=prompt_rows)
    served: list[list[int]] = [[] for _ in prompts]  # the rounds in which each took a step
    while scene.now < 8 or scene.scheduler.busy:
        before = [steps_of(task) for task in scene.tasks]
        scene.turn()
        for number, (task, steps) in enumerate(zip(scene.tasks, before, strict=True)):
            if steps_of(task) > steps:
                served[number].append(scene.now)
    assert [rounds[0] for rounds in served] == sorted(rounds[0] for rounds in served)
    for rounds in served:
        assert all(later - earlier <= requests for earlier, later in pairwise(rounds))


def test_prompts_take_turns_while_their_rows_last() -> None:
    arrivals = [Arrival([1] * length, max_tokens=1) for length in (100, 30, 100)]
    scene = Scene(Language(8), arrivals, 3, prompt_rows=40)
    fed = []
    for _ in range(6):
        scene.turn()
        fed.append([task.request.threads[0].fed for task in scene.tasks])
    # a round has 40 rows: the second and third prompt share them when the second leaves at least 16
    assert fed == [[40, 0, 0], [40, 30, 0], [40, 30, 40], [80, 30, 40], [80, 30, 80], [100, 30, 100]]


def test_prompts_get_fewer_rows_while_others_write() -> None:
    arrivals = [Arrival([1], max_tokens=20), Arrival([2] * 400, at=1, max_tokens=1)]
    scene = Scene(Language(3, end_every=10**9), arrivals, 2)
    scene.turn()
    for fed in (BESIDE_ROWS, 2 * BESIDE_ROWS):
        scene.turn()
        assert scene.tasks[1].request.threads[0].fed == fed
    assert scene.tasks[0].request.statistics.steps == 3


def test_no_more_wait_than_are_allowed_to() -> None:
    arrivals = [Arrival([1, 2], max_tokens=9) for _ in range(6)]
    scene = Scene(Language(8, end_every=10**9), arrivals, 2, queue_limit=1)
    submit = scene.scheduler.submit
    for task in scene.tasks[:3]:  # two decode and one waits
        submit(task)
    with pytest.raises(QueueFull, match="1 requests wait already, queue_limit is 1: try again later, or raise"):
        submit(scene.tasks[3])
    scene.scheduler.round()
    with pytest.raises(QueueFull, match="1 requests wait already"):
        submit(scene.tasks[3])
    scene.tasks[2].cancelled = True
    scene.scheduler.round()
    submit(scene.tasks[3])
    while scene.scheduler.busy:
        scene.scheduler.round()
    assert [task.done for task in scene.tasks] == [True] * 4 + [False] * 2


def test_a_waiting_request_can_miss_its_deadline_without_a_step() -> None:
    arrivals = [Arrival([1], max_tokens=20), Arrival([2], patience=3)]
    scene = Scene(Language(8, end_every=10**9), arrivals, 1)
    scene.play()
    (thread,) = scene.tasks[1].request.threads
    assert (thread.ending, thread.generated) == ("deadline", [])
    assert steps_of(scene.tasks[1]) == 0
    assert scene.text(0) == scene.alone[0]


def test_a_deadline_is_the_first_moment_that_is_too_late() -> None:
    scene = Scene(Language(8, end_every=10**9), [Arrival([1], patience=patience) for patience in (0, 1, 4)], 3)
    scene.play()
    assert [steps_of(task) for task in scene.tasks] == [0, 1, 4]
    assert {task.request.threads[0].ending for task in scene.tasks} == {"deadline"}


def test_the_lowest_free_indices_are_used_first() -> None:
    """So that a call spans few requests that take no part in it."""
    arrivals = [Arrival([1], max_tokens=tokens) for tokens in (2, 20, 3, 20)] + [Arrival([2], at=9), Arrival([3], at=9)]
    scene = Scene(Language(8, end_every=10**9), arrivals, 5)
    scene.play()
    assert [task.index for task in scene.tasks] == [0, 1, 2, 3, 0, 2]


@pytest.mark.parametrize(("bombs", "row_cost", "most"), [(1, 0.08, 13), (1, 0.5, 3), (3, 0.08, 12), (1, 0.0, 128)])
def test_many_threads_of_a_request_delay_others_by_two_plain_steps(bombs: int, row_cost: float, most: int) -> None:
    language = Language(21, fork_every=3, end_every=10**9)
    bomb = Arrival([1], max_tokens=40, max_threads=64, max_depth=3, draft_config=DraftConfig(3, "chain"))
    scene = Scene(language, [*[bomb] * bombs, Arrival([2], at=8, max_tokens=12)], bombs + 1, row_cost=row_cost)
    rows: list[tuple[int, int]] = []  # rows of all bombs in each round, and whether the other request runs
    while scene.scheduler.busy or not scene.now:
        before = [task.request.statistics.rows for task in scene.tasks]
        scene.turn()
        fed = [task.request.statistics.rows - old for task, old in zip(scene.tasks, before, strict=True)]
        rows.append((sum(fed[:-1]), fed[-1]))
        assert scene.now < 2000
    if bombs == 1:
        assert max(fed for fed, beside in rows if not beside) > 30  # alone, a request uses all its threads
    assert max(fed for fed, beside in rows if beside) <= most
    assert [scene.text(number) for number in range(bombs + 1)] == scene.alone
