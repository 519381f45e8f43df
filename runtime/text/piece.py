"""Piece: what one token adds to a completion, and the text of each thread when it is finished."""

from __future__ import annotations

from dataclasses import dataclass

from spaceport.runtime.decode.draft import Source
from spaceport.runtime.decode.threads import Ending
from spaceport.runtime.sampling.logprobs import TokenLogprob

Path = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """What one token adds to a completion.

    - `text`: New text of the token's own thread; may be empty, since part of a character or of a possible stop string is
      held back.
    - `token`: Token id; None for a piece that only releases text that was held back.
    - `drafted`: Whether the token is an accepted draft token.
    - `thread`: Path of the thread; () is the root thread, (0, 1) the second child of its first child.
    - `reading`: Text that can now be appended to the text shown so far, if threads are shown in reading order.
    - `source`: What proposed an accepted draft token: "mask" (mask slots), "lookup" (prompt lookup) or "both"; None for
      other tokens.
    - `logprob`: Log probability of the token; None unless `Decoding.logprobs` was set.
    """

    text: str
    token: int | None
    drafted: bool
    thread: Path = ()
    reading: str = ""
    logprob: TokenLogprob | None = None
    source: Source | None = None


@dataclass(frozen=True)
class ThreadText:
    """The finished text of one thread.

    - `path`: Path of the thread; () is the root thread, (0, 1) the second child of its first child.
    - `fork`: Index of the `[Fork]` token in the parent's `tokens` that started this thread; None for the root thread.
    - `text`: Text of this thread alone.
    - `tokens`: Token ids of this thread alone, each `[Fork]` included, the end token not.
    - `ending`: Why the thread ended.
    - `logprobs`: Log probability of each of `tokens`; empty unless `Decoding.logprobs` was set.
    """

    path: Path
    fork: int | None
    text: str
    tokens: tuple[int, ...]
    ending: Ending
    logprobs: tuple[TokenLogprob, ...] = ()
