"""Slots: which KV slots of a request are in use, and by how many threads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.graphs.contract.signature import Lowering
from spaceport.runtime.engine import NO_MOVES, Moves


class SlotsExhausted(SpaceportError, RuntimeError):
    """A step needs more KV slots than are free."""


class Slots:
    """The KV slots of one request: each is free, or held by one or more threads.

    A scatter engine writes rows to any slots: it gets the lowest free ones, in an order that the caller sets.
    An append engine writes rows to consecutive slots, after the highest one in use.
    `settle` returns the moves that then put the retained rows into the gaps.
    The last slot is reserved for padding rows.
    """

    def __init__(self, capacity: int, lowering: Lowering) -> None:
        self.capacity = capacity
        self.spare = capacity - 1  # the slot that is reserved for padding rows
        self.positions = np.zeros(capacity, np.int64)  # position of the token that each slot holds
        self.held = 0  # number of slots in use
        self.height = 0  # one more than the highest slot in use
        self.lowering = lowering
        self._holders = np.zeros(capacity, np.int32)

    def take(self, positions: NDArray[np.int64], order: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Take free slots for rows at these positions.

        With an order, its first row gets the lowest slot, and so on; an append engine ignores it.
        """
        count = positions.size
        end = min(self.height + count, self.spare)
        if self.lowering == "append" or self.held == self.height:  # no gaps
            slots = np.arange(self.height, end)
        else:
            (free,) = np.nonzero(self._holders[:end] == 0)
            slots = free[:count]
        if slots.size < count:
            raise SlotsExhausted(f"step needs {count} slots, {slots.size} are free: raise max_seq_len")
        self.height = max(self.height, int(slots[-1]) + 1)
        if order is not None and count > 1 and self.lowering == "scatter":
            ascending, slots = slots, np.empty(count, np.int64)
            slots[order] = ascending
        self._holders[slots] = 1
        self.positions[slots] = positions
        self.held += count
        return slots

    def share(self, slots: NDArray[np.int64]) -> None:
        """Add a holder to each of these slots."""
        if not np.all(self._holders[slots] > 0):
            raise ValueError("only held slots can be shared")
        self._holders[slots] += 1

    def release(self, slots: NDArray[np.int64]) -> None:
        """Remove a holder from each of these slots; a slot without holders is free."""
        if not slots.size:
            return
        left = self._holders[slots] - 1
        shared = left.nonzero()[0].size
        if shared and left.min() < 0:
            raise ValueError("only held slots can be released")
        self._holders[slots] = left
        self.held -= slots.size - shared
        self._lower()

    def still_held(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of these slots that are in use."""
        return slots[self._holders[slots] > 0]

    def clear(self) -> None:
        """Free all slots."""
        self._holders[:] = 0
        self.held = self.height = 0

    def settle(self, slots: NDArray[np.int64]) -> Moves:
        """The moves, as sources and targets, that put rows just retained into the lowest slots; append engines only."""
        if self.lowering == "scatter" or not slots.size:
            return NO_MOVES
        below = slots.max() + 1
        free = self._holders[:below] == 0
        free[slots] = True
        (targets,) = np.nonzero(free)
        sources, targets = slots, targets[: slots.size]
        moving = sources != targets
        sources, targets = sources[moving], targets[moving]
        holders, positions = self._holders[sources].copy(), self.positions[sources].copy()
        self._holders[sources] = 0
        self._holders[targets] = holders
        self.positions[targets] = positions
        self._lower()
        return sources, targets

    def _lower(self) -> None:
        """Lower the height after slots at the top were freed."""
        while self.height and not self._holders[self.height - 1]:
            self.height -= 1
