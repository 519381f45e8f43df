"""Completions as answers: whole ones, and what the events of a stream have."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tokenizers import Tokenizer

from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.text.transcript import Piece
from spaceport.runtime.trace import Trace
from spaceport.serving.bodies import StreamOptions
from spaceport.serving.call import Call
from spaceport.serving.event_stream import DONE, EventStream, event
from spaceport.serving.failures import json_response

MOST_STEPS = 2048  # of the trace in an answer


def usage_of(statistics: Sequence[Statistics], choices: int) -> dict[str, Any]:
    """Tokens of the prompts, each counted once for its choices, and of all choices."""
    prompts = statistics[::choices]
    prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
    completion_tokens = sum(choice.tokens for choice in statistics)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(prompt.cached_tokens for prompt in prompts)},
    }


def _by_step(choices: Sequence[Statistics]) -> dict[str, list[int]]:
    """Draft tokens of each decode step, as vLLM reports them: of one choice, with as many entries as steps."""
    if len(choices) != 1 or len(choices[0].drafted_by_step) != choices[0].steps:
        return {}
    return {"per_step_accepted": choices[0].accepted_by_step, "per_step_drafted": choices[0].drafted_by_step}


def _histogram(choices: Sequence[Statistics]) -> list[int]:
    """Steps by the number of draft tokens that they accepted, from none on."""
    if all(len(choice.accepted_by_step) == choice.steps for choice in choices):
        counts = Counter(accepted for choice in choices for accepted in choice.accepted_by_step)
        return [counts[accepted] for accepted in range(max(counts, default=0) + 1)]
    deepest = max(len(choice.accepted_by_depth) for choice in choices)
    reached = [sum(choice.steps for choice in choices)]  # steps that accepted at least this many tokens
    reached += [
        sum(choice.accepted_by_depth[depth] for choice in choices if depth < len(choice.accepted_by_depth))
        for depth in range(deepest)
    ]
    return [max(0, here - further) for here, further in zip(reached, [*reached[1:], 0], strict=True)]


def metrics_of(choices: Sequence[Statistics]) -> dict[str, Any]:
    """Drafts and times of a request: counts of all choices, times of the slowest."""
    steps = sum(choice.steps for choice in choices)
    drafted = sum(sum(choice.drafted_by_depth) for choice in choices)
    accepted = sum(sum(choice.accepted_by_depth) for choice in choices)
    tokens = sum(choice.tokens for choice in choices)
    first = max(choice.first_token_seconds for choice in choices)
    waiting = max(choice.waiting_seconds for choice in choices)
    seconds = max(choice.seconds for choice in choices)
    decoding = max(seconds - first, 0.0)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": _histogram(choices),
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            **_by_step(choices),
        },
        "time_to_first_token_ms": first * 1e3,
        "generation_time_ms": seconds * 1e3,
        "queue_time_ms": waiting * 1e3,
        "mean_itl_ms": decoding * 1e3 / max(1, tokens - 1),
        "tokens_per_second": tokens / (seconds - waiting) if seconds > waiting else 0.0,
    }


def text_of(pieces: Sequence[Piece]) -> str:
    """The text that pieces add, in reading order."""
    return "".join(piece.reading for piece in pieces)


def logprobs_of(pieces: Sequence[Piece]) -> list[TokenLogprob]:
    """The log probabilities of the tokens in pieces."""
    return [piece.logprob for piece in pieces if piece.logprob is not None]


def _shown(piece: Piece) -> dict[str, Any]:
    shown = {"path": list(piece.thread), "text": piece.text, "drafted": piece.drafted}
    return shown if piece.source is None else {**shown, "source": piece.source}


def _trace_report(trace: Trace, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a trace file, with the first steps only if there are more than `MOST_STEPS`."""
    record = trace.as_dict(tokenizer)
    left_out = len(record["steps"]) - MOST_STEPS
    return record if left_out <= 0 else record | {"steps": record["steps"][:MOST_STEPS], "steps_left_out": left_out}


