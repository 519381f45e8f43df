"""One sequence of tokens of a request with its KV slots, and what reports about it or selects its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.slots import Slots
from spaceport.runtime.engine import slots_in_order

# Why a thread ended: its end token, a stop string, max_tokens or max_seq_len; or why the whole request ended:
# max_total_tokens, its timeout, a cancelled stream.
Ending = Literal["end", "stop", "length", "total", "deadline", "cancelled"]


@dataclass
class Thread:
    """The tokens of one thread, from the first prompt token on, and the KV slots that it sees."""

    path: tuple[int, ...]  # index among its parent's children, for each level; () is the root thread
    tokens: list[int]  # prompt and generated tokens; the index of a token is its position
    start: int  # position of the first token that the thread itself generated
    sees: NDArray[np.bool_]  # slots; True = visible to the thread
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
        return np.flatnonzero(self.sees)

    @property
    def waits_for_fork(self) -> bool:
        """Whether the [Fork] that started it is not in the KV cache yet."""
        return self.fork is not None and self.fed <= self.fork

    def child(self, fork: int, token: int, unseen: NDArray[np.int64]) -> Thread:
        """A child thread that continues with `token` after the [Fork] at a position, and does not see these slots."""
        sees = self.sees.copy()
        sees[unseen] = False
        path = (*self.path, self.forks)
        self.forks += 1
        state = {source: state.copy() for source, state in self.draft_state.items()}
        tokens = [*self.tokens[: fork + 1], token]
        return Thread(path, tokens, fork + 2, sees, min(self.fed, fork + 1), fork, draft_state=state)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Update the visible slots after the engine has moved some."""
        moved = self.sees[sources].copy()
        self.sees[sources] = False
        self.sees[targets] = moved


def new_thread(prompt: Sequence[int], capacity: int) -> Thread:
    """The root thread of a request."""
    return Thread((), list(prompt), len(prompt), np.zeros(capacity, np.bool_))


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


class NotANumber(SpaceportError, RuntimeError):
    """The logits of a request hold NaN; check the bundle with `spaceport check`."""


class TokenSelector(Protocol):
    """Selects tokens from logits, always the same ones for the same text and logits.

    A selector whose attribute `selects` is true also takes `runtime.selection.SelectedRows` instead of logits.
    """

    def token(self, logits: NDArray[np.float32], thread: Thread, ahead: Sequence[int]) -> int:
        """The next token after a thread's tokens and the tokens `ahead` that this step has already selected."""

    def candidates(
        self, logits: NDArray[np.float32], thread: Thread, position: int, most: int
    ) -> tuple[Candidates, ...]:
        """Up to `most` candidates for each row of logits; the first row is for this position of the thread."""


def not_a_number(position: int) -> NotANumber:
    """The error for logits that hold NaN."""
    return NotANumber(
        f"the logits for the token at position {position} hold NaN: `spaceport check` on the bundle shows whether the "
        "export or the engine is at fault; a float16 model that overflows needs --dtype float32 at its export"
    )


class Listener(Protocol):
    """Receives the generated tokens of a request's threads, and decides where a stop string ends them."""

    def on_token(self, thread: Thread, token: int, drafted: bool, source: str | None = None) -> bool:
        """Called after each generated token; returns whether the thread ends with it."""

    def on_fork(self, parent: Thread, child: Thread) -> None:
        """Called when a child thread starts at the [Fork] that its parent has just generated."""

    def on_end(self, thread: Thread) -> None:
        """Called when a thread has ended."""

    def is_cut_off(self, thread: Thread) -> bool:
        """Whether all further text of the thread would come after a stop string."""


class NullListener:
    """A listener that ignores all events."""

    def on_token(self, thread: Thread, token: int, drafted: bool, source: str | None = None) -> bool:
        return False

    def on_fork(self, parent: Thread, child: Thread) -> None:
        pass

    def on_end(self, thread: Thread) -> None:
        pass

    def is_cut_off(self, thread: Thread) -> bool:
        return False


# A thread, what happened (a token, a child thread that starts, None: it ended), whether a token was drafted, and what
# proposed it.
Event = tuple[Thread, int | Thread | None, bool, str | None]


class EventLog:
    """A listener that stores events for another one to replay; it never ends a thread."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    @property
    def count(self) -> int:
        """Events since the last `take`."""
        return len(self._events)

    def on_token(self, thread: Thread, token: int, drafted: bool, source: str | None = None) -> bool:
        self._events.append((thread, token, drafted, source))
        return False

    def on_fork(self, parent: Thread, child: Thread) -> None:
        self._events.append((parent, child, False, None))

    def on_end(self, thread: Thread) -> None:
        self._events.append((thread, None, False, None))

    def is_cut_off(self, thread: Thread) -> bool:
        return False

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


def replay(events: Iterable[Event], listener: Listener) -> None:
    """Report stored events to a listener; it sees the threads in their current state."""
    for thread, what, drafted, source in events:
        if what is None:
            listener.on_end(thread)
        elif isinstance(what, int):
            listener.on_token(thread, what, drafted, source)
        else:
            listener.on_fork(thread, what)
