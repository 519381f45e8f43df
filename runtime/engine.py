"""Engine: the interface of a compiled graph, and the arrays of one call; all that a backend has to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import Signature

# KV slots to copy, as sources and targets: all sources are read before any target is written.
Moves = tuple[NDArray[np.int64], NDArray[np.int64]]
NO_MOVES: Moves = (np.empty(0, np.int64), np.empty(0, np.int64))


class EngineFault(RuntimeError):
    """An engine refused a call or failed in it; the message names the engine."""


@dataclass(frozen=True)
class Costs:
    """What rows and calls of an engine cost, so that drafts and batches are no wider than they pay."""

    row: float  # time that one more row adds to a call, in calls of one row
    call_rows: int  # number of rows whose time equals the fixed cost of a call
    prompt_rows: int = 512  # prompt rows of a call: many keep matrix products busy, few keep a call short


# Of a CPU; measured, see docs/performance.md. Attention scores of more prompt rows do not fit into its caches.
CPU_COSTS = Costs(0.08, 16, 128)
UNTIMED = Costs(0.08, 16)  # of a GPU whose calls were not timed


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

    def arrays(self, signature: Signature) -> list[tuple[str, NDArray[np.int64] | NDArray[np.bool_]]]:
        """The arrays by their names in the graph."""
        return [(tensor.name, getattr(self, tensor.name)) for tensor in signature.rows]


class Engine(Protocol):
    """Runs calls over KV buffers that it owns; a request is a number to it."""

    @property
    def signature(self) -> Signature: ...

    @property
    def capacity(self) -> int:
        """KV slots of each request."""

    @property
    def requests(self) -> int:
        """Number of requests that it has KV buffers for."""

    @property
    def rows(self) -> int:
        """Maximum number of rows of one request in a call."""

    @property
    def device(self) -> str: ...

    @property
    def costs(self) -> Costs:
        """What its rows and calls cost."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user who opened it should know, one sentence each."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits of the wanted rows, B x R x V; valid until the next call."""

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        """Copy KV slots in all layers, for the requests from `first` on."""

    def clear(self, request: int) -> None:
        """Zero the KV buffers of a request: NaN in them would spread to the next request that uses them."""

    def close(self) -> None: ...