@dataclass
class Answer(ABC):
    """The answer to a call, whole or as events."""

    call: Call
    created: int = field(default_factory=lambda: int(time.time()), init=False)

    prefix: ClassVar[str]  # of the id

    @abstractmethod
    async def whole(self) -> Any:
        """The whole answer."""

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""

    async def respond(self, prompts: Sequence[Prompt]) -> Any:
        call, options = self.call, self.call.service.options
        call.record.answer, call.record.prompts = self.id, len(prompts)
        await call.begin(prompts)
        if call.body.stream:
            return EventStream(self.events(), call.close, options.ping_interval, options.send_timeout)
        try:
            return json_response(await call.unless_gone(self.whole()))
        finally:
            call.close()

    @property
    def id(self) -> str:
        return f"{self.prefix}{self.call.record.id}"

    @property
    def has_logprobs(self) -> bool:
        """Whether the client asked for log probabilities."""
        return self.call.decodings[0].logprobs is not None

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts and of all choices so far."""
        return usage_of(self.call.statistics, len(self.call.decodings))

    @property
    def counts(self) -> dict[str, Any]:
        """The fields of the answer with its counts and times so far."""
        return {"usage": self.usage, "metrics": metrics_of(self.call.statistics)}

    def report(self, completion: Completion) -> dict[str, Any]:
        """What only this service reports: why a choice ended, the text of each thread of a forked one, its trace."""
        report: dict[str, Any] = {"ending": completion.ending, "seed": completion.seed}
        if len(completion.threads) > 1:
            report["threads"] = [
                {"path": list(thread.path), "text": thread.text, "ending": thread.ending, "tokens": len(thread.tokens)}
                for thread in completion.threads
            ]
        if completion.trace is not None:
            report["trace"] = _trace_report(completion.trace, self.call.model.runtime.tokenizer)
        return report


class ChoicesAnswer(Answer):
    """An answer with choices: those of the chat endpoint and of the text endpoint."""

    whole_kind: ClassVar[str]
    event_kind: ClassVar[str]

    @abstractmethod
    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def delta(self, index: int, pieces: Sequence[Piece], steps: dict[str, Any] | None) -> dict[str, Any] | None:
        """The choice in an event with what a step added, and the new steps of its trace; None if that is nothing yet."""

    @abstractmethod
    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice in its last event."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice in the first event of a stream; None: it has no such event."""
        return None

    def rest(self, index: int) -> dict[str, Any] | None:
        """The choice in an event with text that was held back; None: there is none."""
        return None

    async def whole(self) -> dict[str, Any]:
        choices = [self.choice(index, completion) for index, completion in enumerate(await self.call.whole())]
        return self.content(self.whole_kind, *choices, **self.counts)

    def content(self, kind: str, *choices: dict[str, Any], **counts: Any) -> dict[str, Any]:
        """An answer of one of the two kinds, or an event."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.call.model.name,
            "system_fingerprint": self.call.model.fingerprint,
            "choices": choices,
            **counts,
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream; those that come at the same time are sent together, so that a client wakes up once."""
        call, options = self.call, self.call.body.stream_options or StreamOptions()
        opened: set[int] = set()
        unsent: list[bytes] = []

        def add(choice: dict[str, Any] | None, **counts: Any) -> None:
            if choice is not None:
                unsent.append(event(self.content(self.event_kind, choice, **counts)))

        async for index, pieces in call.pieces():
            if index not in opened:
                opened.add(index)
                add(self.opening(index))
            choice = self.delta(index, pieces, call.new_steps(index)) if pieces else self.rest(index)
            add(choice, **({"usage": self.usage} if options.continuous_usage_stats else {}))
            if not pieces:
                add(self.ending(index, call.completions[index]))
            if unsent and len(call.completions) < len(call.streams):
                yield b"".join(unsent)
                unsent.clear()
        if options.include_usage:
            unsent.append(event(self.content(self.event_kind, **self.counts)))
        yield b"".join([*unsent, DONE])

    def extras(self, pieces: Sequence[Piece], steps: dict[str, Any] | None) -> dict[str, Any]:
        """What the client asked for of these pieces, besides text and log probabilities."""
        own = dict(steps or {})
        if self.call.body.spaceport.threads and (shown := [_shown(piece) for piece in pieces if piece.text]):
            own["pieces"] = shown
        return {"spaceport": own} if own else {}
