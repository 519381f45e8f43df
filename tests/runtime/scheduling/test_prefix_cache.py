"""Prefix cache: requests that reuse the rows of others generate what they would alone, and get rows of their salt only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.signature import LOWERINGS, Lowering
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.kv_prefix import in_order, kv_prefix
from spaceport.runtime.decode.selector import NotANumber
from spaceport.runtime.decode.slots import Slots
from spaceport.runtime.decode.threads import new_thread
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.prefix_cache import PrefixCache
from support.arrival_strategies import ARRIVALS, LANGUAGES, begins
from support.arrivals import Arrival, Scene, Trap
from support.hash_engine import END, Language

PLAIN = DraftConfig(0, "chain")
NEVER_ENDS = Language(8, end_every=10**9)

# What a prompt begins with: that of an earlier arrival and its completion, up to a number of tokens.
BEGINNINGS = st.tuples(st.none() | st.integers(0, 5), st.integers(0, 60), st.booleans())


def following(
    language: Language, arrivals: list[Arrival], beginnings: list[tuple[int | None, int, bool]]
) -> list[Arrival]:
    """The arrivals, with prompts that begin like those before them and their completions."""
    found: list[Arrival] = []
    for arrival, (earlier, count, salted) in zip(arrivals, beginnings, strict=False):
        before: list[int] = []
        if earlier is not None and found:
            other = found[earlier % len(found)]
            before = [*other.prompt, *other.alone(language)[()]][:count]
        found.append(replace(arrival, prompt=[*before, *arrival.prompt][:50], salt="salt" if salted else ""))
    return found


@pytest.mark.parametrize("examples", [pytest.param(300), pytest.param(5_000, marks=pytest.mark.nightly)])
def test_requests_with_a_cache_write_what_each_would_alone(examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        language=LANGUAGES,
        arrivals=st.lists(ARRIVALS, min_size=1, max_size=7),
        beginnings=st.lists(BEGINNINGS, min_size=7, max_size=7),
        requests=st.integers(1, 4),
        lowering=st.sampled_from(LOWERINGS),
        prompt_rows=st.sampled_from((1, 7, 20, 512)),
        faulty=st.none() | st.integers(0, 30),
        ordered=st.booleans(),
        private=st.none() | st.integers(0, 6),
    )
    def holds(
        language: Language,
        arrivals: list[Arrival],
        beginnings: list[tuple[int | None, int, bool]],
        requests: int,
        lowering: Lowering,
        prompt_rows: int,
        faulty: int | None,
        ordered: bool,
        private: int | None,
    ) -> None:
        arrivals = following(language, arrivals, beginnings)
        if private is not None and private < len(arrivals):
            arrivals[private] = replace(arrivals[private], salt=None)
        cache = PrefixCache(in_order=ordered)
        scene = Scene(language, arrivals, requests, lowering, prompt_rows, faulty=faulty, cache=cache)
        scene.play()
        for number, arrival in enumerate(arrivals):
            hold_ending(scene, number, arrival)
        hold_the_cache_is_whole(scene, cache)

    holds()


def hold_ending(scene: Scene, number: int, arrival: Arrival) -> None:
    task, alone, text = scene.tasks[number], scene.alone[number], scene.text(number)
    assert task.done
    assert task.request.statistics.cached_tokens < len(arrival.prompt)
    assert arrival.salt is not None or task.request.statistics.cached_tokens == 0
    if task.fault is not None:
        assert isinstance(task.fault, (Trap, NotANumber, EngineFault))
    elif {thread.ending for thread in task.request.threads} & {"cancelled", "deadline"}:
        assert begins(text, alone)
    else:
        assert text == alone


def hold_the_cache_is_whole(scene: Scene, cache: PrefixCache) -> None:
    """Every prefix in it is that of rows that are in the engine, and was stored under their salt."""
    for index in range(scene.engine.requests):
        if index in cache:
            (tokens, slots), salt = cache[index].prefix, cache[index].salt
            cells = [scene.engine._cells[index][slot] for slot in slots]
            assert [cell.token for cell in cells if cell is not None] == tokens
            assert {cell.owner for cell in cells if cell is not None} == {salt}
            assert index in cache.longest(salt, tokens).holders
            assert cache.longest(salt, tokens).length == len(tokens)


def two_turns(draft_config: DraftConfig, lowering: Lowering, **options: bool) -> Scene:
    prompt = list(range(9)) * 4
    first = Arrival(prompt, max_tokens=20, draft_config=draft_config, salt="")
    second = [*prompt, *first.alone(NEVER_ENDS)[()], 1, 2, 3]
    arrivals = [first, Arrival(second, at=40, draft_config=draft_config, salt="")]
    scene = Scene(NEVER_ENDS, arrivals, 1, lowering, cache=PrefixCache(**options))
    scene.play()
    assert [scene.text(number) for number in (0, 1)] == scene.alone
    return scene


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("draft_config", [PLAIN, DraftConfig(3, "chain"), DraftConfig(3, "tree", 16)])
def test_the_next_turn_of_a_chat_computes_what_is_new_only(draft_config: DraftConfig, lowering: Lowering) -> None:
    scene = two_turns(draft_config, lowering)
    # all of the first turn but its last token, which was never fed
    assert scene.tasks[1].request.statistics.cached_tokens >= 36 + 19
    assert scene.tasks[1].request.statistics.prompt_steps == 0


def test_rows_in_the_slots_of_siblings_are_left_out_if_the_order_of_slots_matters() -> None:
    tree = DraftConfig(3, "tree", 16)
    for quality in (40, 60, 80):
        language = Language(8, quality, end_every=10**9)
        first = Arrival([1, 2, 3], max_tokens=30, draft_config=tree, salt="")
        prompt = [1, 2, 3, *first.alone(language)[()], 5]
        found = []
        for ordered in (False, True):
            second = Arrival(prompt, at=40, draft_config=tree, salt="")
            scene = Scene(language, [first, second], 1, cache=PrefixCache(in_order=ordered))
            scene.play()
            assert scene.text(1) == scene.alone[1]
            found.append((scene.tasks[1].request.statistics.cached_tokens, scene.engine.copied))
        assert found[1][1] == []
        assert found[1][0] <= found[0][0]
        if found[1][0] < found[0][0]:
            assert found[0][1] == [(0, 0, found[0][0])]
            return
    raise AssertionError("no sibling was accepted")


def test_a_request_that_takes_no_part_reuses_and_leaves_nothing() -> None:
    prompt = [1, 2, 3, 4] * 10
    arrivals = [Arrival(prompt, max_tokens=4, at=at, salt=salt) for at, salt in ((0, ""), (9, None), (18, ""))]
    scene = Scene(NEVER_ENDS, arrivals, 1, cache=PrefixCache())
    scene.play()
    assert [task.request.statistics.cached_tokens for task in scene.tasks] == [0, 0, 0]


def test_a_salt_separates_requests() -> None:
    prompt = [1, 2, 3, 4] * 10
    arrivals = [Arrival(prompt, max_tokens=4, at=9 * number, salt=salt) for number, salt in enumerate("abab")]
    scene = Scene(NEVER_ENDS, arrivals, 2, cache=PrefixCache())
    scene.play()
    assert [task.request.statistics.cached_tokens for task in scene.tasks] == [0, 0, 39, 39]


def test_a_copy_serves_a_request_while_the_first_one_runs() -> None:
    prompt = [1, 2, 3, 4] * 10
    arrivals = [Arrival([*prompt, number], max_tokens=20, at=2 * number, salt="") for number in range(4)]
    cache = PrefixCache()
    scene = Scene(NEVER_ENDS, arrivals, 4, cache=cache)
    scene.play()
    assert [scene.text(number) for number in range(4)] == scene.alone
    assert [task.request.statistics.cached_tokens for task in scene.tasks] == [0, 40, 40, 40]
    assert [(target, count) for _, target, count in scene.engine.copied] == [(1, 40), (2, 40), (3, 40)]
    assert (cache.hits, cache.hit_tokens, cache.queried_tokens) == (3, 120, 4 * 41)


def test_few_common_tokens_are_not_copied() -> None:
    arrivals = [Arrival([*range(9)] * 3 + [number] * 40, max_tokens=4, at=9 * number, salt="") for number in range(2)]
    scene = Scene(NEVER_ENDS, arrivals, 2, cache=PrefixCache())
    scene.play()
    assert [task.request.statistics.cached_tokens for task in scene.tasks] == [0, 0]


def test_a_prefix_of_which_little_is_common_stays_for_its_own_next_turn() -> None:
    system = [1, 2, 3, 4] * 10
    prompts = [[*system, *[5] * 60], [*system, *[6] * 60], [*system, *[5] * 60, 7]]
    arrivals = [Arrival(prompt, max_tokens=4, at=9 * number, salt="") for number, prompt in enumerate(prompts)]
    scene = Scene(NEVER_ENDS, arrivals, 2, cache=PrefixCache())
    scene.play()
    assert [task.request.statistics.cached_tokens for task in scene.tasks] == [0, 40, 100]
    assert [task.index for task in scene.tasks] == [0, 1, 0]
    assert [scene.text(number) for number in range(3)] == scene.alone


def test_a_short_chat_is_not_overwritten_while_a_buffer_is_empty() -> None:
    system = [1, 2, 3, 4] * 12
    prompts = [[*system, *[5] * 7], [*system, *[6] * 7], [*system, *[5] * 7, 7]]
    arrivals = [Arrival(prompt, max_tokens=4, at=9 * number, salt="") for number, prompt in enumerate(prompts)]
    for requests, reused in ((2, [0, 48, 55]), (1, [0, 48, 48])):
        scene = Scene(NEVER_ENDS, arrivals, requests, cache=PrefixCache())
        scene.play()
        assert [task.request.statistics.cached_tokens for task in scene.tasks] == reused


def test_the_least_recently_used_prefix_is_given_up() -> None:
    def prompt(chat: int, turns: int = 0) -> list[int]:
        return [chat] * 40 + [9] * turns

    order = [prompt(0), prompt(1), prompt(0, 1), prompt(2), prompt(0, 2), prompt(1, 1)]
    arrivals = [Arrival(tokens, max_tokens=1, at=5 * number, salt="") for number, tokens in enumerate(order)]
    cache = PrefixCache()
    scene = Scene(NEVER_ENDS, arrivals, 2, cache=cache)
    scene.play()
    assert [task.request.statistics.cached_tokens for task in scene.tasks] == [0, 0, 40, 0, 41, 0]
    assert [task.index for task in scene.tasks] == [0, 1, 0, 1, 0, 1]
    assert cache.evictions == 2
    assert scene.scheduler.buffers.cached_tokens == 42 + 41


def test_a_prefix_that_is_overwritten_for_the_most_part_counts_as_given_up() -> None:
    prompts = [[1] * 5 + [chat] * 40 for chat in range(2, 6)]
    arrivals = [Arrival(prompt, max_tokens=1, at=5 * number, salt="") for number, prompt in enumerate(prompts)]
    cache = PrefixCache()
    scene = Scene(NEVER_ENDS, arrivals, 2, cache=cache)
    scene.play()
    assert [task.request.statistics.cached_tokens for task in scene.tasks] == [0, 0, 5, 5]
    assert cache.evictions == 2
    assert [scene.text(number) for number in range(4)] == scene.alone


def test_requests_get_buffers_beside_the_running_ones() -> None:
    """A call computes padding rows for idle requests between the first and the last one."""
    chats = [[chat] * 40 for chat in range(5)]
    arrivals = [Arrival(chat, max_tokens=1, at=5 * number, salt="") for number, chat in enumerate(chats)]
    arrivals += [Arrival([*chats[3], 9], max_tokens=20, at=30, salt=""), Arrival([*chats[0], 9], at=32, salt="")]
    scene = Scene(NEVER_ENDS, arrivals, 5, cache=PrefixCache())
    scene.play()
    assert [task.index for task in scene.tasks] == [0, 1, 2, 3, 4, 3, 2]
    assert scene.engine.copied == [(0, 2, 40)]
    assert [task.request.statistics.cached_tokens for task in scene.tasks][-2:] == [40, 40]
    assert [scene.text(number) for number in (5, 6)] == scene.alone[5:]


def test_a_buffer_that_was_copied_beside_the_running_ones_is_the_first_to_be_overwritten() -> None:
    chats = [[chat] * 40 for chat in range(5)]
    arrivals = [Arrival(chat, max_tokens=1, at=5 * number, salt="") for number, chat in enumerate(chats)]
    arrivals += [Arrival([*chats[3], 9], max_tokens=20, at=30, salt=""), Arrival([*chats[1], 9], at=32, salt="")]
    arrivals += [Arrival([7, 8], at=80, salt="")]
    scene = Scene(NEVER_ENDS, arrivals, 5, cache=PrefixCache())
    scene.play()
    assert scene.engine.copied == [(1, 2, 40)]
    assert scene.tasks[-1].index == 1


def test_a_buffer_that_rows_were_copied_from_counts_as_used() -> None:
    system = [1, 2, 3, 4] * 10
    prompts = [[*system, *[5] * 60], [8] * 50, [*system, *[6] * 60], [7, 8]]
    arrivals = [Arrival(prompt, max_tokens=1, at=5 * number, salt="") for number, prompt in enumerate(prompts)]
    scene = Scene(NEVER_ENDS, arrivals, 3, cache=PrefixCache())
    scene.play()
    assert scene.engine.copied == [(0, 2, 40)]
    assert [task.index for task in scene.tasks] == [0, 1, 2, 1]


def test_of_two_buffers_that_match_the_one_with_fewer_other_tokens_is_taken_over() -> None:
    system = [1, 2, 3, 4] * 10
    prompts = [[*system, *[5] * 30], [*system, *[6] * 20], [*system, 7]]
    arrivals = [
        Arrival(prompt, max_tokens=3, at=0 if number < 2 else 20, salt="") for number, prompt in enumerate(prompts)
    ]
    scene = Scene(NEVER_ENDS, arrivals, 2, cache=PrefixCache())
    scene.play()
    assert [task.index for task in scene.tasks] == [0, 1, 1]


def test_rows_that_a_running_request_overwrites_are_not_copied() -> None:
    prompts = [[1, 2] * 30, [3, 4] * 30, [5, 6] * 30, [*[1, 2] * 30, 7]]
    arrivals = [
        Arrival(prompt, max_tokens=20 if salt is None else 2, at=5 * number, salt=salt)
        for number, (prompt, salt) in enumerate(zip(prompts, ("", "", None, ""), strict=True))
    ]
    scene = Scene(NEVER_ENDS, arrivals, 2, cache=PrefixCache())
    scene.play()
    assert [task.index for task in scene.tasks] == [0, 1, 0, 1]
    assert scene.tasks[3].request.statistics.cached_tokens == 0
    assert scene.text(3) == scene.alone[3]


def test_nothing_is_reused_after_all_requests_were_failed() -> None:
    prompt = [1, 2, 3, 4] * 10
    arrivals = [Arrival(prompt, max_tokens=2, salt=""), Arrival([*prompt, 5], at=9, salt="")]
    scene = Scene(NEVER_ENDS, arrivals, 2, cache=PrefixCache())
    while scene.now < 8:
        scene.turn()
    scene.scheduler.fail(EngineFault("gone"))
    scene.play()
    assert scene.tasks[1].request.statistics.cached_tokens == 0


def test_a_prefix_is_what_a_thread_sees_as_far_as_it_has_tokens() -> None:
    slots = Slots(20, "scatter")
    thread = new_thread([4, 5, 6], 20)
    taken = slots.take(np.arange(5), np.array([1, 0, 2, 3, 4]))  # rows of two accepted candidates behind a stop string
    thread.sees[taken] = True
    assert kv_prefix(thread, slots).tokens == [4, 5, 6]
    assert kv_prefix(thread, slots).slots.tolist() == [1, 0, 2]
    thread.sees[0] = False
    assert kv_prefix(thread, slots).tokens == [4]


@pytest.mark.parametrize("trouble", ["number", "choice", "on_token"])
def test_rows_of_a_failed_request_are_not_reused(trouble: str) -> None:
    prompt = [1, 2, 3, 4] * 10
    first = Arrival(prompt, max_tokens=9, trouble=trouble, when=2, salt="")  # type: ignore[arg-type]
    scene = Scene(NEVER_ENDS, [first, Arrival([*prompt, 5], at=9, salt="")], 1, cache=PrefixCache())
    scene.play()
    assert scene.tasks[0].fault is not None
    assert scene.tasks[1].request.statistics.cached_tokens == 0
    assert scene.text(1) == scene.alone[1]


def test_rows_of_a_prompt_that_was_cancelled_before_its_end_are_not_reused() -> None:
    prompt = [1, 2, 3, 4] * 10
    arrivals = [Arrival(prompt, cancelled=2, salt=""), Arrival([*prompt, 5], at=9, salt="")]
    scene = Scene(NEVER_ENDS, arrivals, 1, prompt_rows=7, cache=PrefixCache())
    scene.play()
    assert scene.tasks[1].request.statistics.cached_tokens == 0
    assert scene.text(1) == scene.alone[1]


def test_rows_of_a_completion_that_was_cancelled_are_reused() -> None:
    prompt = [1, 2, 3, 4] * 10
    arrivals = [Arrival(prompt, cancelled=5, salt=""), Arrival([*prompt, 5], at=9, salt="")]
    scene = Scene(NEVER_ENDS, arrivals, 1, cache=PrefixCache())
    scene.play()
    assert scene.tasks[1].request.statistics.cached_tokens == 40


def test_nothing_is_reused_after_the_engine_failed() -> None:
    prompts = [[1, 2, 3, 4] * 10, [5], [1, 2, 3, 4] * 10 + [6]]
    arrivals = [Arrival(prompt, at=9 * number, max_tokens=4, salt="") for number, prompt in enumerate(prompts)]
    scene = Scene(NEVER_ENDS, arrivals, 3, faulty=5, cache=PrefixCache())
    scene.play()
    assert isinstance(scene.tasks[1].fault, EngineFault)
    assert scene.tasks[2].request.statistics.cached_tokens == 0
    assert scene.text(2) == scene.alone[2]


def test_a_copy_that_fails_fails_its_request_only() -> None:
    prompt = [1, 2, 3, 4] * 10
    arrivals = [Arrival([*prompt, number], at=2 * number, max_tokens=12, salt="") for number in range(3)]
    scene = Scene(NEVER_ENDS, arrivals, 2, cache=PrefixCache())
    copy = scene.engine.copy

    def broken(source: int, target: int, slots: object) -> None:
        scene.engine.copy = copy  # type: ignore[method-assign]
        raise EngineFault("lost the device")

    scene.engine.copy = broken  # type: ignore[method-assign]
    scene.play()
    assert [type(task.fault) for task in scene.tasks] == [type(None), EngineFault, type(None)]
    assert [scene.text(number) for number in (0, 2)] == [scene.alone[number] for number in (0, 2)]
    assert scene.tasks[2].request.statistics.cached_tokens == 40


def test_an_end_token_alone_leaves_the_prompt_for_reuse() -> None:
    language = Language(3, end_every=1)
    arrivals = [Arrival([1, 2] * 20, salt="", at=9 * number) for number in range(2)]
    scene = Scene(language, arrivals, 1, cache=PrefixCache())
    scene.play()
    assert scene.text(0) == {(): []}
    assert scene.tasks[1].request.statistics.cached_tokens == 39


def test_a_prefix_is_stored_found_and_forgotten() -> None:
    cache = PrefixCache()
    cache.store(0, "", in_order([1, 2, 3]))
    cache.store(1, "a", in_order([1, 2]))
    cache.store(2, "", in_order([]))
    assert cache.longest("", [1, 2, 9]) == (2, {0})
    assert cache.longest("a", [1, 2, 9]) == (2, {1})
    assert cache.longest("b", [1, 2, 9]) == (0, frozenset())
    assert (0 in cache, 2 in cache, cache.tokens((0, 1, 2, 7))) == (True, False, 5)
    cache.store(0, "", in_order([4]))
    cache.forget(1)
    assert cache.longest("", [1, 2]).length == cache.longest("a", [1]).length == 0
    cache.clear()
    assert cache.longest("", [4]).length == cache.tokens((0, 1)) == 0
    assert END not in cache
