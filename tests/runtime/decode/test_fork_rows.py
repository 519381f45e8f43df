"""Forks, row by row: the method's worked example, a [Fork] at every position of a step, and threads that wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.sequence import Ending, Listener, TokenSequence
from spaceport.runtime.decode.sequence_group import RequestStep
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.sampling.choice import Bans, Greedy
from spaceport.runtime.session import Runtime
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language, advance, request_for
from support.hash_runtime import hash_runtime

Path = tuple[int, ...]
Texts = dict[Path, list[int]]  # output of each thread, without the end token
PROMPT = [1, 2]


@dataclass(frozen=True, eq=False)
class Row:
    """A row, and the other rows that it saw, in the order of their positions."""

    step: int
    path: Path
    token: int
    position: int
    seen: tuple[Row, ...]
    beside: bool  # its parent is another thread's row of the same step


@dataclass
class Scene(Listener):
    """A request whose output is given by a table, over an engine that records every row."""

    texts: Texts
    mask_slots: int = 0
    max_threads: int = 8
    steps: int = 0
    rows: list[Row] = field(default_factory=list)
    written_in: dict[Path, list[int]] = field(default_factory=dict)  # the step, from 1, of each token of a thread
    _calls: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = HashEngine(Language(1), 256, 1, before=self._calls.append)
        limits: Any = {"max_threads": self.max_threads, "max_depth": 9, "total": 500}
        watchers: Any = {"selector": self, "listener": self, "observers": [self]}
        self.request = request_for(self.engine, PROMPT, 60, self.mask_slots, **limits, **watchers)
        self._slots: dict[int, Row] = {}  # last row of each slot

    def token(self, logits: NDArray[np.float32], thread: TokenSequence, ahead: Sequence[int]) -> int:
        return self._at(thread, len(thread.tokens) + len(ahead))

    def candidates(
        self, logits: NDArray[np.float32], thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        return tuple(Candidates((self._at(thread, position + slot),), (1.0,)) for slot in range(len(logits)))

    def _at(self, thread: TokenSequence, position: int) -> int:
        return dict(enumerate(self.texts[thread.path], thread.start)).get(position, END)

    def on_token(self, thread: TokenSequence, token: int, drafted: bool, source: str | None = None) -> bool:
        self.written_in.setdefault(thread.path, []).append(self.steps)
        return False

    def on_step(self, step: RequestStep) -> None:
        """Record the rows of a step."""
        self.steps += 1
        batch, row = self._calls[-1], 0
        for part in step.parts:
            for token, position in zip(part.tokens.tolist(), part.positions.tolist(), strict=True):
                slot = int(batch.slot_ids[0, row])
                visible = np.flatnonzero(batch.attention_mask[0, 0, row]).tolist()
                seen = sorted((self._slots[o] for o in visible if o != slot), key=lambda other: other.position)
                beside = any(other.step == self.steps and other.path != part.thread.path for other in seen)
                self._slots[slot] = Row(self.steps, part.thread.path, token, position, tuple(seen), beside)
                self.rows.append(self._slots[slot])
                row += 1

    @property
    def held(self) -> set[tuple[Path, int]]:
        """Thread and position of each row whose slot is in use."""
        slots = self.request.slots.still_held(np.arange(self.engine.capacity)).tolist()
        return {(self._slots[slot].path, self._slots[slot].position) for slot in slots}

    @property
    def said(self) -> Texts:
        return {thread.path: thread.generated for thread in self.request.threads}

    @property
    def endings(self) -> dict[Path, Ending | None]:
        return {thread.path: thread.ending for thread in self.request.threads}

    def run(self, until: Path | None = None) -> Scene:
        """Run steps to the end of the request or of a thread."""
        while self.request.live and self.endings.get(until if until is not None else (-1,)) is None:
            advance(self.engine, self.request)
        return self


P0, P1 = PROMPT
A, A1, A2, B, B1, C1 = range(3, 9)
NAMES = {"P0": P0, "P1": P1, "1.A:": A, "F": FORK, "2.B:": B, "C": CHILD, "a1": A1, "a2": A2, "b1": B1, "end": C1}
TABLE = """
 0 P0    t0 pos 0   1
 1 P1    t0 pos 1   11
 2 1.A:  t0 pos 2   111
 3 F     t0 pos 3   1111
 4 2.B:  t0 pos 4   11111
 5 C     t1 pos 4   111101
 6 F     t0 pos 5   1111101
 7 a1    t1 pos 5   11110101
 8 end   t0 pos 6   111110101
 9 a2    t1 pos 6   1111010101
