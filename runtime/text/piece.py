"""Piece: what a reader gets of a text while it is written, and of each thread when it is finished."""

from __future__ import annotations

from dataclasses import dataclass

from spaceport.runtime.decode.threads import Ending
from spaceport.runtime.sampling.logprobs import TokenLogprob

Path = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """What one token added to a text."""

    text: str  # of its own thread; may be empty: half a character, or what may become a stop string, is held back
    token: int | None  # none: what was held back is let out, and no token with it
    drafted: bool  # an accepted candidate, and not the network's own next prediction
    thread: Path = ()
    reading: str = ""  # how much longer the text is now that can be read from its beginning on without a gap
    logprob: TokenLogprob | None = None  # of the token, if that was asked for; a piece that only ends a text has none


@dataclass(frozen=True)
class ThreadText:
    """The finished text of one thread."""

    path: Path
    fork: int | None  # which of its parent's tokens is the [Fork] that it hangs from; nothing: it is the spine
    text: str
    tokens: tuple[int, ...]  # its own, with each [Fork], without an end token
    ending: Ending
    logprobs: tuple[TokenLogprob, ...] = ()  # of each of the tokens, if that was asked for
