"""The protocol that backends implement, the arrays of one call, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault, SpaceportError
from spaceport.graphs.contract.manifest import Manifest
from spaceport.graphs.contract.signature import STEP_ROWS, Signature, visible_length

# KV slots to copy, as sources and targets: all sources are read before any target is written.
Moves = tuple[NDArray[np.int64], NDArray[np.int64]]
NO_MOVES: Moves = (np.empty(0, np.int64), np.empty(0, np.int64))

PREFILL_ROWS = 512  # prompt rows of a call: enough for efficient matrix products, few enough to interrupt a prompt soon
# The default context length in tokens is the model's, but no more than the larger number, nor than fits into these bytes
# of KV buffers, unless that is less than the smaller number. On a CPU, slots that no text uses take no memory.
_LEAST_DEFAULT, _MOST_DEFAULT = 4096, 32_768
_DEFAULT_KV_BYTES = 2 << 30  # of all requests together


class EngineFault(SpaceportError, RuntimeError):
    """An engine call failed; the message names the engine."""


@dataclass(frozen=True)
class Costs:
    """Standard costs of rows and calls of an engine, used where they are not measured."""

    row: float  # cost of each further row, relative to a call of one row
    call_rows: int  # number of rows that cost as much as the fixed part of a call
    prompt_rows: int = PREFILL_ROWS  # prompt rows of a call: many are efficient, few keep calls short


# Attention scores of more than 128 prompt rows do not fit into the caches of a CPU: prefill with chunks of 512 rows takes
# 1.5 times as long in int8 with one thread (107M model, Xeon).
CPU_COSTS = Costs(0.08, 16, 128)
GPU_COSTS = Costs(0.08, 16)


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
    """Runs calls on KV buffers that it owns; requests are numbered from 0. A subclass gets the defaults of abilities that it lacks."""

    signature: Signature
    capacity: int  # KV slots of each request
    requests: int  # number of requests with KV buffers
    rows: int  # maximum number of rows of one request in a call
    device: str
    costs: Costs  # standard costs of its rows and calls
    notes: tuple[str, ...] = ()  # for the user, one sentence each
    selects: bool = False  # whether it can select the best tokens on its device
    parks: bool = False  # whether it can keep KV rows outside of its buffers

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits of the needed rows, B x R x V; valid until the next call."""

    def select(self, batch: Batch) -> list[SelectedRows]:
        """The best tokens of the needed rows of each request, instead of their logits; valid until the next call."""
        raise EngineFault(f"{self.device}: this engine selects no tokens")

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        """Copy KV slots in all layers, for the requests from `first` on; called for append-lowered graphs only."""

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        """Copy these KV slots of a request to the lowest slots of another one, in all layers and in this order.

        It may be the same request: all slots are read before any is written.
        """

    def saved(self, request: int, slots: int) -> Any:
        """A copy of the lowest KV slots of a request, in all layers."""
        raise EngineFault(f"{self.device}: this engine parks no KV rows")

    def restore(self, request: int, rows: Any) -> None:
        """Write what was saved into the lowest KV slots of a request, perhaps of another one."""
        raise EngineFault(f"{self.device}: this engine parks no KV rows")

    def clear(self, request: int) -> None:
        """Zero the KV buffers of a request, since NaN in them would spread to the next request."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is opened."""

    capacity: int  # KV slots of each request
    requests: int  # maximum number of concurrent requests
    threads: int = 1  # CPU threads of engines that run on a CPU; 0: one for each core
    trust_engines: bool = False  # also run engines that were not built on this machine
    graphs: bool = True  # replay CUDA graphs on a GPU


