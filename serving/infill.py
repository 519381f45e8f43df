"""The gap at an editor's cursor: the body of a request and the answer, as llama.cpp's server has them."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.text.infill import InfillPrompt
from spaceport.serving.answers import Answer, text_of
from spaceport.serving.bodies import GenerationBody, check_count
from spaceport.serving.call import Call, generation_body
from spaceport.serving.event_stream import event
from spaceport.serving.failures import invalid

_STOP_TYPES = {"end": "eos", "stop": "word"}  # by the ending of a completion; all others: "limit"
# Samplers in the order in which they run, with their options.
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_SAMPLERS = {"penalties": _PENALTIES, **{name: (name,) for name in ("temperature", "top_k", "top_p", "min_p")}}


class InfillFile(Struct):
    """Another file, or a part of it."""

    text: str
    filename: str = "file"


class InfillBody(GenerationBody, kw_only=True):
    """A request for the text of a gap."""

    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] = msgspec.field(default_factory=list)
    prompt: str = ""
    n_predict: int | None = None
    n_cmpl: int | None = None
    n_indent: int = 0
    t_max_predict_ms: float = 0
    response_fields: list[str] | None = None
    samplers: list[str] | None = None

    def most_tokens(self) -> int | None:
        """Maximum number of generated tokens of a choice; 1 if the prompt shall only be read."""
        if self.n_predict is None:
            return self.max_tokens
        return None if self.n_predict == -1 else max(1, self.n_predict)

    def gap(self) -> InfillPrompt:
        files = tuple((file.filename, file.text) for file in self.input_extra)
        return InfillPrompt(self.input_prefix + self.prompt, self.input_suffix, files)


def _check(body: InfillBody) -> None:
    """Raise for values that the endpoint does not take."""
    for name, least in (("n_predict", -1), ("n_indent", 0), ("t_max_predict_ms", 0)):
        value = getattr(body, name)
        if value is not None and value < least:
            raise invalid(name, f"is {value}: expected at least {least}")
    for name in ("input_extra", "response_fields", "samplers"):
        check_count(name, getattr(body, name) or ())
    if body.samplers is not None:
        _check_samplers(body, [name for name in body.samplers if name != "infill"])


def _check_samplers(body: InfillBody, names: list[str]) -> None:
    """Raise for samplers that do not run here, or in another order, and for options of samplers that are left out."""

    def is_given(option: str) -> bool:
        value = getattr(body, option)
        return bool(value) and not (option == "repetition_penalty" and value == 1)  # which changes nothing

    expected = [name for name, options in _SAMPLERS.items() if name in names or any(map(is_given, options))]
    if names != expected:
        found, right = (", ".join(some) or "none" for some in (names, expected))
        raise invalid("samplers", f"names {found:.100}: expected {right}, which run for this request in this order")


@dataclass
class GapText:
    """The text of a gap as it grows, to a line with less indentation or to the end of the line after a time."""

    indent: int = 0  # characters that each line but the first one needs
    seconds: float = math.inf  # from the first token on
    text: str = ""
    ending: Literal["stop", "time"] | None = None  # why it ended, indentation or time; None: it has not
    _began: float | None = field(default=None, init=False)
    _line: int = field(default=0, init=False)  # where the last line begins

    def add(self, text: str) -> bool:
        """Add text up to where the gap ends, and return whether it has ended."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        self.text += text
        while self.ending is None:
            end = self.text.find("\n", self._line)
            line = self.text[self._line : end if end >= 0 else None]
            bare = line.lstrip(" \t")
            if self._line and len(line) - len(bare) < self.indent and (bare or end >= 0):
                self.text, self.ending = self.text[: self._line - 1], "stop"
            elif end < 0:
                break
            elif now - self._began >= self.seconds:
                self.text, self.ending = self.text[:end], "time"
            else:
                self._line = end + 1
        return self.ending is not None

    @property
    def settled(self) -> str:
        """The text without a line whose indentation is not known yet: it may not belong to the gap."""
        is_open = self.ending is None and self._line > 0 and len(self.text) - self._line < self.indent
        return self.text[: self._line - 1] if is_open else self.text


def _limited(decoding: Decoding, completion: Completion) -> tuple[Decoding, Completion]:
    """A completion that was cut off, as one whose maximum number of tokens is what it has, with its options."""
    count, threads = len(completion.tokens), [replace(thread, ending="length") for thread in completion.threads]
    limited = replace(decoding, max_tokens=count, min_tokens=min(decoding.min_tokens, count))
    return limited, replace(completion, ending="length", threads=tuple(threads))


