"""Exchange: one request of a client and what came back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spaceport.tools.bench.serve.workload import PlannedRequest

REFUSED = (429, 503)


@dataclass
class Exchange:
    """One request and its answer; times are seconds since the run began."""

    number: int
    prompt: int  # index of its prompt
    behaviour: str
    streamed: bool
    started: float = 0.0
    ended: float = 0.0
    status: int = 0  # HTTP status; 0: the connection failed
    text_times: list[float] = field(default_factory=list)  # when events with text came
    text: str = ""
    token_ids: list[int] | None = None  # None: the service reports none
    tokens: int | None = None  # None: the service reports none
    ending: str | None = None  # finish_reason; None: the answer is incomplete
    drafts: dict[str, Any] | None = None  # metrics.speculative_decoding
    error: str | None = None
    retry_after: float | None = None  # seconds, of a refused request

    @property
    def outcome(self) -> str:
        """answered, left, refused or failed."""
        if self.status in REFUSED:
            return "refused"
        if self.error is not None or self.status != 200:
            return "failed"
        if self.ending is not None:
            return "answered"
        return "left" if self.behaviour in ("cancel", "drop") else "failed"

    @property
    def token_count(self) -> int:
        """Tokens that came; events with text, if the service counts no tokens."""
        return len(self.text_times) if self.tokens is None else self.tokens

    @property
    def first_token_seconds(self) -> float | None:
        """Time to the first text of a stream."""
        return self.text_times[0] - self.started if self.streamed and self.text_times else None

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between the tokens of a complete stream."""
        if self.outcome != "answered" or not self.streamed or self.token_count < 2 or len(self.text_times) < 2:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.token_count - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with text."""
        return [later - earlier for earlier, later in zip(self.text_times, self.text_times[1:], strict=False)]


def exchange_of(request: PlannedRequest, started: float) -> Exchange:
    """The exchange of a request that is being sent."""
    return Exchange(request.number, request.prompt, request.behaviour, request.streamed, started)
