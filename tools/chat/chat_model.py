"""Chat model: what a conversation needs of a model, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spaceport.tools.terminal.lanes import Span


@dataclass(frozen=True)
class AnswerOptions:
    """Options of all answers; None: as the model's publisher or the service suggests."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    drafts: bool = True
    fork: bool = False


@dataclass(frozen=True)
class AnswerStatistics:
    """Counts and times of one answer; None: a service does not report it."""

    tokens: int
    prompt_tokens: int
    cached_tokens: int
    steps: int | None
    first_token_seconds: float | None
    seconds: float  # from the first step to the last one
    ending: str

    def line(self) -> str:
        """The statistics in one line."""
        found = [f"{self.tokens} tokens"]
        if self.seconds > 0:
            found.append(f"{self.tokens / self.seconds:.1f} tokens/s")
        if self.steps:
            found.append(f"{self.tokens / self.steps:.2f} tokens per step")
        found.append(f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached")
        if self.first_token_seconds is not None:
            found.append(f"first token after {self.first_token_seconds:.2f} s")
        if self.ending not in ("end", "stop"):
            found.append(f"ending: {self.ending}")
        return ", ".join(found)


class ChatModel(Protocol):
    """A model that answers chat messages."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def statistics(self) -> AnswerStatistics | None:
        """Those of the last answer; None if it did not end or its service reports none."""

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Span]:
        """The answer while it is generated; closing the iterator ends it."""

    def close(self) -> None:
        """Release what the model holds."""
