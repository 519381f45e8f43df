"""Forks, row by row: the method's worked example, and a [Fork] at every position of a step."""

from __future__ import annotations

import pytest

from support.hash_engine import CHILD, FORK, MASKS
from support.scripted_steps import PROMPT, Scene, Texts

P0, P1 = PROMPT
A, A1, A2, B, B1, LAST = range(3, 9)
NAMES = {"P0": P0, "P1": P1, "1.A:": A, "F": FORK, "2.B:": B, "C": CHILD, "a1": A1, "a2": A2, "b1": B1, "end": LAST}
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
THREADS = {"t0": (), "t1": (0,), "t2": (1,)}
POSITIONS = [(THREADS[thread], int(position)) for _, _, thread, _, position, _ in CELLS]  # of each row of the table
EXAMPLE: Texts = {(): [A, FORK, B, FORK, LAST], (0,): [A1, A2], (1,): [B1]}


def test_the_worked_example_is_fed_row_by_row() -> None:
    """The runtime feeds no end token; the order of slots is its own."""
    scene = Scene(EXAMPLE).run()
    found = {(row.path, row.position): row for row in scene.rows}
    written = [
        (position, name, sees) for position, (_, name, *_, sees) in zip(POSITIONS, CELLS, strict=True) if name != "eos"
    ]
    assert len(scene.rows) == len(found) == len(written)
    for position, name, sees in written:
        assert found[position].token == NAMES[name]
        assert [(row.path, row.position) for row in found[position].seen] == [
            other for other, bit in zip(POSITIONS[: len(sees) - 1], sees[:-1], strict=True) if int(bit)
        ]
    scene.check_rows()


def test_fork_and_child_are_fed_in_the_same_step() -> None:
    scene = Scene(EXAMPLE).run()
    steps = [[(row.path, row.token) for row in scene.rows if row.step == number] for number in range(1, 7)]
    assert steps == [
        [((), P0), ((), P1)],
        [((), A)],
        [((), FORK), ((0,), CHILD)],
        [((), B), ((0,), A1)],
        [((), FORK), ((0,), A2), ((1,), CHILD)],
        [((), LAST), ((1,), B1)],
    ]
    assert [row.token for row in scene.rows if row.beside] == [CHILD, CHILD]
    assert scene.generated.in_step == {(): [1, 2, 3, 4, 5], (0,): [3, 4], (1,): [5]}
    assert scene.said == EXAMPLE


def test_what_a_thread_alone_could_see_is_free_when_it_ends() -> None:
    rows = dict(enumerate(POSITIONS))
    scene = Scene({**EXAMPLE, (1,): [B1, B1, B1]}).run(until=(0,))
    assert scene.held == {rows[row] for row in (0, 1, 2, 3, 4, 6, 10)}  # 5, 7 and 9 are free; 8 is not fed yet
    scene.run(until=())
    assert scene.held == {rows[row] for row in (0, 1, 2, 3, 4, 6, 10, 13)}
    scene.run()
    assert scene.held == set()


def test_a_childs_first_window_is_child_and_its_masks() -> None:
    scene = Scene(EXAMPLE, mask_slots=2).run()
    for path in ((0,), (1,)):
        first = next(row.step for row in scene.rows if row.path == path)
        window = [row for row in scene.rows if row.path == path and row.step == first]
        assert [row.token for row in window] == [CHILD, MASKS[0], MASKS[0]]
        assert [row.position for row in window] == [window[0].position + depth for depth in range(3)]
    assert scene.said == EXAMPLE
    scene.check_rows()


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
def test_a_fork_anywhere_in_a_draft_starts_its_child_one_step_later(
    root: list[int], beside: list[bool], steps: list[int]
) -> None:
    texts: Texts = {(child,): [A1, A2, B1, A1, A2, B1][child:] for child in range(len(beside))} | {(): root}
    scene = Scene(texts, mask_slots=4).run()
    assert scene.said == texts
    scene.check_rows()
    forks = [position for position, token in enumerate(root) if token == FORK]
    assert [scene.generated.in_step[()][position] for position in forks] == steps
    for child, written in enumerate(steps):
        first = next(row for row in scene.rows if row.path == (child,))
        assert first.token == CHILD
        assert (first.step, first.beside) == (written + 1, beside[child])
        assert scene.generated.in_step[child,][0] == written + 1
    # a [Fork] and the tokens before it are fed once, whatever sees them
    fed = [row for row in scene.rows if row.token in (FORK, CHILD)]
    assert len({(row.path, row.position) for row in fed}) == len(fed) == 2 * len(forks)


@pytest.mark.parametrize("mask_slots", [0, 1, 4])
def test_a_child_forks_as_its_parent_does(mask_slots: int) -> None:
    texts: Texts = {
        (): [A, FORK, B, FORK],
        (0,): [A1, FORK, A2],
        (1,): [],
        (0, 0): [B1, FORK],
        (0, 0, 0): [A1, A2, B1],
    }
    scene = Scene(texts, mask_slots).run()
    assert scene.said == texts
    assert set(scene.endings.values()) == {"end"}
    scene.check_rows()