def _rates(count: int, seconds: float, name: str) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / max(1, count),
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


def _answer(call: Call, index: int, gap: GapText, text: str) -> dict[str, Any]:
    """The whole answer of a choice, with this text."""
    completion = call.completions[index]
    counts = completion.statistics
    prefill = max(0.0, counts.first_token_seconds - counts.waiting_seconds)
    return {
        "index": index,
        "content": text,
        "model": call.model.name,
        "stop": True,
        "stop_type": "limit" if gap.ending else _STOP_TYPES.get(completion.ending, "limit"),
        "has_new_line": "\n" in gap.text,
        "truncated": False,
        "tokens_evaluated": counts.prompt_tokens,
        "tokens_predicted": counts.tokens,
        "tokens_cached": counts.prompt_tokens + counts.tokens,
        "generation_settings": {"n_ctx": call.model.runtime.max_seq_len},
        "timings": {
            "cache_n": counts.cached_tokens,
            **_rates(counts.prompt_tokens - counts.cached_tokens, prefill, "prompt"),
            **_rates(counts.tokens, max(0.0, counts.seconds - counts.first_token_seconds), "predicted"),
            "draft_n": sum(counts.drafted_by_depth),
            "draft_n_accepted": sum(counts.accepted_by_depth),
        },
    }


def selected(answer: Mapping[str, Any], fields: list[str] | None) -> Mapping[str, Any]:
    """The entries of an answer by their paths, such as `timings/predicted_ms`; all without fields."""
    if fields is None:
        return answer
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found


@dataclass
class InfillAnswer(Answer):
    """The gaps of a call, one for each choice."""

    body: InfillBody

    prefix = "infill-"

    def __post_init__(self) -> None:
        seconds = self.body.t_max_predict_ms / 1e3 or math.inf
        self._gaps = [GapText(self.body.n_indent, seconds) for _ in self.call.decodings]

    async def _parts(self) -> AsyncGenerator[tuple[int, bool], None]:
        """The index of a gap that has grown, and whether it is complete; none is decoded beyond its end."""
        call = self.call
        async for index, pieces in call.pieces():
            gap = self._gaps[index]
            if not pieces:
                self._note_ending(index)
            elif self.body.n_predict != 0 and gap.ending is None and gap.add(text_of(pieces)):
                call.streams[index].close()
            yield index, not pieces

    def _note_ending(self, index: int) -> None:
        """Note for the log and the audit why a gap ended, if not as its completion did."""
        call, gap, completion = self.call, self._gaps[index], self.call.completions[index]
        if gap.ending is None:
            return
        call.endings[index] = gap.ending
        if completion.ending == "cancelled" and len(completion.threads) == 1:
            call.decodings[index], call.completions[index] = _limited(call.decodings[index], completion)

    async def whole(self) -> Any:
        """The answer of the only choice, or a list of all."""
        async for _ in self._parts():
            pass
        choices = [self._choice(index, gap.text) for index, gap in enumerate(self._gaps)]
        return choices[0] if len(choices) == 1 else choices

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream: what the text of a gap grows by, and at its end the whole answer without the text."""
        sent = [0] * len(self._gaps)
        async for index, is_complete in self._parts():
            gap, statistics = self._gaps[index], self.call.streams[index].statistics
            text = (gap.text if is_complete else gap.settled)[sent[index] :]
            sent[index] += len(text)
            if text:
                counts = {"tokens_predicted": statistics.tokens, "tokens_evaluated": statistics.prompt_tokens}
                yield event({"index": index, "content": text, "stop": False, **counts})
            if is_complete:
                yield event(self._choice(index, ""))

    def _choice(self, index: int, text: str) -> Mapping[str, Any]:
        return selected(_answer(self.call, index, self._gaps[index], text), self.body.response_fields)


async def infill(request: Request) -> Any:
    """Fill the gap at an editor's cursor, as llama.cpp's server does."""
    body = await generation_body(request, InfillBody)
    _check(body)
    body.n = body.n if body.n_cmpl is None else body.n_cmpl
    call = Call.of(request, body)
    if body.temperature is None:  # one choice is the most probable text
        first = call.decodings[0]
        call.decodings[0] = replace(first, sampling=replace(first.sampling, temperature=0.0))
    return await InfillAnswer(call, body).respond([body.gap()])
