"""KV prefix: the first tokens of a thread with the KV slots that hold their rows, for requests that begin alike."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.decode.slots import Slots
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.engine import slots_in_order


class KvPrefix(NamedTuple):
    """Tokens from position 0 on, and the KV slot of each."""

    tokens: list[int]
    slots: NDArray[np.int64]

    def cut(self, count: int) -> KvPrefix:
        """The first tokens only."""
        return KvPrefix(self.tokens[:count], self.slots[:count])

    @property
    def tokens_in_order(self) -> int:
        """Number of first tokens that are in slots 0, 1, 2, and so on, as plain decoding would put them."""
        return slots_in_order(self.slots)


def kv_prefix(thread: Thread, slots: Slots) -> KvPrefix:
    """The tokens of a thread whose rows are in the slots that it sees.

    Rows of rejected candidates and of mask slots are not: the thread does not see them. Rows of accepted candidates after
    the end of the text are, but they have no token.
    """
    held = thread.held
    positions = slots.positions[held]
    order = np.argsort(positions)
    (gaps,) = np.nonzero(positions[order] != np.arange(positions.size))
    count = min(int(gaps[0]) if gaps.size else positions.size, len(thread.tokens))
    return KvPrefix(thread.tokens[:count], held[order[:count]])


def in_order(tokens: list[int]) -> KvPrefix:
    """Tokens whose rows are in slots 0, 1, 2, and so on."""
    return KvPrefix(tokens, np.arange(len(tokens)))
