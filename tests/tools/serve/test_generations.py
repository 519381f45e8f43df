"""Generations: the pieces of several choices, of which none is lost however fast they come."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.scheduling.stream import AsyncStream
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.piece import Piece
from spaceport.tools.serve.generations import Generations


class Ready:
    """A stream whose pieces have all come already, some of them at a time."""

    def __init__(self, batches: int) -> None:
        self.statistics = Statistics()
        self._left = batches

    async def pieces(self) -> list[Piece]:
        self._left -= 1
        return [Piece("a", 1, False)] if self._left >= 0 else []

    async def completion(self) -> Completion:
        return Completion("a", (1,), "end", Statistics())


async def batches_of(counts: list[int]) -> list[tuple[int, int]]:
    """The index and the number of pieces of each batch."""
    running = Generations(cast(Runtime, None), [], lambda *_: None)
    running.streams = [cast(AsyncStream, Ready(count)) for count in counts]
    found: list[tuple[int, int]] = []
    async for index, pieces in running.pieces():
        found.append((index, len(pieces)))
    return found


@pytest.mark.parametrize("counts", [[0], [1], [5], [3, 3], [0, 7, 1]])
def test_each_choice_ends_after_all_its_pieces(counts: list[int]) -> None:
    found: Any = asyncio.run(batches_of(counts))
    for index, count in enumerate(counts):
        assert [size for other, size in found if other == index] == [1] * count + [0]