10 C     t2 pos 6   11111010001
11 eos   t0 pos 7   111110101001
12 eos   t1 pos 7   1111010101001
13 b1    t2 pos 7   11111010001001
14 eos   t2 pos 8   111110100010011
"""
CELLS = [line.split() for line in TABLE.strip().split("\n")]
THREADS: dict[str, Path] = {"t0": (), "t1": (0,), "t2": (1,)}
POSITIONS = [(THREADS[thread], int(position)) for _, _, thread, _, position, _ in CELLS]  # of each row of the table
EXAMPLE: Texts = {(): [A, FORK, B, FORK, C1], (0,): [A1, A2], (1,): [B1]}


def test_the_worked_example_is_fed_row_by_row() -> None:
    """The runtime feeds no end token; the order of slots is its own. [Fork] and [Child] are fed in the same step."""
    scene = Scene(EXAMPLE).run()
    found = {(row.path, row.position): row for row in scene.rows}
    cells = zip(POSITIONS, CELLS, strict=True)
    written = [(position, name, sees) for position, (_, name, *_, sees) in cells if name != "eos"]
    assert len(scene.rows) == len(found) == len(written)
    for position, name, sees in written:
        assert found[position].token == NAMES[name]
        assert [(row.path, row.position) for row in found[position].seen] == [
            other for other, bit in zip(POSITIONS[: len(sees) - 1], sees[:-1], strict=True) if int(bit)
        ]
    assert [[(row.path, row.token) for row in scene.rows if row.step == number] for number in range(1, 7)] == [
        [((), P0), ((), P1)],
        [((), A)],
        [((), FORK), ((0,), CHILD)],
        [((), B), ((0,), A1)],
        [((), FORK), ((0,), A2), ((1,), CHILD)],
        [((), C1), ((1,), B1)],
    ]
    assert [row.token for row in scene.rows if row.beside] == [CHILD, CHILD]
    assert scene.written_in == {(): [1, 2, 3, 4, 5], (0,): [3, 4], (1,): [5]}
    assert scene.said == EXAMPLE


def test_what_a_thread_alone_could_see_is_free_when_it_ends() -> None:
    scene = Scene({**EXAMPLE, (1,): [B1, B1, B1]}).run(until=(0,))
    assert scene.held == {POSITIONS[row] for row in (0, 1, 2, 3, 4, 6, 10)}  # 5, 7 and 9 are free; 8 is not fed yet
    scene.run(until=())
    assert scene.held == {POSITIONS[row] for row in (0, 1, 2, 3, 4, 6, 10, 13)}
    assert scene.run().held == set()


@pytest.mark.parametrize(
    ("root", "beside", "steps"),
    [
        # four mask slots: the first step generates one token, the second accepts four and adds one, and so on
        ([A, B, FORK, A, B, A], [False], [2]),
        ([A, FORK, B, FORK, A, B], [False, False], [2, 2]),  # two in one draft
        ([A, B, A, B, FORK, A], [False], [2]),  # the last accepted token
        ([A, B, A, B, A, FORK, B], [True], [2]),  # the token behind it
        ([FORK, A, B], [True], [1]),
        ([A, B, FORK], [False], [2]),  # right before the end token, which the same step chooses
        ([A, B, A, B, A, FORK], [True], [2]),  # right before the end token, which the next step chooses
        ([A, B, A, B, FORK], [False], [2]),
        ([A, FORK, B, A, B, FORK, A, B, FORK, B], [False, True, False], [2, 2, 3]),
    ],
)
def test_a_fork_anywhere_in_a_draft_starts_its_child_with_masks_one_step_later(
    root: list[int], beside: list[bool], steps: list[int]
) -> None:
    texts: Texts = {(child,): [A1, A2, B1, A1, A2, B1][child:] for child in range(len(beside))} | {(): root}
    scene = Scene(texts, mask_slots=4).run()
    assert scene.said == texts
    forks = [position for position, token in enumerate(root) if token == FORK]
    assert [scene.written_in[()][position] for position in forks] == steps
    for child, written in enumerate(steps):
        first = next(row for row in scene.rows if row.path == (child,))
        assert (first.step, first.beside) == (written + 1, beside[child])
        window = [row for row in scene.rows if row.path == first.path and row.step == first.step]
        assert [row.token for row in window] == [CHILD, *MASKS[:1] * 4]
        assert [row.position - first.position for row in window] == [*range(5)]
        assert scene.written_in[child,][0] == written + 1
    # a [Fork] and the tokens before it are fed once, whatever sees them
    fed = [row for row in scene.rows if row.token in (FORK, CHILD)]
    assert len({(row.path, row.position) for row in fed}) == len(fed) == 2 * len(forks)


ROOT = [A, FORK, B, FORK, A, B, FORK, A]
TEXTS: Texts = {(): ROOT, (0,): [A1, A2, A1], (1,): [B1, A1, B1, A1, B1], (2,): [C1, C1]}


def test_threads_that_wait_take_their_turns_in_the_order_of_their_forks() -> None:
    scene = Scene(TEXTS, max_threads=1).run()
    spans = [[row.step for row in scene.rows if row.path == path] for path in TEXTS]
    assert spans == [[1, 1, *range(2, 10)], [*range(10, 14)], [*range(14, 20)], [*range(20, 23)]]
    assert not any(row.beside for row in scene.rows)
    scene = Scene(TEXTS, max_threads=2).run()
    ends = {path: max(row.step for row in scene.rows if row.path == path) for path in TEXTS}
    begins = [min(row.step for row in scene.rows if row.path == path) for path in TEXTS]
    assert begins[1:] == [3, min(ends[()], ends[0,]) + 1, sorted(ends.values())[1] + 1]  # behind the end of another one


def test_what_a_waiting_thread_sees_is_held_and_nothing_else() -> None:
    scene = Scene(TEXTS, mask_slots=2, max_threads=1).run(until=())
    last = max(position for position, token in enumerate(ROOT) if token == FORK) + len(PROMPT)
    assert scene.held == {((), position) for position in range(last + 1)}
    assert scene.run(until=(0,)).held == {((), position) for position in range(last + 1)}
    assert scene.run(until=(2,)).held == set()


def test_mask_slots_propose_no_fork_to_a_thread_that_is_too_deep() -> None:
    logits = np.zeros((2, 16), np.float32)
    logits[:, [CHILD, FORK, B]] = 9, 8, 7
    root, child = (TokenSequence(path, [*PROMPT, A], len(PROMPT), np.zeros(8, np.bool_)) for path in ((), (0,)))
    greedy = Greedy(Bans(frozenset((CHILD,)), FORK, CHILD, depth=1))
    for most in (1, 2):
        found = [[each.tokens[0] for each in greedy.candidates(logits, one, 3, most)] for one in (root, child)]
        assert found == [[FORK, FORK], [B, B]]
    assert Bans(frozenset((CHILD,)), FORK, CHILD, depth=0).at(root, ()) == {CHILD, FORK}


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
    assert forks or list(completion.tokens) == language.write([1, 2, 3], 30)
