"""Completions as the answers of OpenAI's API: whole ones and what the events of a stream have."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tokenizers import Tokenizer

from spaceport.runtime.decode.sequence import Ending
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.text.transcript import Piece
from spaceport.runtime.tool_calls.parser import CallPart, MessagePart
from spaceport.runtime.trace.trace import Trace
from spaceport.tools.serve.bodies import ChatBody, TextBody
from spaceport.tools.serve.request_inputs import NO_TOOLS, ToolUse
from spaceport.tools.serve.service import ServedModel

_REASONS: dict[Ending, str] = {"end": "stop", "stop": "stop"}  # all others: "length"
MOST_STEPS = 2048  # of the trace in an answer


def finish_reason(ending: Ending, has_calls: bool = False) -> str:
    """Why an answer ended, in the words of OpenAI's API."""
    reason = _REASONS.get(ending, "length")
    return "tool_calls" if has_calls and reason == "stop" else reason


def usage_of(prompts: Sequence[Statistics], found: Sequence[Statistics]) -> dict[str, Any]:
    """Tokens of the prompts, each counted once, and of all choices."""
    prompt_tokens = sum(one.prompt_tokens for one in prompts)
    written = sum(one.tokens for one in found)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
    }


def metrics_of(found: Sequence[Statistics]) -> dict[str, Any]:
    """Drafts and times of a request: counts of all choices, times of the slowest."""
    steps = sum(one.steps for one in found)
    drafted = sum(sum(one.drafted_by_depth) for one in found)
    accepted = sum(sum(one.accepted_by_depth) for one in found)
    tokens = sum(one.tokens for one in found)
    first = max(one.first_token_seconds for one in found)
    waiting = max(one.waiting_seconds for one in found)
    seconds = max(one.seconds for one in found)
    decoding = max(seconds - first, 0.0)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": _histogram(found),
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            **_by_step(found),
        },
        "time_to_first_token_ms": first * 1e3,
        "generation_time_ms": seconds * 1e3,
        "queue_time_ms": waiting * 1e3,
        "mean_itl_ms": decoding * 1e3 / max(1, tokens - 1),
        "tokens_per_second": tokens / (seconds - waiting) if seconds > waiting else 0.0,
    }


def timings_of(found: Sequence[Statistics]) -> dict[str, Any]:
    """The same in the words of llama.cpp."""
    whole = metrics_of(found)
    drafts, tokens = whole["speculative_decoding"], sum(one.tokens for one in found)
    prompt = max(whole["time_to_first_token_ms"] - whole["queue_time_ms"], 0.0)
    written = max(whole["generation_time_ms"] - whole["time_to_first_token_ms"], 0.0)
    return {
        "prompt_n": max(one.prompt_tokens for one in found),
        "prompt_ms": prompt,
        "predicted_n": tokens,
        "predicted_ms": written,
        "predicted_per_second": tokens / written * 1e3 if written else 0.0,
        "draft_n": drafts["num_draft_tokens"],
        "draft_n_accepted": drafts["num_accepted_draft_tokens"],
    }


