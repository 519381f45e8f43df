"""The gap at an editor's cursor: the body of a request and the answer, as llama.cpp's server has them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.text.infill import InfillPrompt
from spaceport.serving.answers import text_of
from spaceport.serving.bodies import GenerationBody, check_count
from spaceport.serving.call import Call, generation_body
from spaceport.serving.failures import invalid, json_response

_STOP_TYPES = {"end": "eos", "stop": "word"}  # by the ending of a completion; all others: "limit"


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

    def most_tokens(self) -> int | None:
        """Maximum number of generated tokens of a choice; 1 if the prompt shall only be read."""
        if self.n_predict is None:
            return self.max_tokens
        return None if self.n_predict == -1 else max(1, self.n_predict)

    def gap(self) -> InfillPrompt:
        """The prompt of the request."""
        files = tuple((file.filename, file.text) for file in self.input_extra)
        return InfillPrompt(self.input_prefix + self.prompt, self.input_suffix, files)


def _check(body: InfillBody) -> None:
    """Raise for values that the endpoint does not take."""
    for name, least in (("n_predict", -1), ("n_indent", 0), ("t_max_predict_ms", 0)):
        value = getattr(body, name)
        if value is not None and value < least:
            raise invalid(name, f"is {value}: expected at least {least}")
    for name in ("input_extra", "response_fields"):
        check_count(name, getattr(body, name) or ())
    if body.stream:
        raise invalid("stream", "is true: expected false, since the text of a gap comes as a whole")


@dataclass
class GapText:
    """The text of a gap as it grows, to a line with less indentation or to the end of the line after a time."""

    indent: int = 0  # characters that each line but the first one needs
    seconds: float = math.inf  # from the first token on
    text: str = ""
    ended: bool = False
    _began: float | None = field(default=None, init=False)
    _line: int = field(default=0, init=False)  # where the last line begins

    def add(self, text: str) -> bool:
        """Add text up to where the gap ends, and return whether it has ended."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        self.text += text
        while not self.ended:
            end = self.text.find("\n", self._line)
            line = self.text[self._line : end if end >= 0 else None]
            bare = line.lstrip(" \t")
            if self._line and len(line) - len(bare) < self.indent and (bare or end >= 0):
                self.text, self.ended = self.text[: self._line - 1], True
            elif end < 0:
                break
            elif now - self._began >= self.seconds:
                self.text, self.ended = self.text[:end], True
            else:
                self._line = end + 1
        return self.ended


async def _filled(call: Call, body: InfillBody, index: int) -> str:
    """The text of a choice; it is not decoded beyond its end."""
    gap, stream = GapText(body.n_indent, body.t_max_predict_ms / 1e3 or math.inf), call.streams[index]
    while pieces := await stream.pieces():
        if not gap.ended and gap.add(text_of(pieces)):
            stream.request.end("deadline")
    call.completions[index] = await stream.completion()
    return "" if body.n_predict == 0 else gap.text


def _rates(count: int, seconds: float, name: str) -> dict[str, Any]:
    """Time and speed of the tokens of a phase."""
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / max(1, count),
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


def _answer(call: Call, index: int, text: str, completion: Completion) -> dict[str, Any]:
    """The whole answer of a choice."""
    counts = completion.statistics
    prefill = max(0.0, counts.first_token_seconds - counts.waiting_seconds)
    return {
        "index": index,
        "content": text,
        "model": call.model.name,
        "stop": True,
        "stop_type": _STOP_TYPES.get(completion.ending, "limit"),
        "has_new_line": "\n" in text,
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


async def infill(request: Request) -> Response:
    """Fill the gap at an editor's cursor, as llama.cpp's server does."""
    body = await generation_body(request, InfillBody)
    _check(body)
    body.n = body.n if body.n_cmpl is None else body.n_cmpl
    call = Call.of(request, body)
    if body.temperature is None:  # one choice is the most probable text
        first, *others = call.decodings
        call.decodings = [replace(first, sampling=replace(first.sampling, temperature=0.0)), *others]
    call.record.answer, call.record.prompts = f"infill-{call.record.id}", 1
    await call.begin([body.gap()])
    try:
        texts = await call.unless_gone(asyncio.gather(*(_filled(call, body, i) for i in range(len(call.streams)))))
    finally:
        call.close()
    answers = [
        selected(_answer(call, i, text, call.completions[i]), body.response_fields) for i, text in enumerate(texts)
    ]
    return json_response(answers[0] if len(answers) == 1 else answers)
