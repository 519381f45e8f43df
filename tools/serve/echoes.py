"""Echoes: text answers that begin with their prompt, with its log probabilities."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.serve.answers import finish_reason, text_logprobs
from spaceport.tools.serve.bodies import TextBody
from spaceport.tools.serve.decoding_options import decodings_of
from spaceport.tools.serve.options import ServiceOptions
from spaceport.tools.serve.shapes import TextShape


@dataclass(frozen=True)
class _Echo:
    """A prompt with what was generated after it."""

    text: str
    tokens: list[int]  # of the prompt
    written: list[int]  # generated tokens
    generated: int  # their number, the end token included
    logprobs: list[TokenLogprob | None] | None  # of the prompt's tokens and of the generated ones
    texts: list[str]  # of these tokens
    reason: str


async def echoed(
    runtime: Runtime, body: TextBody, prompts: list[Prompt], options: ServiceOptions, shape: TextShape
) -> dict[str, Any]:
    """An answer whose choices begin with their prompts; with `max_tokens` 0, nothing else."""
    nothing = body.max_tokens == 0
    asked = msgspec.structs.replace(body, max_tokens=1) if nothing else body
    defaults = runtime.bundle.manifest.generation_config
    decodings = decodings_of(asked, defaults, options.request_timeout, options.most_choices)
    found = [await _echo(runtime, prompt, one, nothing) for prompt in prompts for one in decodings]
    choices = [
        {
            "index": index,
            "text": one.text,
            "logprobs": None if one.logprobs is None else text_logprobs(one.logprobs, one.texts),
            "finish_reason": one.reason,
            **({"prompt_token_ids": one.tokens, "token_ids": one.written} if body.return_token_ids else {}),
        }
        for index, one in enumerate(found)
    ]
    read = sum(len(one.tokens) for one in found[:: len(decodings)])
    written = sum(one.generated for one in found)
    return shape.answer(
        choices, usage={"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    )


async def _echo(runtime: Runtime, prompt: Prompt, decoding: Decoding, nothing: bool) -> _Echo:
    decode = runtime.tokenizer.decode
    if decoding.logprobs is None:
        tokens = await asyncio.to_thread(runtime.tokens_of, prompt)
        logprobs, texts, following = None, [], None
    else:
        score = await runtime.ascore(prompt, top=decoding.logprobs)
        tokens, following = list(score.tokens), score.following
        logprobs = [None, *score.logprobs]
        texts = [decode(tokens[:1], skip_special_tokens=False), *(one.text for one in score.logprobs)]
    text = prompt if isinstance(prompt, str) else decode(tokens, skip_special_tokens=False)
    if nothing:
        return _Echo(text, tokens, [], 0, logprobs, texts, "length")
    if logprobs is not None and following is not None and _is_greedy_token(decoding):
        logprobs, texts = [*logprobs, following], [*texts, following.text]
        return _Echo(text + following.text, tokens, [following.token], 1, logprobs, texts, "length")
    completion = await runtime.agenerate(tokens, decoding)
    if logprobs is not None:
        logprobs, texts = [*logprobs, *completion.logprobs], [*texts, *(one.text for one in completion.logprobs)]
    count, reason = completion.statistics.tokens, finish_reason(completion.ending)
    return _Echo(text + completion.text, tokens, list(completion.tokens), count, logprobs, texts, reason)


def _is_greedy_token(decoding: Decoding) -> bool:
    """Whether one token is wanted that greedy decoding gives, which scoring the prompt has found already."""
    plain = decoding.sampling == Sampling() and decoding.grammar is None and not decoding.stops
    return decoding.max_tokens == 1 and plain
