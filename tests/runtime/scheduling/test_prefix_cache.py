"""Prefix cache: requests, chats and scores that reuse rows are what they would be alone, and get rows of their salt only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.signature import LOWERINGS, Lowering
from spaceport.runtime.backends import open_engine
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.sequence import Slots, in_order, kv_prefix, root_sequence
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import EngineFault, EngineOptions, capacity_for
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.prefix_cache import Match, PrefixCache
from spaceport.runtime.scheduling.request import Completion, Echo, Request
from spaceport.runtime.session import Runtime
from support.arrivals import ARRIVALS, LANGUAGES, Arrival, Scene, Trap, Trouble
from support.hash_engine import HashEngine, Language
from support.hash_runtime import hash_runtime
from support.traced import TOKENIZER

NEVER_ENDS = Language(8, end_every=10**9)
SYSTEM = [1, 2, 3, 4] * 10
LONGER = [*SYSTEM, *[5, 6] * 20]

# What a prompt begins with: that of an earlier arrival and its completion, up to a number of tokens; its salt.
BEGINNINGS = st.tuples(
    st.none() | st.integers(0, 5), st.integers(0, 60), st.sampled_from(("", "salt", "", "salt", None))
)


def following(
    language: Language, arrivals: list[Arrival], beginnings: list[tuple[int | None, int, str | None]]
) -> list[Arrival]:
    """The arrivals, with prompts that begin like those before them and their completions."""
    found: list[Arrival] = []
    for arrival, (earlier, count, salt) in zip(arrivals, beginnings, strict=False):
        before: list[int] = []
        if earlier is not None and found:
            other = found[earlier % len(found)]
            before = [*other.prompt, *other.alone(language)[()]][:count]
        found.append(replace(arrival, prompt=[*before, *arrival.prompt][:50], salt=salt))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("examples", [pytest.param(200), pytest.param(5_000, marks=pytest.mark.nightly)])
def test_requests_with_a_cache_write_what_each_would_alone(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        language = data.draw(LANGUAGES)
        arrivals = data.draw(st.lists(ARRIVALS, min_size=1, max_size=7))
        arrivals = following(language, arrivals, data.draw(st.lists(BEGINNINGS, min_size=7, max_size=7)))
        scene = Scene(
            language,
            arrivals,
            data.draw(st.integers(1, 4)),
            data.draw(st.sampled_from(LOWERINGS)),
            data.draw(st.sampled_from((1, 7, 20, 512))),
            faulty=data.draw(st.none() | st.integers(0, 30)),
        )
        scene.play()
        cache = scene.scheduler.buffers.cache
        for number, (arrival, sequences) in enumerate(zip(arrivals, scene.sequences, strict=True)):
            scene.check_ending(number)
            assert sequences.statistics.cached_tokens < len(arrival.prompt)
            assert arrival.salt is not None or sequences.statistics.cached_tokens == 0
        for index in range(scene.engine.requests):  # every prefix is that of rows that are in the engine
            if index in cache:
                (tokens, slots), salt = cache[index].prefix, cache[index].salt
                cells = [scene.engine._cells[index][slot] for slot in slots]
                assert [cell.token for cell in cells if cell is not None] == tokens
                assert {cell.owner for cell in cells if cell is not None} == {salt}  # and was stored under their salt
                assert index in cache.longest(salt, tokens).holders
                assert cache.longest(salt, tokens).length == len(tokens)

    holds()


def play(
    arrivals: Sequence[Arrival],
    requests: int = 1,
    prompt_rows: int = 512,
    lowering: Lowering = "scatter",
    language: Language = NEVER_ENDS,
) -> Scene:
    """A scene in which who is not disturbed writes what it would alone."""
    scene = Scene(language, arrivals, requests, lowering, prompt_rows)
    scene.play()
    for number, arrival in enumerate(arrivals):
        if (arrival.trouble, arrival.cancelled, arrival.patience) == (None, None, None):
            assert scene.text(number) == scene.alone[number]
    return scene


def reused(scene: Scene) -> list[int]:
    return [sequences.statistics.cached_tokens for sequences in scene.sequences]


def two_turns(draft_config: DraftConfig, language: Language = NEVER_ENDS) -> list[Arrival]:
    """A chat of two turns."""
    first = Arrival(list(range(9)) * 4, max_tokens=30, draft_config=draft_config, salt="")
    return [first, replace(first, prompt=[*first.prompt, *first.alone(language)[()], 5], at=40)]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("draft_config", [DraftConfig(0, "chain"), DraftConfig(3, "chain"), DraftConfig(3, "tree", 16)])
def test_the_next_turn_of_a_chat_computes_what_is_new_only(draft_config: DraftConfig, lowering: Lowering) -> None:
    second = play(two_turns(draft_config), lowering=lowering).sequences[1].statistics
    assert second.cached_tokens >= 36 + 29  # all of the first turn but its last token, which was never fed
    assert second.prompt_steps == 0


def test_rows_in_the_slots_of_siblings_are_copied_into_order() -> None:
    language = Language(8, 40, end_every=10**9)
    played = play(two_turns(DraftConfig(3, "tree", 16), language), language=language)
    assert played.engine.copied == [(0, 0, reused(played)[1])]


def salted(*salts: str | None) -> list[Arrival]:
    """The same prompt with these salts, one after the other."""
    return [Arrival(SYSTEM, 9 * number, 4, salt=salt) for number, salt in enumerate(salts)]


def chats(*prompts: Sequence[int], every: int = 5, max_tokens: int = 1) -> list[Arrival]:
    return [Arrival(prompt, number * every, max_tokens, salt="") for number, prompt in enumerate(prompts)]


FIVES, SIXES = [*SYSTEM, *[5] * 60], [*SYSTEM, *[6] * 60]
SHORT = chats([*SYSTEM, *[5] * 7], [*SYSTEM, *[6] * 7], [*SYSTEM, *[5] * 7, 7], every=9, max_tokens=4)
TURNS = chats([0] * 40, [1] * 40, [*[0] * 40, 9], [2] * 40, [*[0] * 40, 9, 9], [*[1] * 40, 9])
# five chats, and one that runs for a while: beside it come others
BESIDE = [*chats(*([chat] * 40 for chat in range(5))), Arrival([*[3] * 40, 9], 30, salt="")]
BESIDE_0 = [*BESIDE, Arrival([*[0] * 40, 9], 32, salt="")]
BESIDE_1 = [*BESIDE, Arrival([*[1] * 40, 9], 32, salt=""), Arrival([7, 8], 80, salt="")]
NO = [0] * 5
TWO_MATCH = chats([*SYSTEM, *[5] * 30], [*SYSTEM, *[6] * 20], max_tokens=3, every=0)
RUNNING = [*chats([1, 2] * 30, [3, 4] * 30, max_tokens=2), Arrival([5, 6] * 30, 10)]
LEADERS = chats(SYSTEM, [*LONGER, 7], [*LONGER, 8], every=0, max_tokens=3)
Copies = list[tuple[int, int, int]]


@pytest.mark.parametrize(
    ("arrivals", "requests", "tokens", "indices", "copied", "evictions"),
    [
        # one that takes no part reuses and leaves nothing; a salt separates requests
        (salted("", None, ""), 1, [0, 0, 0], [0, 0, 0], [], 1),
        (salted("a", "b", "a", "b"), 2, [0, 0, 39, 39], [0, 1, 0, 1], [], 0),
        # few common tokens are not copied; more are copied while the first request runs
        (chats(*([*range(9)] * 3 + [number] * 40 for number in range(2))), 2, [0, 0], [0, 1], [], 0),
        (chats(FIVES, [*SYSTEM, 7], every=1, max_tokens=20), 2, [0, 40], [0, 1], [(0, 1, 40)], 0),
        # a prefix of which little is common stays for its own next turn
        (chats(FIVES, SIXES, [*FIVES, 7], every=9), 2, [0, 40, 100], [0, 1, 0], [(0, 1, 40)], 0),
        # a short chat is not overwritten while a buffer is empty
        (SHORT, 2, [0, 40, 47], [0, 1, 0], [(0, 1, 40)], 0),
        (SHORT, 1, [0, 40, 40], [0, 0, 0], [], 0),
        # the least recently used prefix is given up
        (TURNS, 2, [0, 0, 40, 0, 41, 0], [0, 1, 0, 1, 0, 1], [], 2),
        # one that is overwritten for the most part counts as given up
        (chats(*([1] * 5 + [chat] * 40 for chat in range(2, 6))), 2, [0, 0, 5, 5], [0, 1, 0, 1], [], 2),
        # a buffer that rows were copied from counts as used
        (chats(FIVES, [8] * 50, SIXES, [7, 8]), 3, [0, 0, 40, 0], [0, 1, 2, 1], [(0, 2, 40)], 1),
        # of two buffers that match the one with fewer other tokens is taken over
        ([*TWO_MATCH, Arrival([*SYSTEM, 7], 20, salt="")], 2, [0, 40, 40], [0, 1, 1], [(0, 1, 40)], 0),
        # rows that a running request overwrites are not copied
        ([*RUNNING, Arrival([*[1, 2] * 30, 7], 15, salt="")], 2, [0, 0, 0, 0], [0, 1, 0, 1], [], 2),
        # requests get buffers beside the running ones, since a call computes the rows of idle requests between them
        (BESIDE_0, 5, [*NO, 40, 40], [0, 1, 2, 3, 4, 3, 2], [(0, 2, 40)], 1),
        # a buffer that was copied beside the running ones is the first to be overwritten
        (BESIDE_1, 5, [*NO, 40, 40, 0], [0, 1, 2, 3, 4, 3, 2, 1], [(1, 2, 40)], 2),
    ],
)
def test_requests_get_the_buffers_that_save_the_most(
    arrivals: list[Arrival], requests: int, tokens: list[int], indices: list[int], copied: Copies, evictions: int
) -> None:
    scene = play(arrivals, requests)
    cache = scene.scheduler.buffers.cache
    assert (reused(scene), [request.index for request in scene.requests], scene.engine.copied) == (
        tokens,
        indices,
        copied,
    )
    assert (cache.hits, cache.hit_tokens, cache.evictions) == (sum(map(bool, tokens)), sum(tokens), evictions)
    assert cache.queried_tokens == sum(len(arrival.prompt) for arrival in arrivals if arrival.salt is not None)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(
    ("arrivals", "requests", "tokens"),
    [
        ([Arrival(SYSTEM, max_tokens=5, salt="")] * 4, 4, [0, 39, 39, 39]),
        ([Arrival(SYSTEM, max_tokens=5, salt="")] * 5, 2, [0, 39, 39, 39, 39]),  # beyond the buffers: later
        (LEADERS, 4, [0, 40, 80]),  # a request that waits follows a better leader then
        ([replace(each, at=20 * (number > 0)) for number, each in enumerate(LEADERS)], 4, [0, 40, 80]),
    ],
)
def test_requests_that_arrive_together_compute_what_their_prompts_have_in_common_once(
    arrivals: list[Arrival], requests: int, tokens: list[int], lowering: Lowering
) -> None:
    scene = play(arrivals, requests, 7, lowering=lowering)
    assert reused(scene) == tokens
    first, second, *_ = scene.requests
    if arrivals[0] == arrivals[1]:  # the time that it waits for its leader is time in the queue
        began = second.submitted + second.statistics.waiting_seconds
        assert began > first.submitted + first.statistics.first_token_seconds
        assert second.statistics.first_token_seconds > second.statistics.waiting_seconds


@pytest.mark.parametrize(("length", "salts"), [(40, ("a", "b")), (40, ("a", None)), (40, (None, None)), (31, ("", ""))])
def test_requests_with_little_in_common_or_of_other_salts_wait_for_nothing(
    length: int, salts: tuple[str | None, str | None]
) -> None:
    arrivals = [Arrival([*SYSTEM[:length], chat], salt=salt) for chat, salt in zip((5, 6), salts, strict=True)]
    scene = Scene(NEVER_ENDS, arrivals, 2, prompt_rows=7)
    scene.turn()
    assert [request.leader for request in scene.requests] == [None, None]
    scene.play()
    assert reused(scene) == [0, 0]


@pytest.mark.parametrize(("trouble", "cancelled"), [("choice", None), (None, 3)])
def test_one_request_goes_on_in_place_of_a_leader_that_ended(trouble: Trouble | None, cancelled: int | None) -> None:
    first = Arrival(SYSTEM, trouble=trouble, cancelled=cancelled, salt="")
    scene = play([first, *(Arrival([*SYSTEM, chat], max_tokens=3, salt="") for chat in range(3))], 4, 7)
    assert isinstance(scene.requests[0].error, Trap) == (cancelled is None)
    assert reused(scene) == [0, 0, 40, 40]


def test_a_request_that_waits_can_be_cancelled_and_reach_its_deadline() -> None:
    waiting = [Arrival([*SYSTEM, 1], cancelled=2, salt=""), Arrival([*SYSTEM, 2], patience=2, salt="")]
    others = [Arrival(prompt, max_tokens=4, salt="") for prompt in (SYSTEM, [*SYSTEM, 3])]
    scene = play([others[0], *waiting, others[1]], 4, 7)
    assert [sequences.threads[0].ending for sequences in scene.sequences] == [
        "length",
        "cancelled",
        "deadline",
        "length",
    ]
    assert [len(scene.text(number)[()]) for number in (1, 2)] == [0, 0]
    assert reused(scene) == [0, 0, 0, 40]


@pytest.mark.parametrize(
    ("first", "tokens"),
    [
        (Arrival(SYSTEM, trouble="number", when=2, salt=""), 0),
        (Arrival(SYSTEM, trouble="choice", when=2, salt=""), 0),
        (Arrival(SYSTEM, trouble="on_token", when=2, salt=""), 0),
        (Arrival(SYSTEM, cancelled=2, salt=""), 0),  # before the end of its prompt
        (Arrival(SYSTEM, cancelled=8, salt=""), 40),
        (Arrival(SYSTEM, max_tokens=1, salt=""), 40),
    ],
)
def test_rows_of_a_failed_request_or_prompt_are_not_reused(first: Arrival, tokens: int) -> None:
    scene = play([first, Arrival([*SYSTEM, 5], at=20, salt="")], prompt_rows=7)
    assert (scene.requests[0].error is not None) == (first.trouble is not None)
    assert reused(scene)[1] == tokens


def test_nothing_is_reused_after_the_engine_or_all_requests_failed() -> None:
    prompts = [SYSTEM, [5], [*SYSTEM, 6]]
    arrivals = [Arrival(prompt, at=9 * number, max_tokens=4, salt="") for number, prompt in enumerate(prompts)]
    scene = Scene(NEVER_ENDS, arrivals, 3, faulty=5)
    scene.play()
    assert isinstance(scene.requests[1].error, EngineFault)
    assert (reused(scene)[2], scene.text(2)) == (0, scene.alone[2])
    scene = Scene(NEVER_ENDS, arrivals[::2], 2)
    while scene.now < 8:
        scene.turn()
    scene.scheduler.fail(EngineFault("gone"))
    scene.play()
    assert reused(scene)[1] == 0


def test_a_copy_that_fails_fails_its_request_only() -> None:
    arrivals = [Arrival([*SYSTEM, number], at=2 * number, max_tokens=12, salt="") for number in range(3)]
    scene = Scene(NEVER_ENDS, arrivals, 2)
    copy = scene.engine.copy

    def broken(source: int, target: int, slots: object) -> None:
        scene.engine.copy = copy  # type: ignore[method-assign]
        raise EngineFault("lost the device")

    scene.engine.copy = broken  # type: ignore[method-assign]
    scene.play()
    assert [type(request.error) for request in scene.requests] == [type(None), EngineFault, type(None)]
    assert [scene.text(number) for number in (0, 2)] == [scene.alone[number] for number in (0, 2)]
    assert reused(scene)[2] == 40


def test_a_prefix_is_what_a_thread_sees_as_far_as_it_has_tokens() -> None:
    slots = Slots(20, "scatter")
    thread = root_sequence([4, 5, 6], 20)
    taken = slots.allocate(
        np.arange(5), np.array([1, 0, 2, 3, 4])
    )  # rows of two accepted candidates behind a stop string
    thread.visible[taken] = True
    assert kv_prefix(thread, slots).tokens == [4, 5, 6]
    assert kv_prefix(thread, slots).slots.tolist() == [1, 0, 2]
    thread.visible[0] = False
    assert kv_prefix(thread, slots).tokens == [4]


TOKENS = st.lists(st.sampled_from((0, 1, 256, 65536)), max_size=9)


def longest_of_all(known: dict[int, tuple[str, list[int]]], salt: str, tokens: list[int]) -> Match:
    """The longest match, found by comparing with every prefix."""
    common = {
        index: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other, strict=False)))
        for index, (own, other) in known.items()
        if own == salt
    }
    longest = max(common.values(), default=0)
    return Match(longest, frozenset(index for index, length in common.items() if length == longest and longest))


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab"), st.none() | TOKENS, TOKENS), max_size=30))
def test_the_longest_match_is_that_of_a_comparison_with_every_prefix(
    changes: list[tuple[int, str, list[int] | None, list[int]]],
) -> None:
    cache, known = PrefixCache(), dict[int, tuple[str, list[int]]]()
    for index, salt, tokens, asked in changes:
        known.pop(index, None)
        if tokens is None:
            cache.forget(index)
        else:
            cache.store(index, salt, in_order(tokens))
            known[index] = salt, tokens
        for own in "ab":
            assert cache.longest(own, asked) == longest_of_all(known, own, asked)


# In a runtime

LANGUAGE = Language(11, 70, end_every=10**9)
PROMPT = [1, 2, 3, 4] * 10
FEW = Decoding(max_tokens=6)


def cached(completion: Completion) -> int:
    return completion.statistics.cached_tokens


def test_the_next_turn_of_a_chat_reuses_its_history() -> None:
    with hash_runtime(LANGUAGE, 200, prefix_cache=True, requests=2) as runtime, hash_runtime(LANGUAGE, 200) as without:
        history, counts = PROMPT, []
        for turn in range(4):
            answer = runtime.generate(history, FEW)
            expected = without.generate(history, FEW)
            assert answer.tokens == expected.tokens
            counts.append((cached(answer), cached(expected), answer.statistics.prompt_tokens))
            history = [*history, *answer.tokens, turn, 9]
        assert counts == [(0, 0, 40), (45, 0, 48), (53, 0, 56), (61, 0, 64)]
        status = runtime.status()
        assert (status.cached_tokens, status.cache_hits, status.cache_hit_tokens) == (64 + 5, 3, 45 + 53 + 61)
        assert (status.cache_queried_tokens, status.cache_evictions) == (40 + 48 + 56 + 64, 0)
        found = runtime.generate([*history, 5], replace(FEW, trace=True))
        assert found.trace is not None
        assert found.trace.record(TOKENIZER).steps[0].rows[0].positions[0] == cached(found) > 0
        assert without.status().cached_tokens == without.status().cache_queried_tokens == 0


def test_without_a_cache_no_request_reuses_rows_or_waits_for_the_prompt_of_another() -> None:
    for prefix_cache, salt in ((True, ""), (False, None)):
        with hash_runtime(LANGUAGE, 200, prefix_cache=prefix_cache) as runtime:
            for request in (Request(PROMPT, FEW), Request(PROMPT, FEW, echo=Echo(None, 0, parse_special=False))):
                sequences = runtime._admission.prepare(request)
                assert sequences is not None
                assert sequences.cache_salt == salt


def test_scores_reuse_rows_whose_logits_nobody_needs() -> None:
    with hash_runtime(LANGUAGE, 200, prefix_cache=True) as runtime, hash_runtime(LANGUAGE, 200) as without:
        assert isinstance(runtime.engine, HashEngine)
        for continuation, hits in (([5, 6], 0), ([7], 39), ([5], 78)):
            assert runtime.score(PROMPT, continuation) == without.score(PROMPT, continuation)
            assert runtime.status().cache_hit_tokens == hits
        assert runtime.score(PROMPT) == without.score(PROMPT)
        assert runtime.status().cache_hit_tokens == 78
        assert cached(runtime.generate(PROMPT, FEW)) == 39
        assert runtime.engine.copied == []


@pytest.mark.torch
@pytest.mark.parametrize("requests", [1, 2])
def test_chats_and_scores_of_a_model_are_those_without_a_cache(any_tiny_bundle: Path, requests: int) -> None:
    bundle = open_bundle(any_tiny_bundle)
    options = [
        Decoding(max_tokens=24, mask_slots=0, logprobs=0),
        Decoding(max_tokens=24, draft="chain", logprobs=0),
        Decoding(max_tokens=24, logprobs=0, sampling=Sampling(temperature=1.0, seed=5)),
        Decoding(max_tokens=24, logprobs=0),
    ]
    within = 0 if bundle.manifest.native else 1e-4
    sizes = EngineOptions(capacity_for(bundle.manifest, 400), requests, 1)
    with (
        Runtime(bundle, open_engine(bundle, "onnxruntime", sizes), 400, prefix_cache=True) as runtime,
        Runtime(bundle, open_engine(bundle, "onnxruntime", sizes), 400) as without,
    ):
        for system in ("The harbour of the old town.", "A second text that has another beginning."):
            history = runtime.tokens_of(system)
            for turn, decoding in enumerate(options):
                answer, expected = runtime.generate(history, decoding), without.generate(history, decoding)
                assert answer.tokens == expected.tokens
                for one, other in zip(answer.logprobs, expected.logprobs, strict=True):
                    assert abs(one.logprob - other.logprob) <= within
                assert cached(answer) > len(history) // 2 or not turn
                history = [*history, *answer.tokens, 20 + turn, 30]
        assert runtime.status().cache_hits >= 6
        for continuation in (" sea", " boats and the sea", " town"):
            scores = [one.score("The harbour of the old town, the", continuation) for one in (runtime, without)]
            assert scores[0].tokens == scores[1].tokens
            assert scores[0].sum == pytest.approx(scores[1].sum, abs=1e-4)
        assert runtime.status().cache_hits >= 8
