"""Engine: the protocol that backends implement, and the arrays of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.graphs.contract.signature import Signature

# KV slots to copy, as sources and targets: all sources are read before any target is written.
Moves = tuple[NDArray[np.int64], NDArray[np.int64]]
NO_MOVES: Moves = (np.empty(0, np.int64), np.empty(0, np.int64))


class EngineFault(SpaceportError, RuntimeError):
    """An engine call failed; the message names the engine."""


@dataclass(frozen=True)
class Costs:
    """Standard costs of rows and calls of an engine, used where they are not measured."""

    row: float  # cost of each further row, relative to a call of one row
    call_rows: int  # number of rows that cost as much as the fixed part of a call
    prompt_rows: int = 512  # prompt rows of a call: many are efficient, few keep calls short


# Of a CPU, see docs/performance.md. Attention scores of more prompt rows do not fit into its caches.
CPU_COSTS = Costs(0.08, 16, 128)
UNTIMED = Costs(0.08, 16)  # of a GPU


@dataclass(frozen=True)
class Batch:
    """The arrays of one call, for the requests `first` to `first + B - 1` of the engine."""

    first: int
    input_ids: NDArray[np.int64]  # B x T
    position_ids: NDArray[np.int64]  # B x T
    slot_ids: NDArray[np.int64]  # B x T
    attention_mask: NDArray[np.bool_]  # B x 1 x T x A
    logit_rows: NDArray[np.int64]  # B x R
    sliding_attention_mask: NDArray[np.bool_] | None = None  # B x 1 x T x A

    @property
    def requests(self) -> int:
        return len(self.input_ids)

    def lines(self, signature: Signature) -> int:
        """Number of lines of logits per request."""
        return int(self.logit_rows.shape[1]) * signature.lines

    def arrays(self, signature: Signature) -> list[tuple[str, NDArray[np.int64] | NDArray[np.bool_]]]:
        """The arrays by their names in the graph."""
        return [(tensor.name, getattr(self, tensor.name)) for tensor in signature.rows]


def slots_in_order(slots: NDArray[np.int64]) -> int:
    """How many of the first slots are 0, 1, 2, and so on."""
    (moved,) = np.nonzero(slots != np.arange(slots.size))
    return int(moved[0]) if moved.size else slots.size


class Engine(Protocol):
    """Runs calls on KV buffers that it owns; requests are numbered from 0."""

    @property
    def signature(self) -> Signature: ...

    @property
    def capacity(self) -> int:
        """KV slots of each request."""

    @property
    def requests(self) -> int:
        """Number of requests with KV buffers."""

    @property
    def rows(self) -> int:
        """Maximum number of rows of one request in a call."""

    @property
    def device(self) -> str: ...

    @property
    def costs(self) -> Costs:
        """Standard costs of its rows and calls."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, one sentence each."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits of the needed rows, B x R x V; valid until the next call."""

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        """Copy KV slots in all layers, for the requests from `first` on."""

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        """Copy these KV slots of a request to the lowest slots of another one, in all layers and in this order.

        It may be the same request: all slots are read before any is written.
        """

    def clear(self, request: int) -> None:
        """Zero the KV buffers of a request, since NaN in them would spread to the next request."""

    def close(self) -> None: ...
