"""Forks at their limits: threads that wait, threads without free slots, and where a text may not fork."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spaceport.runtime.decode.threads import Ending, Thread
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.choice import Bans, Greedy
from spaceport.runtime.session import Runtime
from support.hash_engine import CHILD, FORK, Language
from support.hash_runtime import hash_runtime
from support.scripted_steps import PROMPT, Scene, Texts

A, A1, A2, B, B1, C1 = range(3, 9)
TEXTS: Texts = {
    (): [A, FORK, B, FORK, A, B, FORK, A],
    (0,): [A1, A2, A1],
    (1,): [B1, A1, B1, A1, B1],
    (2,): [C1, C1],
}


@pytest.mark.parametrize("mask_slots", [0, 1, 4])
@pytest.mark.parametrize("max_threads", [1, 2, 3, 8])
def test_a_thread_that_waits_writes_what_it_would_have_written_at_once(max_threads: int, mask_slots: int) -> None:
    scene = Scene(TEXTS, mask_slots, max_threads).run()
    assert scene.said == TEXTS
    assert set(scene.endings.values()) == {"end"}
    scene.check_rows()
    assert scene.request.statistics.peak_threads <= max_threads
    for number in range(1, scene.steps + 1):
        assert len({row.path for row in scene.rows if row.step == number}) <= max_threads


def test_threads_that_wait_take_their_turns_in_the_order_of_their_forks() -> None:
    scene = Scene(TEXTS, max_threads=1).run()
    spans = [[row.step for row in scene.rows if row.path == path] for path in TEXTS]
    assert spans == [[1, 1, *range(2, 10)], [*range(10, 14)], [*range(14, 20)], [*range(20, 23)]]
    assert not any(row.beside for row in scene.rows)


def test_what_a_waiting_thread_sees_is_held_and_nothing_else() -> None:
    scene = Scene(TEXTS, mask_slots=2, max_threads=1).run(until=())
    last = max(position for position, token in enumerate(TEXTS[()]) if token == FORK) + len(PROMPT)
    assert scene.held == {((), position) for position in range(last + 1)}
    scene.run(until=(0,))
    assert scene.held == {((), position) for position in range(last + 1)}
    scene.run(until=(2,))
    assert scene.held == set()


def test_a_thread_that_waits_begins_in_the_step_after_another_has_ended() -> None:
    scene = Scene(TEXTS, max_threads=2).run()
    ends = {path: max(row.step for row in scene.rows if row.path == path) for path in TEXTS}
    begins = {path: min(row.step for row in scene.rows if row.path == path) for path in TEXTS}
    assert begins[0,] == 3
    assert begins[1,] == min(ends[()], ends[0,]) + 1
    assert begins[2,] == sorted(ends.values())[1] + 1


@pytest.mark.parametrize("mask_slots", [0, 1, 4])
@pytest.mark.parametrize(
    ("root", "ending", "child", "its_ending"),
    [
        # capacity for six tokens after the prompt; the child would generate A1 A2 B1
        ([A, B, A, B, A, FORK], "length", [], "length"),  # [Child] would stand beyond the limit
        ([A, B, A, B, FORK, A], "length", [], "length"),  # [Child] is the last token with a free slot
        ([A, B, A, FORK, A, B], "length", [A1], "length"),
        ([A, B, FORK, A, B, A], "length", [A1, A2], "length"),
        ([A, B, FORK], "end", [A1, A2], "length"),
        ([A, FORK, B], "end", [A1, A2, B1], "length"),  # there is no slot for its end token
        ([FORK, A, B], "end", [A1, A2, B1], "end"),
    ],
)
def test_the_limit_counts_along_the_way_to_a_thread(
    root: list[int], ending: Ending, child: list[int], its_ending: Ending, mask_slots: int
) -> None:
    scene = Scene({(): root, (0,): [A1, A2, B1]}, mask_slots, max_tokens=6).run()
    assert scene.said == {(): root, (0,): child}
    assert scene.endings == {(): ending, (0,): its_ending}
    assert scene.held == set()
    assert all(row.position < len(PROMPT) + 6 for row in scene.rows)
    scene.check_rows()


@pytest.mark.parametrize("mask_slots", [0, 1, 4])
@pytest.mark.parametrize("total", range(1, 24))
def test_the_total_ends_all_threads_at_once(total: int, mask_slots: int) -> None:
    """Tokens of all threads count, and each [Child]."""
    scene = Scene(TEXTS, mask_slots, total=total).run()
    for path, text in scene.said.items():
        assert text == TEXTS[path][: len(text)]
    whole = sum(map(len, TEXTS.values())) + 3
    last = any(thread.tokens[-1] == CHILD for thread in scene.request.threads)
    assert min(total, whole) <= scene.request.added <= total + last
    cut = [path for path, ending in scene.endings.items() if ending == "total"]
    assert bool(cut) == (total <= whole)
    assert all(scene.said[path] == TEXTS[path] for path, ending in scene.endings.items() if ending == "end")
    assert scene.held == set()


def thread_at(path: tuple[int, ...], *tokens: int) -> Thread:
    return Thread(path, [*PROMPT, *tokens], len(PROMPT), np.zeros(8, np.bool_))


@pytest.mark.parametrize(
    ("path", "tokens", "ahead", "forks"),
    [
        ((), (A,), (), True),
        ((), (FORK,), (), False),
        ((0,), (CHILD,), (), False),
        ((0,), (CHILD, A), (), True),
        ((), (A,), (FORK,), False),  # what this step has chosen already counts
        ((), (FORK,), (A,), True),
        ((0,), (CHILD,), (A,), True),
        ((0, 1), (A,), (), False),  # too deep
        ((0, 1, 2), (A,), (B,), False),
    ],
)
def test_a_fork_is_banned_behind_fork_and_child_and_where_it_is_too_deep(
    path: tuple[int, ...], tokens: tuple[int, ...], ahead: tuple[int, ...], forks: bool
) -> None:
    bans = Bans(frozenset((CHILD,)), FORK, CHILD, depth=2)
    logits = np.zeros(16, np.float32)
    logits[[CHILD, FORK, B]] = 3, 2, 1
    assert Greedy(bans).token(logits, thread_at(path, *tokens), ahead) == (FORK if forks else B)


def test_mask_slots_propose_no_fork_to_a_thread_that_is_too_deep() -> None:
    greedy = Greedy(Bans(frozenset((CHILD,)), FORK, CHILD, depth=1))
    logits = np.zeros((2, 16), np.float32)
    logits[:, [CHILD, FORK, B]] = 9, 8, 7
    for most in (1, 2):
        root, child = (greedy.candidates(logits, thread_at(path, A), 3, most) for path in ((), (0,)))
        assert [candidate.tokens[0] for candidate in root] == [FORK, FORK]
        assert [candidate.tokens[0] for candidate in child] == [B, B]


def test_a_text_that_may_not_fork_has_bans_everywhere() -> None:
    assert Greedy(Bans(frozenset((CHILD, FORK)))).bans.at(thread_at(()), ()) == {CHILD, FORK}
    assert Bans(frozenset((CHILD,)), FORK, CHILD, depth=0).at(thread_at(()), ()) == {CHILD, FORK}


@pytest.mark.parametrize("by_default", [True, False])
@pytest.mark.parametrize("fork", [None, True, False])
def test_a_bundle_says_whether_requests_fork_by_default(by_default: bool, fork: bool | None) -> None:
    language = Language(5, fork_every=5)
    base = hash_runtime(language, max_slots=400)
    manifest = replace(base.bundle.manifest, fork_by_default=by_default)
    with Runtime(replace(base.bundle, manifest=manifest), base.engine, 64, 400) as runtime:
        completion = runtime.generate([1, 2, 3], Decoding(max_tokens=30, fork=fork))
    threads = language.tree([1, 2, 3], 33, Decoding().max_depth)
    forks = by_default if fork is None else fork
    assert len(threads) > 1
    assert {thread.path for thread in completion.threads} == (set(threads) if forks else {()})
    if not forks:
        assert list(completion.tokens) == language.write([1, 2, 3], 30)