class SelectedRows:
    """The best tokens of some rows; their logits are copied only on request."""

    def __init__(self, packed: NDArray[np.float32], logits: Callable[[], NDArray[np.float32]]) -> None:
        self._packed = packed  # rows x (2n + 1): scores of the n best tokens, those tokens, log of the sum of all exp
        self._logits = logits

    def __getitem__(self, index: int | slice) -> SelectedRows:
        rows = slice(index, index + 1) if isinstance(index, int) else index
        return SelectedRows(self._packed[rows], lambda: self._logits()[rows])

    @property
    def logits(self) -> NDArray[np.float32]:
        """All logits of the rows."""
        return self._logits()

    def best(self, banned: Collection[int]) -> list[int] | None:
        """The best token of each row that is not banned, the lowest id among equals; None if it is unknown.

        It is unknown if all selected tokens are banned, if tokens that were not selected may have the same score, or if a
        logit is NaN.
        """
        tokens = []
        for line in self._packed.tolist():
            if (token := _best(line, banned)) is None:
                return None
            tokens.append(token)
        return tokens

    def probable(self, most: int, least: float, banned: Collection[int]) -> list[list[tuple[int, float]]]:
        """Up to `most` tokens of each row with a probability of at least `least`, with their probabilities.

        The probabilities are those of a row without the `banned` tokens.
        """
        candidates = []
        for *line, total in self._packed.tolist():
            count = len(line) // 2
            known = [
                (int(token), math.exp(score - total))
                for score, token in zip(line[:count], line[count:], strict=True)
                if math.isfinite(score - total)
            ]
            left = 1 - sum(probability for token, probability in known if token in banned)
            ranked = [(token, probability / left) for token, probability in known if token not in banned and left > 0]
            candidates.append([(token, probability) for token, probability in ranked if probability >= least][:most])
        return candidates


def selected_rows(
    packed: NDArray[np.float32], logits: Callable[[], NDArray[np.float32]], wanted: int
) -> list[SelectedRows]:
    """The rows of each request, from a call with padding rows."""

    def of(request: int) -> Callable[[], NDArray[np.float32]]:
        return lambda: logits()[request, :wanted]

    return [SelectedRows(lines[:wanted], of(request)) for request, lines in enumerate(packed)]


def _best(line: list[float], banned: Collection[int]) -> int | None:
    count = len(line) // 2
    if not math.isfinite(line[-1]):
        return None
    allowed = [(-line[rank], int(line[count + rank])) for rank in range(count) if int(line[count + rank]) not in banned]
    if not allowed:
        return None
    score, token = min(allowed)
    return token if -score > line[count - 1] else None


def seq_len(manifest: Manifest, max_seq_len: int | None, max_slots: int | None = None, requests: int = 1) -> int:
    """The context length of a runtime, in tokens."""
    if max_seq_len is None:
        return min(manifest.max_positions, max(_LEAST_DEFAULT, _fitting_seq_len(manifest, max_slots, requests)))
    if not 2 <= max_seq_len <= manifest.max_positions:
        raise OptionFault(f"max_seq_len is {max_seq_len}: expected 2 to {manifest.max_positions}, the model's limit")
    return max_seq_len


def _fitting_seq_len(manifest: Manifest, max_slots: int | None, requests: int) -> int:
    """The context length whose KV buffers have a moderate size; engines for append graphs take theirs at once."""
    if manifest.signature.lowering == "append":
        return _LEAST_DEFAULT
    fitting = _DEFAULT_KV_BYTES // manifest.signature.kv_bytes(max(1, requests), 1024) * 1024
    return min(fitting, _MOST_DEFAULT, max_slots or fitting)


def slots_for(max_seq_len: int, max_slots: int | None) -> int:
    """Maximum tokens of a prompt and all its threads."""
    if max_slots is None:
        return max_seq_len
    if max_slots < max_seq_len:
        raise OptionFault(
            f"max_slots is {max_slots}: expected at least max_seq_len, {max_seq_len}, so that one thread can reach it"
        )
    return max_slots


def capacity_for(manifest: Manifest, max_slots: int) -> int:
    """KV slots of a request: its tokens, the rows of its widest step, and one for padding rows."""
    # all requests of an append-lowered call write the same number of consecutive slots: those of a prefill chunk
    prefill = PREFILL_ROWS if manifest.signature.lowering == "append" else 0
    return visible_length(max_slots + STEP_ROWS + prefill + 1)
