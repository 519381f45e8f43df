"""Progress: what one step added to a streamed choice, and what its events report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.text.transcript import Piece
from spaceport.tools.serve.bodies import ChatBody, TextBody


@dataclass(frozen=True)
class Progress:
    """What one step added to a choice."""

    text: str  # in reading order
    logprobs: list[TokenLogprob] | None = None  # None: not asked for
    extras: dict[str, Any] = field(default_factory=dict)  # further fields of the choice

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that an event could report."""
        return not (self.text or self.logprobs or self.extras)


@dataclass(frozen=True)
class Reported:
    """What the events of a stream report besides its text."""

    usage: bool = False  # at the end
    usage_so_far: bool = False  # in each event
    logprobs: bool = False
    token_ids: bool = False
    pieces: bool = False  # the text of each thread, as soon as it is generated
    steps: bool = False  # what each step did

    def progress(self, pieces: Sequence[Piece], steps: dict[str, Any] | None = None) -> Progress:
        """What these pieces of one step added; `steps` has the steps that are new in a trace."""
        extras: dict[str, Any] = {}
        if self.token_ids and (tokens := [piece.token for piece in pieces if piece.token is not None]):
            extras["token_ids"] = tokens
        own = dict(steps or {})
        if self.pieces and (shown := [_shown(piece) for piece in pieces if piece.text]):
            own["pieces"] = shown
        if own:
            extras["spaceport"] = own
        found = [piece.logprob for piece in pieces if piece.logprob is not None] if self.logprobs else None
        return Progress("".join(piece.reading for piece in pieces), found, extras)


def reported_to(body: ChatBody | TextBody) -> Reported:
    """What the client of a request asked for."""
    options = body.stream_options
    return Reported(
        usage=options is not None and options.include_usage,
        usage_so_far=options is not None and options.continuous_usage_stats,
        logprobs=body.logprobs is not None and body.logprobs is not False,
        token_ids=bool(body.return_token_ids),
        pieces=body.spaceport.threads,
        steps=body.spaceport.trace,
    )


def _shown(piece: Piece) -> dict[str, Any]:
    shown = {"path": list(piece.thread), "text": piece.text, "drafted": piece.drafted}
    return shown if piece.source is None else {**shown, "source": piece.source}
