"""Echoes: text answers that begin with their prompt, with its log probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from spaceport.runtime.decode.sequence import Ending
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.serve.answers import finish_reason, metrics_of, text_logprobs, timings_of, usage_of
from spaceport.tools.serve.bodies import TextBody
from spaceport.tools.serve.options import ServiceOptions
from spaceport.tools.serve.request_inputs import decodings_of
from spaceport.tools.serve.shapes import TextShape


@dataclass(frozen=True)
class _Echo:
    """A prompt with what was generated after it."""

    text: str
    tokens: list[int]  # of the prompt
    written: list[int]  # generated tokens
    logprobs: list[TokenLogprob | None] | None  # of the prompt's tokens and of the generated ones
    texts: list[str]  # of these tokens
    statistics: Statistics
    ending: Ending = "length"


# Called for each choice with its ending and statistics, and whether it is the first one of its prompt.
OnEcho = Callable[[Ending, Statistics, bool], None]


async def echoed(
    runtime: Runtime, body: TextBody, prompts: list[Prompt], options: ServiceOptions, shape: TextShape, on_end: OnEcho
) -> dict[str, Any]:
    """An answer whose choices begin with their prompts; with `max_tokens` 0, nothing else."""
    nothing = body.max_tokens == 0
    asked = msgspec.structs.replace(body, max_tokens=1) if nothing else body
    defaults = runtime.bundle.manifest.generation_config
    decodings = decodings_of(asked, defaults, options.request_timeout, options.most_choices)
    found = []
    for prompt in prompts:
        for decoding in decodings:
            found.append(await _echo(runtime, prompt, decoding, nothing))
            on_end(found[-1].ending, found[-1].statistics, decoding is decodings[0])
    choices = [
        {
            "index": index,
            "text": one.text,
            "logprobs": None if one.logprobs is None else text_logprobs(one.logprobs, one.texts),
            "finish_reason": finish_reason(one.ending),
            **({"prompt_token_ids": one.tokens, "token_ids": one.written} if body.return_token_ids else {}),
        }
        for index, one in enumerate(found)
    ]
    statistics = [one.statistics for one in found]
    return shape.answer(
        choices,
        usage=usage_of(statistics[:: len(decodings)], statistics),
        metrics=metrics_of(statistics),
        timings=timings_of(statistics),
    )


async def _echo(runtime: Runtime, prompt: Prompt, decoding: Decoding, nothing: bool) -> _Echo:
    decode = runtime.tokenizer.decode
    if decoding.logprobs is None:
        tokens = await asyncio.to_thread(runtime.tokens_of, prompt)
        scored = Statistics(prompt_tokens=len(tokens))
        logprobs, texts, following = None, [], None
    else:
        score = await runtime.ascore(prompt, top=decoding.logprobs)
        tokens, following, scored = list(score.tokens), score.following, score.statistics
        logprobs = [None, *score.logprobs]
        texts = [decode(tokens[:1], skip_special_tokens=False), *(one.text for one in score.logprobs)]
    text = prompt if isinstance(prompt, str) else decode(tokens, skip_special_tokens=False)
    if nothing:
        return _Echo(text, tokens, [], logprobs, texts, scored)
    if logprobs is not None and following is not None and _is_greedy_token(decoding):
        logprobs, texts = [*logprobs, following], [*texts, following.text]
        statistics = replace(scored, tokens=1, first_token_seconds=scored.seconds)
        return _Echo(text + following.text, tokens, [following.token], logprobs, texts, statistics)
    completion = await runtime.agenerate(tokens, decoding)
    if logprobs is not None:
        logprobs, texts = [*logprobs, *completion.logprobs], [*texts, *(one.text for one in completion.logprobs)]
    statistics, written = _together(scored, completion.statistics), list(completion.tokens)
    return _Echo(text + completion.text, tokens, written, logprobs, texts, statistics, completion.ending)


def _together(scored: Statistics, generated: Statistics) -> Statistics:
    """The statistics of a prompt that was scored first and then continued."""
    return replace(
        generated,
        rows=scored.rows + generated.rows,
        padding_rows=scored.padding_rows + generated.padding_rows,
        prompt_steps=scored.prompt_steps + generated.prompt_steps,
        waiting_seconds=scored.waiting_seconds + generated.waiting_seconds,
        engine_seconds=scored.engine_seconds + generated.engine_seconds,
        outside_seconds=scored.outside_seconds + generated.outside_seconds,
        first_token_seconds=scored.seconds + generated.first_token_seconds,
        seconds=scored.seconds + generated.seconds,
    )


def _is_greedy_token(decoding: Decoding) -> bool:
    """Whether one token is wanted that greedy decoding gives, which scoring the prompt has found already."""
    plain = decoding.sampling == Sampling() and decoding.grammar is None and not decoding.stops
    return decoding.max_tokens == 1 and plain
