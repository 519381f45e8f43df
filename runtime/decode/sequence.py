"""One sequence of tokens of a request, the KV slots of a request, and what reports about or selects tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.graphs.contract.signature import Lowering
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.engine import NO_MOVES, Moves


class SlotsExhausted(SpaceportError, RuntimeError):
    """A step needs more KV slots than are free."""


class Slots:
    """The KV slots of one request: each is free, or held by one or more threads.

    A scatter engine writes rows to any slots: it gets the lowest free ones, in an order that the caller sets.
    An append engine writes rows to consecutive slots, after the highest one in use.
    `compact` returns the moves that then put the retained rows into the gaps.
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

    def allocate(self, positions: NDArray[np.int64], order: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Allocate free slots for rows at these positions.

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

    def free(self, slots: NDArray[np.int64]) -> None:
        """Remove a holder from each of these slots; a slot without holders is free."""
        if not slots.size:
            return
        left = self._holders[slots] - 1
        shared = left.nonzero()[0].size
        if shared and left.min() < 0:
            raise ValueError("only held slots can be freed")
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

    def compact(self, slots: NDArray[np.int64]) -> Moves:
        """The moves, as sources and targets, that put these rows into the lowest slots; for append engines only."""
        if not slots.size:
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


# Why a thread ended: its end token, a stop string, max_tokens or max_seq_len; or why the whole request ended:
# max_total_tokens, its timeout, a cancelled stream.
Ending = Literal["end", "stop", "length", "total", "deadline", "cancelled"]


@dataclass
class TokenSequence:
    """The tokens of one thread, from the first prompt token on, and the KV slots that it sees."""

    path: tuple[int, ...]  # index among its parent's children, for each level; () is the root thread
    tokens: list[int]  # prompt and generated tokens; the index of a token is its position
    start: int  # position of the first token that the thread itself generated
    visible: NDArray[np.bool_]  # slots; True = the thread sees it
    fed: int = 0  # number of tokens in the KV cache
    fork: int | None = None  # position of the [Fork] that started it; None: root thread
    forks: int = 0  # number of child threads
    candidates: tuple[Candidates, ...] = ()  # what the mask slots predicted for the next positions
    ending: Ending | None = None
    drafted: list[bool] = field(default_factory=list)  # for each generated token: whether it was an accepted candidate
    draft_state: dict[str, Any] = field(default_factory=dict)  # what draft sources store of it; a child gets copies

    @property
    def generated(self) -> list[int]:
        """The tokens that the thread itself generated."""
        return self.tokens[self.start :]

    @property
    def held(self) -> NDArray[np.int64]:
        """The KV slots that the thread holds."""
        return np.flatnonzero(self.visible)

    def child(self, fork: int, token: int, unseen: NDArray[np.int64]) -> TokenSequence:
        """A child thread that continues with `token` after the [Fork] at a position, and does not see these slots."""
        visible = self.visible.copy()
        visible[unseen] = False
        path = (*self.path, self.forks)
        self.forks += 1
        state = {source: state.copy() for source, state in self.draft_state.items()}
        tokens = [*self.tokens[: fork + 1], token]
        return TokenSequence(path, tokens, fork + 2, visible, min(self.fed, fork + 1), fork, draft_state=state)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Update the visible slots after the engine has moved some."""
        moved = self.visible[sources].copy()
        self.visible[sources] = False
        self.visible[targets] = moved


def root_sequence(prompt: Sequence[int], capacity: int) -> TokenSequence:
    """The root thread of a request."""
    return TokenSequence((), list(prompt), len(prompt), np.zeros(capacity, np.bool_))


class KvPrefix(NamedTuple):
    """Tokens from position 0 on, and the KV slot of each."""

    tokens: list[int]
    slots: NDArray[np.int64]


def kv_prefix(thread: TokenSequence, slots: Slots) -> KvPrefix:
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


class NotANumber(SpaceportError, RuntimeError):
    """The logits of a request hold NaN, +Inf or only -Inf for allowed tokens; check the bundle with `spaceport check`."""


class TokenSelector(Protocol):
    """Selects tokens from logits, always the same ones for the same text and logits.

    A selector whose attribute `selects` is true also takes `runtime.selection.SelectedRows` instead of logits.
    """

    def token(self, logits: NDArray[np.float32], thread: TokenSequence, ahead: Sequence[int]) -> int:
        """The next token after a thread's tokens and the tokens `ahead` that this step has already selected."""

    def candidates(
        self, logits: NDArray[np.float32], thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        """Up to `most` candidates for each row of logits; the first row is for this position of the thread."""


def not_a_number(position: int) -> NotANumber:
    """The error for logits whose highest one is no number."""
    return NotANumber(
        f"the logits for the token at position {position} hold NaN, +Inf or only -Inf for allowed tokens: "
        "`spaceport check` on the bundle shows whether the export or the engine is at fault; a float16 model that "
        "overflows needs --format float32 at its export"
    )


class Listener:
    """Receives the generated tokens of a request's threads, and decides where a stop string ends them; this one ignores all."""

    def on_token(self, thread: TokenSequence, token: int, drafted: bool, source: str | None = None) -> bool:
        """Called after each generated token; returns whether the thread ends with it."""
        return False

    def on_fork(self, parent: TokenSequence, child: TokenSequence) -> None:
        """Called when a child thread starts at the [Fork] that its parent has just generated."""

    def on_end(self, thread: TokenSequence) -> None:
        """Called when a thread has ended."""

    def is_cut_off(self, thread: TokenSequence) -> bool:
        """Whether all further text of the thread would come after a stop string."""
        return False


# A thread, what happened (a token, a child thread that starts, None: it ended), whether a token was drafted, and what
# proposed it.
Event = tuple[TokenSequence, int | TokenSequence | None, bool, str | None]


class EventLog(Listener):
    """A listener that stores events for another one to replay; it never ends a thread."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_token(self, thread: TokenSequence, token: int, drafted: bool, source: str | None = None) -> bool:
        self.events.append((thread, token, drafted, source))
        return False

    def on_fork(self, parent: TokenSequence, child: TokenSequence) -> None:
        self.events.append((parent, child, False, None))

    def on_end(self, thread: TokenSequence) -> None:
        self.events.append((thread, None, False, None))


def replay(events: Iterable[Event], listener: Listener) -> None:
    """Report stored events to a listener; it sees the threads in their current state."""
    for thread, what, drafted, source in events:
        if what is None:
            listener.on_end(thread)
        elif isinstance(what, int):
            listener.on_token(thread, what, drafted, source)
        else:
            listener.on_fork(thread, what)