def chat_logprobs(found: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities as a chat answer has them."""
    return {"content": [{**_one(each), "top_logprobs": [_one(top) for top in each.top]} for each in found]}


def text_logprobs(found: Sequence[TokenLogprob | None], texts: Sequence[str], start: int = 0) -> dict[str, Any]:
    """Log probabilities as a text answer has them; None for the first token of an echoed prompt."""
    offsets, at = [], start
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if each is None else each.logprob for each in found],
        "tokens": list(texts),
        "top_logprobs": [None if each is None else {top.text: top.logprob for top in each.top} for each in found],
    }


def own_report(completion: Completion) -> dict[str, Any]:
    """What only this service reports about a choice: why it ended, and the text of each thread of a forked one."""
    report: dict[str, Any] = {"ending": completion.ending, "seed": completion.seed}
    if len(completion.threads) > 1:
        report["threads"] = [
            {"path": list(one.path), "text": one.text, "ending": one.ending, "tokens": len(one.tokens)}
            for one in completion.threads
        ]
    return report


def _one(each: TokenLogprob) -> dict[str, Any]:
    return {"token": each.text, "logprob": each.logprob, "bytes": list(each.bytes)}


def _by_step(found: Sequence[Statistics]) -> dict[str, list[int]]:
    """Draft tokens of each decode step, as vLLM reports them: of one choice, with as many entries as steps."""
    if len(found) != 1 or len(found[0].drafted_by_step) != found[0].steps:
        return {}
    return {"per_step_accepted": found[0].accepted_by_step, "per_step_drafted": found[0].drafted_by_step}


def _histogram(found: Sequence[Statistics]) -> list[int]:
    """Steps by the number of draft tokens that they accepted, from none on."""
    if all(len(one.accepted_by_step) == one.steps for one in found):
        counts = Counter(accepted for one in found for accepted in one.accepted_by_step)
        return [counts[accepted] for accepted in range(max(counts, default=0) + 1)]
    deepest = max(len(one.accepted_by_depth) for one in found)
    reached = [sum(one.steps for one in found)]  # steps that accepted at least this many tokens
    reached += [
        sum(one.accepted_by_depth[depth] for one in found if depth < len(one.accepted_by_depth))
        for depth in range(deepest)
    ]
    return [max(0, here - further) for here, further in zip(reached, [*reached[1:], 0], strict=True)]


def trace_report(trace: Trace, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a trace file, with the first steps only if there are more than `MOST_STEPS`."""
    record = trace.as_dict(tokenizer)
    left_out = len(record["steps"]) - MOST_STEPS
    return record if left_out <= 0 else record | {"steps": record["steps"][:MOST_STEPS], "steps_left_out": left_out}


class MessageText:
    """The text of one choice, which comes in pieces, as the fields of OpenAI's messages and deltas."""

    def __init__(self, tools: ToolUse = NO_TOOLS) -> None:
        self._tools = tools
        self._parser = tools.parser()

    @property
    def has_calls(self) -> bool:
        """Whether a call has been found."""
        return self._parser is not None and self._parser.calls > 0

    def parts(self, text: str) -> list[MessagePart]:
        """The parts of the message that a piece of text adds."""
        if self._parser is None:
            return [text] if text else []
        return self._parser.push(text)

    def last_parts(self) -> list[MessagePart]:
        """The parts that the end of the text adds."""
        return [] if self._parser is None else self._parser.finish()

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
        found = self.delta([*self.parts(text), *self.last_parts()])
        calls = [{name: value for name, value in one.items() if name != "index"} for one in found.get("tool_calls", ())]
        content = found.get("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def _call(self, part: CallPart) -> dict[str, Any]:
        if part.name is None:
            return {"index": part.index, "function": {"arguments": part.arguments}}
        function = {"name": part.name, "arguments": part.arguments}
        return {"index": part.index, "id": self._tools.call_id(), "type": "function", "function": function}


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


@dataclass
class Shape:
    """What all objects of one answer have in common."""

    model: ServedModel
    key: str  # id of the request
    created: int = field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str]  # of the answer's id
    whole: ClassVar[str]  # kind of a whole answer
    part: ClassVar[str]  # kind of an event

    @property
    def id(self) -> str:
        """The answer's id."""
        return f"{self.prefix}-{self.key}"

    def answer(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole answer."""
        return {**self._head(self.whole), "choices": list(choices), **more}

    def event(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An event of a streamed answer."""
        return {**self._head(self.part), "choices": list(choices), **more}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }

    def _report(self, completion: Completion) -> dict[str, Any]:
        """What only this service reports about a choice."""
        report = own_report(completion)
        if completion.trace is not None:
            report["trace"] = trace_report(completion.trace, self.model.runtime.tokenizer)
        return report


@dataclass
class ChatShape(Shape):
    """Answers of the chat endpoint."""

    tools: ToolUse = NO_TOOLS
    texts: dict[int, MessageText] = field(default_factory=dict)  # of each streamed choice

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, completion: Completion, logprobs: bool) -> dict[str, Any]:
        """A whole choice."""
        text = MessageText(self.tools)
        return {
            "index": index,
            "message": text.message(completion.text),
            "logprobs": chat_logprobs(completion.logprobs) if logprobs else None,
            "finish_reason": finish_reason(completion.ending, text.has_calls),
            "spaceport": self._report(completion),
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The choice in the first event of a stream."""
        self.texts[index] = MessageText(self.tools)
        return [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]

    def delta(self, index: int, progress: Progress) -> list[dict[str, Any]]:
        """The choice in an event with what a step added; empty if that is nothing yet."""
        text = self.texts[index]
        delta = text.delta(text.parts(progress.text))
        if not delta and not progress.logprobs and not progress.extras:
            return []
        choice: dict[str, Any] = {"index": index, "delta": delta or {"content": ""}, "finish_reason": None}
        if progress.logprobs is not None:
            choice["logprobs"] = chat_logprobs(progress.logprobs)
        return [choice | progress.extras]

    def rest(self, index: int) -> list[dict[str, Any]]:
        """The choice in an event with text that was held back; empty if there is none."""
        text = self.texts[index]
        delta = text.delta(text.last_parts())
        return [{"index": index, "delta": delta, "finish_reason": None}] if delta else []

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice in its last event."""
        return {
            "index": index,
            "delta": {},
            "finish_reason": finish_reason(completion.ending, self.texts[index].has_calls),
            "spaceport": self._report(completion),
        }


class TextShape(Shape):
    """Answers of the text endpoint."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, completion: Completion, logprobs: bool) -> dict[str, Any]:
        """A whole choice."""
        found = completion.logprobs
        return {
            "index": index,
            "text": completion.text,
            "logprobs": text_logprobs(found, [each.text for each in found]) if logprobs else None,
            "finish_reason": finish_reason(completion.ending),
            "spaceport": self._report(completion),
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The choice in the first event of a stream: a text answer has no such event."""
        return []

    def delta(self, index: int, progress: Progress) -> list[dict[str, Any]]:
        """The choice in an event with what a step added; empty if that is nothing yet."""
        if progress.is_empty:
            return []
        found = progress.logprobs
        logprobs = None if found is None else text_logprobs(found, [each.text for each in found])
        choice = {"index": index, "text": progress.text, "logprobs": logprobs, "finish_reason": None}
        return [choice | progress.extras]

    def rest(self, index: int) -> list[dict[str, Any]]:
        """The choice in an event with text that was held back: a text answer holds none back."""
        return []

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """A choice in its last event."""
        reason = finish_reason(completion.ending)
        return {"index": index, "text": "", "finish_reason": reason, "spaceport": self._report(completion)}
