"""Slots: who holds which slot of one request's KV buffers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import Lowering
from spaceport.runtime.engine import NO_MOVES, Moves


class SlotsExhausted(RuntimeError):
    """A step needs more slots than are free."""


class Slots:
    """The slots of one request: each is free or held by one thread or more.

    A scatter engine writes rows to any slots: the lowest free ones are given, in an order that the caller chooses.
    An append engine writes them to a run:
    the run starts behind the highest held slot, and `settle` says which kept rows then move down into the gaps.
    The last slot is never given: padding rows write there.
    """

    def __init__(self, capacity: int, lowering: Lowering) -> None:
        self.capacity = capacity
        self.positions = np.zeros(capacity, np.int64)  # place in the text of what a slot holds
        self.held = 0  # slots with a holder
        self.height = 0  # one more than the highest held slot
        self.lowering = lowering
        self._holders = np.zeros(capacity, np.int32)

    @property
    def spare(self) -> int:
        """The slot that nobody ever holds."""
        return self.capacity - 1

    def take(self, positions: NDArray[np.int64], order: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Slots for rows at these positions of the text, each held once from now on.

        With an order, its first row gets the lowest slot, and so on; the run of an append engine is in the order of rows.
        """
        count = positions.size
        end = min(self.height + count, self.spare)
        if self.lowering == "append" or self.held == self.height:  # no gaps
            slots = np.arange(self.height, end)
        else:
            (free,) = np.nonzero(self._holders[:end] == 0)
            slots = free[:count]
        if slots.size < count:
            raise SlotsExhausted(f"step needs {count} slots, {slots.size} are free: raise max_seq_len (--max-seq-len)")
        self.height = max(self.height, int(slots[-1]) + 1)
        if order is not None and count > 1 and self.lowering == "scatter":
            ascending, slots = slots, np.empty_like(slots)
            slots[order] = ascending
        self._holders[slots] = 1
        self.positions[slots] = positions
        self.held += count
        return slots

    def share(self, slots: NDArray[np.int64]) -> None:
        """One holder more for each of these slots."""
        if not np.all(self._holders[slots] > 0):
            raise ValueError("only held slots can be shared")
        self._holders[slots] += 1

    def release(self, slots: NDArray[np.int64]) -> None:
        """One holder less for each of these slots; without holders a slot is free."""
        if not slots.size:
            return
        holders = self._holders[slots]
        freed = np.count_nonzero(holders == 1)
        if freed < slots.size and holders.min() < 1:
            raise ValueError("only held slots can be released")
        self._holders[slots] = holders - 1
        self.held -= int(freed)
        self._lower()

    def still_held(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of these slots that have a holder."""
        return slots[self._holders[slots] > 0]

    def clear(self) -> None:
        """Free all slots, whoever holds them."""
        self._holders[:] = 0
        self.held = self.height = 0

    def settle(self, slots: NDArray[np.int64]) -> Moves:
        """Where the rows just kept in `slots` are to move, as sources and targets; an append engine only."""
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
        """Let the height follow after slots at the top were freed."""
        while self.height and not self._holders[self.height - 1]:
            self.height -= 1
