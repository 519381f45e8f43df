"""Text to continue: the body of a request, its prompts, and the answer, which may repeat and score them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.infill import InfillPrompt
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.text.transcript import Piece
from spaceport.serving.answers import ChoicesAnswer, logprobs_of, metrics_of, text_of, usage_of
from spaceport.serving.bodies import GenerationBody
from spaceport.serving.call import Call, finish_reason, generation_body
from spaceport.serving.failures import invalid, json_response

_MOST_PROMPTS = 64  # of one text request
_TEXT_TOKENS = 16  # of a text request that names no maximum, as in OpenAI's API
# What scoring a prompt adds to the statistics of its continuation.
_SUMS = ("rows", "padding_rows", "prompt_steps", "waiting_seconds", "engine_seconds", "outside_seconds", "seconds")


class TextBody(GenerationBody, kw_only=True):
    """A text request: one prompt or several."""

    prompt: str | list[int | str | list[int]]  # one text or list of token ids, or several of either
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def most_tokens(self) -> int | None:
        """Maximum number of generated tokens of a choice; 1 if only the prompt is asked for."""
        if self.max_tokens is None:
            return _TEXT_TOKENS
        return 1 if self.echo and self.max_tokens == 0 else self.max_tokens

    def top_tokens(self) -> int | None:
        return self.logprobs


def text_prompts(prompt: str | list[Any]) -> list[Prompt]:
    """The prompts of a text request: one text, one list of token ids, or several of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "is empty: expected a text or token ids")
    if len({type(item) for item in prompt}) > 1:
        raise invalid("prompt", "mixes texts and token ids: expected one kind")
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > _MOST_PROMPTS:
        raise invalid("prompt", f"has {len(prompt)} prompts: expected at most {_MOST_PROMPTS}")
    return list(prompt)


def with_suffix(prompts: list[Prompt], suffix: str) -> list[Prompt]:
    """Prompts for what stands between each text and this one."""
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid("suffix", "with token ids as prompt is not supported: expected a text")
    return [InfillPrompt(str(prompt), suffix) for prompt in prompts]


def text_logprobs(logprobs: Sequence[TokenLogprob], first: str | None = None) -> dict[str, Any]:
    """Log probabilities as a text answer has them; `first` is the first token of an echoed prompt, which has none."""
    texts = [*([] if first is None else [first]), *(token.text for token in logprobs)]
    unknown = [None] * (len(texts) - len(logprobs))
    return {
        "text_offset": [0, *accumulate(map(len, texts[:-1]))] if texts else [],
        "token_logprobs": [*unknown, *(token.logprob for token in logprobs)],
        "tokens": texts,
        "top_logprobs": [*unknown, *({top.text: top.logprob for top in token.top} for token in logprobs)],
    }


class TextAnswer(ChoicesAnswer):
    """An answer of the text endpoint."""

    prefix, whole_kind, event_kind = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "text": completion.text,
            "logprobs": text_logprobs(completion.logprobs) if self.has_logprobs else None,
            "finish_reason": finish_reason(completion.ending),
            "spaceport": self.report(completion),
        }

    def delta(self, index: int, pieces: Sequence[Piece], steps: dict[str, Any] | None) -> dict[str, Any] | None:
        text, extras = text_of(pieces), self.extras(pieces, steps)
        logprobs = logprobs_of(pieces) if self.has_logprobs else []
        if not (text or logprobs or extras):
            return None
        shown = text_logprobs(logprobs) if self.has_logprobs else None
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": None} | extras

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        reason = finish_reason(completion.ending)
        return {"index": index, "text": "", "finish_reason": reason, "spaceport": self.report(completion)}


def _together(scored: Statistics, generated: Statistics) -> Statistics:
    """The statistics of a prompt that was scored first and then continued."""
    sums = {name: getattr(scored, name) + getattr(generated, name) for name in _SUMS}
    return replace(generated, **sums, first_token_seconds=scored.seconds + generated.first_token_seconds)


def _is_greedy_token(decoding: Decoding) -> bool:
    """Whether one token is wanted that greedy decoding gives, which scoring the prompt has found already."""
    plain = decoding.sampling == Sampling() and decoding.grammar is None and not decoding.stops
    return decoding.max_tokens == 1 and plain


async def _echoed(runtime: Runtime, prompt: Prompt, decoding: Decoding, continued: bool) -> Completion:
    """A prompt with what is generated after it, as one text; its tokens have log probabilities, but the first one."""
    generated = Completion("", (), "length", Statistics())
    logprobs: tuple[TokenLogprob, ...] = ()
    if decoding.logprobs is None:
        tokens = tuple(await asyncio.to_thread(runtime.tokens_of, prompt))
        statistics, following = Statistics(prompt_tokens=len(tokens)), None
    else:
        salt = decoding.cache_salt
        score = await runtime.ascore(prompt, top=decoding.logprobs, tenant=decoding.tenant, cache_salt=salt)
        tokens, statistics, logprobs, following = score.tokens, score.statistics, score.logprobs, score.following
    if continued and following is not None and _is_greedy_token(decoding):
        statistics = replace(statistics, tokens=1, first_token_seconds=statistics.seconds)
        generated = replace(generated, text=following.text, logprobs=(following,))
    elif continued:
        generated = await runtime.agenerate(list(tokens), decoding)
        statistics = _together(statistics, generated.statistics)
    text = prompt if isinstance(prompt, str) else runtime.tokenizer.decode(tokens, skip_special_tokens=False)
    return replace(
        generated,
        text=text + generated.text,
        statistics=statistics,
        prompt_tokens=tokens,
        logprobs=(*logprobs, *generated.logprobs),
    )


async def _respond_with_prompts(call: Call, prompts: Sequence[Prompt]) -> Response:
    """The response with each prompt before its continuation; with `max_tokens` 0, without one."""
    answer, runtime, choices = TextAnswer(call), call.model.runtime, len(call.decodings)
    call.record.answer, call.record.prompts = answer.id, len(prompts)
    if call.model.audit is not None:
        await call.model.audit.give_way(1)
    echoes: list[Completion] = []

    async def echo_all() -> None:
        for prompt in prompts:
            for decoding in call.decodings:
                echo = await _echoed(runtime, prompt, decoding, call.body.max_tokens != 0)
                call.ended(len(echoes), echo.ending, echo.statistics)
                echoes.append(echo)

    call.service.begin(call.client.tenant, 1)  # one after the other
    try:
        await call.unless_gone(echo_all())
    finally:
        call.service.end(call.client.tenant)
    contents = []
    for index, echo in enumerate(echoes):
        first = runtime.tokenizer.decode(echo.prompt_tokens[:1], skip_special_tokens=False)
        logprobs = text_logprobs(echo.logprobs, first) if answer.has_logprobs else None
        reason = finish_reason(echo.ending)
        contents.append({"index": index, "text": echo.text, "logprobs": logprobs, "finish_reason": reason})
    statistics = [echo.statistics for echo in echoes]
    counts = {"usage": usage_of(statistics, choices), "metrics": metrics_of(statistics)}
    return json_response(answer.content(answer.whole_kind, *contents, **counts))


async def text(request: Request) -> Any:
    """Continue one text or several."""
    body = await generation_body(request, TextBody)
    for other in ("stream", "suffix"):
        if body.echo and getattr(body, other):
            raise invalid("echo", f"with {other} is not supported: leave one of them out")
    call, prompts = Call.of(request, body), text_prompts(body.prompt)
    if body.suffix:
        prompts = with_suffix(prompts, body.suffix)
    return await (_respond_with_prompts(call, prompts) if body.echo else TextAnswer(call).respond(prompts))
