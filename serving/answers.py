"""Completions as the answers of OpenAI's API: whole ones and what the events of a stream have."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

from tokenizers import Tokenizer

from spaceport.runtime.decode.sequence import Ending
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.text.transcript import Piece
from spaceport.runtime.tool_calls.parser import CallPart, MessagePart, other_format
from spaceport.runtime.trace import Trace
from spaceport.serving.bodies import ChatBody, TextBody
from spaceport.serving.request_inputs import NO_TOOLS, ToolUse
from spaceport.serving.service import ServedModel, log

_REASONS: dict[Ending, str] = {"end": "stop", "stop": "stop"}  # all others: "length"
MOST_STEPS = 2048  # of the trace in an answer


def finish_reason(ending: Ending, has_calls: bool = False) -> str:
    """Why an answer ended, in the words of OpenAI's API."""
    reason = _REASONS.get(ending, "length")
    return "tool_calls" if has_calls and reason == "stop" else reason


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


def counts_of(statistics: Sequence[Statistics], choices: int) -> dict[str, Any]:
    """The fields of an answer with its counts and times, of this number of choices for each prompt."""
    return {"usage": usage_of(statistics, choices), "metrics": metrics_of(statistics)}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities as a chat answer has them."""
    return {
        "content": [{**_logprob(token), "top_logprobs": [_logprob(top) for top in token.top]} for token in logprobs]
    }


def text_logprobs(logprobs: Sequence[TokenLogprob | None], first: str = "") -> dict[str, Any]:
    """Log probabilities as a text answer has them; `first` is the first token of an echoed prompt, which has none."""
    texts = [first if token is None else token.text for token in logprobs]
    return {
        "text_offset": [0, *accumulate(map(len, texts[:-1]))] if texts else [],
        "token_logprobs": [None if token is None else token.logprob for token in logprobs],
        "tokens": texts,
        "top_logprobs": [None if token is None else {top.text: top.logprob for top in token.top} for token in logprobs],
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


class MessageText:
    """The text of one choice, which comes in pieces, as the fields of OpenAI's messages and deltas."""

    def __init__(self, tools: ToolUse = NO_TOOLS) -> None:
        self._tools = tools
        self._parser = tools.parser()
        self._text = ""  # so far, if it may have calls

    @property
    def has_calls(self) -> bool:
        """Whether a call has been found."""
        return self._parser is not None and self._parser.calls > 0

    def parts(self, text: str) -> list[MessagePart]:
        """The parts of the message that a piece of text adds."""
        if self._parser is None:
            return [text] if text else []
        self._text += text
        return self._parser.push(text)

    def last_parts(self) -> list[MessagePart]:
        """The parts that the end of the text adds; calls in another format than the model's are logged."""
        if self._parser is None:
            return []
        parts, own = self._parser.finish(), self._tools.tool_format
        if not self._parser.calls or self._parser.has_other_format:
            names = [function.name for function in self._tools.functions]
            if (other := other_format(self._text, own, names)) is not None:
                found = "found" if self._parser.calls else "left as text"
                log.info(
                    "calls in the format %s are %s, the model's is %s: try --tool-format %s",
                    other,
                    found,
                    own.name,
                    other,
                )
        return parts

    def delta(self, parts: list[MessagePart]) -> dict[str, Any]:
        """Parts of the message as a delta; empty if there are none."""
        content = "".join(part for part in parts if isinstance(part, str))
        calls: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                continue
            if calls and calls[-1]["index"] == part.index:
                calls[-1]["function"]["arguments"] += part.arguments
            else:
                calls.append(self._call(part))
        return {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}

    def message(self, text: str) -> dict[str, Any]:
        """The message with this text."""
        delta = self.delta([*self.parts(text), *self.last_parts()])
        calls = [
            {name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())
        ]
        content = delta.get("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def _call(self, part: CallPart) -> dict[str, Any]:
        if part.name is None:
            return {"index": part.index, "function": {"arguments": part.arguments}}
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": part.index, "id": self._tools.call_id(), "type": "function", "function": function}


def _trace_report(trace: Trace, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a trace file, with the first steps only if there are more than `MOST_STEPS`."""
    record = trace.as_dict(tokenizer)
    left_out = len(record["steps"]) - MOST_STEPS
    return record if left_out <= 0 else record | {"steps": record["steps"][:MOST_STEPS], "steps_left_out": left_out}


@dataclass
class RequestAnswer:
    """What all objects of the answer to one request have in common."""

    model: ServedModel
    key: str  # id of the request
    body: ChatBody | TextBody
    tools: ToolUse = NO_TOOLS
    created: int = field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str]  # of the id

    @property
    def id(self) -> str:
        """The answer's id."""
        return f"{self.prefix}{self.key}"

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client asked for log probabilities; in a text request, 0 asks for those of the tokens alone."""
        return self.body.logprobs is not None and self.body.logprobs is not False

    def report(self, completion: Completion) -> dict[str, Any]:
        """What only this service reports: why a choice ended, the text of each thread of a forked one, its trace."""
        report: dict[str, Any] = {"ending": completion.ending, "seed": completion.seed}
        if len(completion.threads) > 1:
            report["threads"] = [
                {"path": list(thread.path), "text": thread.text, "ending": thread.ending, "tokens": len(thread.tokens)}
                for thread in completion.threads
            ]
        if completion.trace is not None:
            report["trace"] = _trace_report(completion.trace, self.model.runtime.tokenizer)
        return report


class ChoicesAnswer(RequestAnswer):
    """An answer with choices: those of the chat endpoint and of the text endpoint."""

    whole_kind: ClassVar[str]
    event_kind: ClassVar[str]

    def whole(self, choices: Sequence[dict[str, Any]], **counts: Any) -> dict[str, Any]:
        """The whole answer."""
        return {**self._head(self.whole_kind), "choices": list(choices), **counts}

    def event(self, *choices: dict[str, Any], **counts: Any) -> dict[str, Any]:
        """An event of the answer, if it is streamed."""
        return {**self._head(self.event_kind), "choices": list(choices), **counts}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice in the first event of a stream; None: it has no such event."""
        return None

    def rest(self, index: int) -> dict[str, Any] | None:
        """The choice in an event with text that was held back; None: there is none."""
        return None

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }

    def _extras(self, pieces: Sequence[Piece], steps: dict[str, Any] | None) -> dict[str, Any]:
        """What the client asked for of these pieces, besides text and log probabilities."""
        own = dict(steps or {})
        if self.body.spaceport.threads and (shown := [_shown(piece) for piece in pieces if piece.text]):
            own["pieces"] = shown
        return {"spaceport": own} if own else {}


@dataclass
class ChatAnswer(ChoicesAnswer):
    """An answer of the chat endpoint."""

    texts: dict[int, MessageText] = field(default_factory=dict)  # of each streamed choice

    prefix, whole_kind, event_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """A whole choice."""
        text = MessageText(self.tools)
        return {
            "index": index,
            "message": text.message(completion.text),
            "logprobs": chat_logprobs(completion.logprobs) if self.wants_logprobs else None,
            "finish_reason": finish_reason(completion.ending, text.has_calls),
            "spaceport": self.report(completion),
        }

    def opening(self, index: int) -> dict[str, Any]:
        """The choice in the first event of a stream."""
        self.texts[index] = MessageText(self.tools)
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def delta(self, index: int, pieces: Sequence[Piece], steps: dict[str, Any] | None) -> dict[str, Any] | None:
        """The choice in an event with what a step added, and the new steps of its trace; None if that is nothing yet."""
        text, extras = self.texts[index], self._extras(pieces, steps)
        delta = text.delta(text.parts(text_of(pieces)))
        logprobs = logprobs_of(pieces) if self.wants_logprobs else []
        if not (delta or logprobs or extras):
            return None
        choice: dict[str, Any] = {"index": index, "delta": delta or {"content": ""}, "finish_reason": None}
        if self.wants_logprobs:
            choice["logprobs"] = chat_logprobs(logprobs)
        return choice | extras

    def rest(self, index: int) -> dict[str, Any] | None:
        """The choice in an event with text that was held back; None: there is none."""
        text = self.texts[index]
        delta = text.delta(text.last_parts())
        return {"index": index, "delta": delta, "finish_reason": None} if delta else None

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice in its last event."""
        reason = finish_reason(completion.ending, self.texts[index].has_calls)
        return {"index": index, "delta": {}, "finish_reason": reason, "spaceport": self.report(completion)}


class TextAnswer(ChoicesAnswer):
    """An answer of the text endpoint."""

    prefix, whole_kind, event_kind = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """A whole choice."""
        return {
            "index": index,
            "text": completion.text,
            "logprobs": text_logprobs(completion.logprobs) if self.wants_logprobs else None,
            "finish_reason": finish_reason(completion.ending),
            "spaceport": self.report(completion),
        }

    def delta(self, index: int, pieces: Sequence[Piece], steps: dict[str, Any] | None) -> dict[str, Any] | None:
        """The choice in an event with what a step added, and the new steps of its trace; None if that is nothing yet."""
        text, extras = text_of(pieces), self._extras(pieces, steps)
        logprobs = logprobs_of(pieces) if self.wants_logprobs else []
        if not (text or logprobs or extras):
            return None
        shown = text_logprobs(logprobs) if self.wants_logprobs else None
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": None} | extras

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice in its last event."""
        reason = finish_reason(completion.ending)
        return {"index": index, "text": "", "finish_reason": reason, "spaceport": self.report(completion)}
