"""Captured: a call that comes again is played from its graph, and does what it did."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from spaceport.runtime.backends import captured
from spaceport.runtime.backends.captured import Captured


class Board:
    """What was done, and how."""

    def __init__(self, most: int = 3) -> None:
        self.done: list[str] = []
        self.captures: list[str] = []
        self.prepared: list[str] = []
        self._noting: list[str] | None = None
        self.captured = Captured(self._capture, most)

    def play(self, key: str) -> None:
        self.captured.play(key, lambda: self._do(key), lambda: self.prepared.append(key))

    def _do(self, key: str) -> None:
        assert self._noting is None or self.done[-1] == key, "what is captured has just been done plainly"
        (self.done if self._noting is None else self._noting).append(key)

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self._noting = []
        work()
        noted, self._noting = self._noting, None
        self.captures += noted
        return lambda: self.done.extend(noted)


@given(keys=st.lists(st.sampled_from("abcde"), max_size=40))
def test_what_is_played_is_done_in_its_order(keys: list[str]) -> None:
    board = Board()
    for key in keys:
        board.play(key)
        assert board.done[-1] == key
    assert board.done == keys
    assert len(board.captured) <= 3


def test_the_second_time_a_call_is_captured_and_from_then_on_played() -> None:
    board = Board()
    for _ in range(5):
        board.play("a")
    assert (board.captures, board.prepared, board.done) == (["a"], ["a", "a"], ["a"] * 5)


def test_the_least_recently_used_graph_goes_first() -> None:
    board = Board(most=2)
    for key in "aabbaccb":
        board.play(key)
    assert board.captures == ["a", "b", "c", "b"]
    board.play("c")
    assert board.captures == ["a", "b", "c", "b"]


def test_calls_that_never_come_again_are_forgotten() -> None:
    board = Board()
    for number in range(captured._MOST_SEEN + 10):
        board.play(str(number))
    assert len(board.captured._seen) <= captured._MOST_SEEN + 1
    assert not board.captures
