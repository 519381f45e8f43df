"""Many requests on one fake engine: each generates what it would alone, whatever others do, and fails alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.signature import LOWERINGS
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.sequence import NotANumber
from spaceport.runtime.decode.sequence_group import RequestStep
from spaceport.runtime.decode.step import plan
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.request import Request
from spaceport.runtime.scheduling.request_queue import QueueFull
from spaceport.runtime.scheduling.scheduler import BESIDE_ROWS, Scheduler, group_by_width
from support.arrivals import ARRIVALS, LANGUAGES, Arrival, Scene, steps_of
from support.hash_engine import END, HashEngine, Language, request_for
from support.hash_runtime import hash_runtime

ENDLESS = Language(8, end_every=10**9)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [pytest.param(300), pytest.param(5_000, marks=pytest.mark.nightly)])
def test_each_request_writes_what_it_would_alone_whoever_comes_goes_or_fails(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        scene = Scene(
            data.draw(LANGUAGES),
            data.draw(st.lists(ARRIVALS, min_size=1, max_size=7)),
            data.draw(st.integers(1, 5)),
            data.draw(st.sampled_from(LOWERINGS)),
            data.draw(st.sampled_from((1, 7, 20, 512))),
            faulty=data.draw(st.none() | st.integers(0, 30)),
            row_cost=data.draw(st.sampled_from((0.0, 0.08, 0.5))),
        )
        several = len({arrival.tenant for arrival in scene.arrivals}) > 1
        while scene.now <= 12 or scene.scheduler.busy:
            before = [(sequences.statistics.steps, request.done) for request, sequences in scene.guests]
            scene.turn()
            for (request, sequences), (steps, done) in zip(scene.guests, before, strict=True):
                # who writes takes a step in each round, unless tenants take turns
                assert several or not steps or done or request.done or sequences.statistics.steps == steps + 1
            assert scene.now < 2000
        for number in range(len(scene.requests)):
            scene.check_ending(number)
        assert all(request.parked is None for request in scene.requests)
        hold_everything_is_free(scene)

    holds()


def hold_everything_is_free(scene: Scene) -> None:
    """As many requests as have capacity are admitted at once, and write what they would on a new engine."""
    engine = scene.engine
    scene.faulty = None
    fresh = [(Request([3, 1, 4], Decoding()), request_for(engine, [3, 1, 4], 1, 0)) for _ in range(engine.requests)]
    scene.guests[:] = fresh
    for request, sequences in fresh:
        scene.scheduler.submit(request, sequences)
    scene.scheduler.round()
    assert sorted(request.index for request, _ in fresh if request.index is not None) == list(range(engine.requests))
    while scene.scheduler.busy:
        scene.scheduler.round()
    assert all(sequences.threads[0].generated == scene.language.write([3, 1, 4], 1) for _, sequences in fresh)


@settings(max_examples=80)
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
        before = [steps_of(sequences) for sequences in scene.sequences]
        scene.turn()
        for rounds, sequences, steps in zip(served, scene.sequences, before, strict=True):
            if steps_of(sequences) > steps:
                rounds.append(scene.now)
    assert [rounds[0] for rounds in served] == sorted(rounds[0] for rounds in served)
    for rounds in served:
        assert all(later - earlier <= requests for earlier, later in pairwise(rounds))


def test_prompts_take_turns_while_their_rows_last() -> None:
    scene = Scene(Language(8), [Arrival([1] * length, max_tokens=1) for length in (100, 30, 100)], 3, prompt_rows=40)
    fed = []
    for _ in range(6):
        scene.turn()
        fed.append([sequences.threads[0].fed for sequences in scene.sequences])
    # a round has 40 rows: the second and third prompt share them when the second leaves at least 16
    assert fed == [[40, 0, 0], [40, 30, 0], [40, 30, 40], [80, 30, 40], [80, 30, 80], [100, 30, 100]]


def test_prompts_get_fewer_rows_while_others_write() -> None:
    scene = Scene(ENDLESS, [Arrival([1], max_tokens=20), Arrival([2] * 400, at=1, max_tokens=1)], 2)
    scene.turn()
    for fed in (BESIDE_ROWS, 2 * BESIDE_ROWS):
        scene.turn()
        assert scene.sequences[1].threads[0].fed == fed
    assert scene.sequences[0].statistics.steps == 3


def test_a_deadline_is_the_first_moment_that_is_too_late_also_in_the_queue() -> None:
    scene = Scene(ENDLESS, [Arrival([1], patience=patience) for patience in (0, 1, 4)], 3)
    scene.play()
    assert [steps_of(sequences) for sequences in scene.sequences] == [0, 1, 4]
    assert {sequences.threads[0].ending for sequences in scene.sequences} == {"deadline"}
    scene = Scene(ENDLESS, [Arrival([1], max_tokens=20), Arrival([2], patience=3)], 1)
    scene.play()
    assert (scene.sequences[1].threads[0].ending, scene.text(1)) == ("deadline", {(): []})
    assert (steps_of(scene.sequences[1]), scene.text(0)) == (0, scene.alone[0])


@pytest.mark.parametrize(("bombs", "row_cost", "most"), [(1, 0.08, 13), (1, 0.5, 3), (3, 0.08, 12), (1, 0.0, 128)])
def test_many_threads_of_a_request_delay_others_by_two_plain_steps(bombs: int, row_cost: float, most: int) -> None:
    language = Language(21, fork_every=3, end_every=10**9)
    bomb = Arrival([1], max_tokens=40, max_threads=64, max_depth=3, draft_config=DraftConfig(3, "chain"))
    scene = Scene(language, [*[bomb] * bombs, Arrival([2], at=8, max_tokens=12)], bombs + 1, row_cost=row_cost)
    rows: list[tuple[int, int]] = []  # rows of all bombs in each round, and whether the other request runs
    while scene.scheduler.busy or not scene.now:
        before = [sequences.statistics.rows for sequences in scene.sequences]
        scene.turn()
        fed = [new.statistics.rows - old for new, old in zip(scene.sequences, before, strict=True)]
        rows.append((sum(fed[:-1]), fed[-1]))
        assert scene.now < 2000
    if bombs == 1:
        assert max(fed for fed, beside in rows if not beside) > 30  # alone, a request uses all its threads
    assert max(fed for fed, beside in rows if beside) <= most
    assert [scene.text(number) for number in range(bombs + 1)] == scene.alone


def test_of_a_failed_call_only_those_fail_who_took_part() -> None:
    wide = DraftConfig(mask_slots=5, shape="chain")
    arrivals = [Arrival([1], max_tokens=60, draft_config=wide), Arrival([2], max_tokens=12), Arrival([3], 1, 9)]
    scene = Scene(ENDLESS, arrivals, 2)
    while scene.now < 4:
        scene.turn()
    scene.faulty = scene.engine.calls  # the narrow call of two that a round has by now
    scene.play()
    assert [type(request.error) for request in scene.requests] == [type(None), EngineFault, type(None)]
    assert [scene.text(number) for number in (0, 2)] == [scene.alone[number] for number in (0, 2)]


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        (Arrival([1], trouble="number", when=2), NotANumber),
        (Arrival([1, 2, 3, 4, 9, 6, 7, 8], cancelled=2), type(None)),  # no logits of its prompt would show NaN
    ],
)
@pytest.mark.parametrize("lost", [False, True])
def test_buffers_that_may_hold_nan_are_cleared_before_the_next_request_has_them(
    lost: bool, first: Arrival, fault: type
) -> None:
    """If that fails, so does the next request."""
    scene = Scene(ENDLESS, [first, Arrival([2]), Arrival([3])], 1, prompt_rows=3)
    cleared: list[tuple[int, int]] = []
    clear = scene.engine.clear

    def noted(request: int) -> None:
        if lost:
            raise EngineFault("lost the device")
        cleared.append((scene.now, request))
        clear(request)

    scene.engine.clear = noted  # type: ignore[method-assign]
    scene.play()
    assert all(request.done for request in scene.requests)
    assert [type(request.error) for request in scene.requests] == [fault, *[EngineFault if lost else type(None)] * 2]
    if not lost:
        assert cleared == [(3 if first.trouble else 2, 0)]
        assert [scene.text(number) for number in (1, 2)] == scene.alone[1:]


def test_who_has_just_ended_does_not_fail_of_what_comes_after() -> None:
    arrivals = [Arrival([1], max_tokens=1), Arrival([2] * 30, draft_config=DraftConfig(mask_slots=3))]
    scene = Scene(Language(8, quality=50, end_every=10**9), arrivals, 2, "append")

    def broken(first: int, moves: object) -> None:
        raise EngineFault("lost the device")

    scene.engine.move = broken  # type: ignore[method-assign]
    scene.play()
    assert (scene.requests[0].error, scene.text(0)) == (None, scene.alone[0])
    assert isinstance(scene.requests[1].error, EngineFault)


@pytest.mark.parametrize(("requests", "rows"), [(8, 1), (1, 8)])
def test_a_step_of_eight_rows_runs_few_python_functions_outside_the_engine(requests: int, rows: int) -> None:
    calls: list[int] = []
    engine_code, inside = HashEngine.run.__code__, 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal inside
        if frame.f_code is engine_code:
            inside += {"call": 1, "return": -1}.get(event, 0)
        calls[-1] += event == "call" and not inside

    with hash_runtime(ENDLESS, 100, requests=requests) as runtime:
        scheduler = Scheduler(runtime.engine, requests)
        for first in range(requests):
            decoding = Decoding(mask_slots=3 if rows > 1 else 0, lookup=0, draft_rows=rows, fork=False)
            request = Request([first, 2, 3], decoding)
            sequences = runtime._admission.prepare(request)
            assert sequences is not None
            scheduler.submit(request, sequences)
        for _ in range(20):
            calls.append(0)
            sys.setprofile(count)
            try:
                scheduler.round()
            finally:
                sys.setprofile(None)
    assert sequences.statistics.rows > 3 + 14 * rows
    assert sorted(calls)[10] <= 180


CALL = 16  # rows that a call costs before it has any
Widths = dict[int, int]  # index of a request in the engine -> rows that it takes to a step


def planned(widths: Widths) -> list[RequestStep]:
    engine = HashEngine(Language(1), 300, 0)
    return plan([RequestStep(request_for(engine, [1] * rows, 1, 0), index) for index, rows in sorted(widths.items())])


def shared(widths: Widths, call_rows: int = CALL) -> list[list[int]]:
    return [[step.engine_index for step in call] for call in group_by_width(planned(widths), call_rows)]


def cost(call: Sequence[int], widths: Widths) -> int:
    return (max(call) - min(call) + 1) * max(widths[index] for index in call) + CALL


@settings(max_examples=150)
@given(widths=st.dictionaries(st.integers(0, 90), st.integers(1, 60), max_size=80))
def test_calls_cost_no_more_than_all_in_one_or_each_on_its_own(widths: Widths) -> None:
    found = shared(widths)
    assert sorted(index for call in found for index in call) == sorted(widths)
    assert all(call == sorted(call) for call in found)
    if widths:
        total = sum(cost(call, widths) for call in found)
        assert total <= cost(list(widths), widths)
        assert total <= sum(cost([index], widths) for index in widths)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ({}, []),
        ({3: 9}, [[3]]),
        ({0: 1, 1: 1, 2: 1, 3: 1}, [[0, 1, 2, 3]]),
        ({0: 9, 1: 1, 2: 9, 3: 1}, [[0, 1, 2, 3]]),  # two calls: 3 x 1 + 3 x 9 + 32 = 62 rows, one: 4 x 9 + 16 = 52
        ({0: 36, 1: 36, 2: 1, 3: 1}, [[2, 3], [0, 1]]),  # one call: 160 rows, two: 106
        ({0: 200, 1: 1}, [[1], [0]]),
        ({0: 17, 1: 1}, [[0, 1]]),  # 50 rows either way: then the one call
        ({0: 18, 1: 1}, [[1], [0]]),
        ({0: 1, 17: 1}, [[0, 17]]),  # 34 rows either way
        ({0: 1, 18: 1}, [[0], [18]]),  # nobody between them takes part
        # three or four rows each: it would never begin if it were put together one by one
        ({0: 3, 1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4, 7: 3}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({0: 1, 1: 1, 2: 1, 3: 60, 4: 60, 5: 90}, [[0, 1, 2], [3, 4], [5]]),
    ],
)
def test_steps_of_like_width_share_a_call(widths: Widths, expected: list[list[int]]) -> None:
    assert shared(widths) == expected


# Tenants


def of_tenants(*tenants: str, max_tokens: int = 60, requests: int = 4, at: int = 0, **options: int) -> Scene:
    arrivals = [
        Arrival([number % END, number // END, 3], at if tenant == "quiet" else 0, max_tokens, tenant=tenant)
        for number, tenant in enumerate(tenants)
    ]
    return Scene(ENDLESS, arrivals, requests, **options)


@pytest.mark.parametrize(
    "noise", [["a"] * 20, [f"{number % 8}" for number in range(40)]], ids=["one tenant", "more tenants than buffers"]
)
def test_a_quiet_tenant_begins_with_the_next_round_and_ends_before_those_with_many_requests(noise: list[str]) -> None:
    scene = of_tenants(*noise, "quiet", at=5)
    for _ in range(6):
        scene.turn()
    quiet = scene.requests[-1]
    assert quiet.index is not None
    assert scene.engine.parked == 1
    while not quiet.done:
        scene.turn()
    assert scene.now <= 5 + 60 + 1
    scene.play()
    assert [scene.text(number) for number in range(len(noise) + 1)] == scene.alone


def test_a_quiet_tenant_is_not_delayed_by_those_whose_last_requests_run_and_its_later_requests_neither() -> None:
    arrivals = [Arrival([number % END, 3], 0, 30, tenant=f"{number % 2}") for number in range(8)]
    arrivals += [Arrival([5, 3], at, 3, tenant="quiet") for at in (32, 38, 44)]
    scene = Scene(ENDLESS, arrivals, 4)
    while scene.now < 60:
        scene.turn()
        for number in (8, 9, 10):
            started = scene.requests[number].admitted
            assert started in (0, scene.arrivals[number].at + 1)
    scene.play()
    assert [scene.text(number) for number in range(11)] == scene.alone
    assert not scene.scheduler.queue._loads


def test_tenants_with_many_requests_share_the_buffers_evenly() -> None:
    scene = of_tenants(*"a" * 8, *["quiet"] * 8, at=3)
    for _ in range(5):
        scene.turn()
    running = [request.tenant for request in scene.requests if request.index is not None]
    assert sorted(running) == ["a", "a", "quiet", "quiet"]
    scene.play()
    assert [scene.text(number) for number in range(16)] == scene.alone


def test_tenants_with_one_request_each_run_in_the_order_in_which_they_came() -> None:
    scene = of_tenants(*"abcdefgh", max_tokens=12, requests=2)
    scene.play()
    assert scene.engine.parked == 0
    order = sorted(range(8), key=lambda number: scene.requests[number].admitted)
    assert order == list(range(8))


@pytest.mark.parametrize(("parks", "late", "order"), [(False, 4, "abbbbabbcbcabcbc"), (True, 0, "abbbbabbbbab")])
def test_tenants_that_wait_begin_by_the_tokens_that_they_have_asked_for(parks: bool, late: int, order: str) -> None:
    tenants = [("a", 0, 39)] * 3 + [("b", 0, 9)] * 9 + [("c", 90, 9)] * late
    scene = Scene(ENDLESS, [Arrival([n, 1, 3], at, most, tenant=name) for n, (name, at, most) in enumerate(tenants)], 1)
    scene.engine.parks = parks
    begun: list[int] = []
    while len(begun) < len(tenants):
        scene.turn()
        begun += [n for n, request in enumerate(scene.requests) if request.admitted and n not in begun]
    assert "".join(tenants[number][0] for number in begun) == order


def test_requests_of_a_tenant_with_several_step_in_turns_where_rows_are_expensive() -> None:
    scene = of_tenants("a", "a", "a", "quiet", row_cost=0.9)  # two plain steps cost as much as two rows
    scene.turn()
    before = [steps_of(sequences) for sequences in scene.sequences]
    for _ in range(30):
        scene.turn()
    steps = [steps_of(sequences) - taken for sequences, taken in zip(scene.sequences, before, strict=True)]
    assert steps == [20, 20, 20, 30]


def test_a_prompt_is_not_delayed_by_many_prompts_of_another_tenant() -> None:
    arrivals = [Arrival([1] * 400, max_tokens=1, tenant="a") for _ in range(3)]
    scene = Scene(Language(8), [*arrivals, Arrival([2] * 20, at=2, max_tokens=1, tenant="quiet")], 4, prompt_rows=40)
    for _ in range(4):
        scene.turn()
    assert scene.sequences[3].threads[0].fed == 20


def test_beside_a_quiet_tenant_many_prompts_of_another_one_get_rows_in_every_second_round() -> None:
    arrivals = [Arrival([1] * 400, at=1, max_tokens=1, tenant="a") for _ in range(3)]
    scene = Scene(ENDLESS, [*arrivals, Arrival([2], max_tokens=20, tenant="quiet")], 4, row_cost=0.5)
    fed = []
    for _ in range(9):
        scene.turn()
        fed.append(sum(sequences.threads[0].fed for sequences in scene.sequences[:3]))
    assert fed == [0, 3, 3, 6, 6, 9, 9, 12, 12]


def test_a_request_waits_for_the_same_prompt_of_its_own_tenant_or_of_one_with_a_single_request() -> None:
    prompt = [1] * 200
    arrivals = [Arrival([*prompt, number], max_tokens=2, tenant="a", salt="x") for number in range(3)]
    arrivals += [Arrival([*prompt, 5], at=1, max_tokens=2, tenant=tenant, salt="x") for tenant in ("quiet", "other")]
    scene = Scene(Language(8), arrivals, 5, prompt_rows=16)
    for _ in range(2):
        scene.turn()
    first, second, _, quiet, other = scene.requests
    assert (second.leader, quiet.leader, other.leader) == (first, None, quiet)
    scene.play()
    assert [scene.text(number) for number in range(5)] == scene.alone


def test_a_request_reuses_what_is_computed_of_a_longer_prompt() -> None:
    prompt = [number % 7 for number in range(400)]
    arrivals = [Arrival(prompt, max_tokens=2, salt="x"), Arrival([*prompt[:100], 8], at=5, max_tokens=2, salt="x")]
    scene = Scene(Language(8), arrivals, 2, prompt_rows=40)
    scene.play()
    assert [scene.text(number) for number in range(2)] == scene.alone
    assert scene.guests[1][1].statistics.cached_tokens == 100


def test_a_tenant_with_most_of_the_queue_makes_room_for_others() -> None:
    scene = of_tenants(*"a" * 8, "quiet", "quiet", "b", "c", requests=1, queue_limit=4)
    for number in range(5):
        scene.submit(number)
    with pytest.raises(QueueFull, match="4 requests wait already"):
        scene.submit(5)
    for number in (8, 9, 10):
        scene.submit(number)
    with pytest.raises(QueueFull):  # the first tenant has no more than half any longer
        scene.submit(11)
    assert [request.asked is not None for request in scene.requests[:5]] == [False, False, True, True, True]
    while scene.scheduler.busy:
        scene.scheduler.round()
    errors = [request.error for request in scene.requests if request.error is not None]
    assert [str(error).partition(":")[0] for error in errors] == [
        "other clients wait, and this one has most of the queue"
    ] * 3
    assert [scene.text(number) for number in (0, 1, 8, 9, 10)] == [scene.alone[number] for number in (0, 1, 8, 9, 10)]
