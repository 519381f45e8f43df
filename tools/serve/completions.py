"""The two endpoints that generate, for chat messages and for text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.sequence import Ending
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.serve.answers import (
    ChatShape,
    TextShape,
    finish_reason,
    metrics_of,
    reported_to,
    text_logprobs,
    timings_of,
    usage_of,
)
from spaceport.tools.serve.bodies import ChatBody, TextBody, body_of
from spaceport.tools.serve.failures import RETRY, Failure, json_response
from spaceport.tools.serve.generations import EventStream, Generations, events_of, usage
from spaceport.tools.serve.options import ServiceOptions
from spaceport.tools.serve.request_inputs import NO_TOOLS, ToolUse, chat_prompt, decodings_of, text_prompts, tool_use_of
from spaceport.tools.serve.request_log import RequestRecord, record_of
from spaceport.tools.serve.service import ServedModel, Service, log, read_body, service_of

_Result = TypeVar("_Result")


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
            found.append(await _echo_choice(runtime, prompt, decoding, nothing))
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


async def _echo_choice(runtime: Runtime, prompt: Prompt, decoding: Decoding, nothing: bool) -> _Echo:
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


async def chat(request: Request) -> Any:
    """Answer chat messages."""
    service = service_of(request)
    body = await request_body(request, ChatBody)
    model = requested_model(request, body.model)
    tools = tool_use_of(body, model, service.options)
    prompt = await chat_prompt(body, tools, model)
    shape = ChatShape(model, record_of(request).rename(body.request_id), tools=tools)
    return await _answer(request, model, body, [prompt], shape)


async def text(request: Request) -> Any:
    """Continue one text or several."""
    body = await request_body(request, TextBody)
    model = requested_model(request, body.model)
    if body.suffix:
        raise Failure(400, "suffix is not supported: the models continue a text only", param="suffix")
    shape = TextShape(model, record_of(request).rename(body.request_id))
    prompts = text_prompts(body.prompt)
    if body.echo:
        if body.stream:
            raise Failure(400, "echo with stream is not supported: leave one of them out", param="echo")
        record_of(request).answer = shape.id
        return await _echo(request, model, body, prompts, shape)
    return await _answer(request, model, body, prompts, shape)


async def _echo(
    request: Request, model: ServedModel, body: TextBody, prompts: list[Prompt], shape: TextShape
) -> Response:
    """The answer to a text request that wants its prompts back."""
    service, record = service_of(request), record_of(request)
    record.answer, record.prompts = shape.id, len(prompts)
    if (audit := service.audits.get(model.name)) is not None:
        await audit.give_way(1)

    def on_end(ending: Ending, statistics: Statistics, first: bool) -> None:
        service.metrics.ended(model.name, finish_reason(ending), statistics, first)
        record.ended(ending, statistics)

    answer = echoed(model.runtime, body, prompts, service.options, shape, on_end)
    return json_response(await unless_gone(request, answer))


def requested_model(request: Request, name: str | None) -> ServedModel:
    """The model that a request asks for."""
    model = service_of(request).models.find(name)
    record_of(request).model = model.name
    return model


async def request_body(request: Request, kind: type[Any]) -> Any:
    """The body of a request that generates; raises while the service takes none."""
    service = service_of(request)
    if service.draining:
        service.metrics.refused("stopping")
        raise Failure(503, "the service is stopping: send the request again", "overloaded_error", headers=RETRY)
    if service.opening:
        raise Failure(503, "the models are being opened: send the request again", "overloaded_error", headers=RETRY)
    body, unknown = body_of(kind, await read_body(request, service.options.most_bytes), service.options.strict)
    if unknown:
        log.debug("ignored fields: %s", ", ".join(ascii(name[:64]) for name in unknown[:20]))
    return body


async def _answer(
    request: Request,
    model: ServedModel,
    body: ChatBody | TextBody,
    prompts: list[Prompt],
    shape: ChatShape | TextShape,
) -> Any:
    """The answer to a request, whole or streamed."""
    options = service_of(request).options
    running = await started(request, model, body, prompts, shape.id, getattr(shape, "tools", NO_TOOLS))
    reported = reported_to(body)
    if body.stream:
        events = events_of(running, shape, reported)
        return EventStream(events, running.close, options.ping_interval, options.send_timeout)
    found = await completed(request, running)
    choices = [shape.choice(index, one, reported.logprobs) for index, one in enumerate(found)]
    if reported.token_ids:
        for choice, one in zip(choices, found, strict=True):
            choice["prompt_token_ids"], choice["token_ids"] = list(one.prompt_tokens), list(one.tokens)
    statistics = running.statistics
    answer = shape.answer(
        choices,
        usage=usage(running),
        metrics=metrics_of(statistics),
        timings=timings_of(statistics),
    )
    return json_response(answer)


async def started(
    request: Request,
    model: ServedModel,
    body: ChatBody | TextBody,
    prompts: list[Prompt],
    answer: str,
    tools: ToolUse = NO_TOOLS,
) -> Generations:
    """The running completions of a request, whose answer has this id."""
    service, record = service_of(request), record_of(request)
    defaults = model.runtime.bundle.manifest.generation_config
    decodings = decodings_of(body, defaults, service.options.request_timeout, service.options.most_choices, tools)
    if (audit := service.audits.get(model.name)) is not None:
        decodings = tuple(audit.applied_to(one) for one in decodings)
        await audit.give_way(len(prompts) * len(decodings))
    record.answer, record.stream = answer, bool(body.stream)
    record.prompts, record.decoding = len(prompts), decodings[0]
    running = Generations(model.runtime, prompts, decodings, partial(_ended, service, record, model.name, decodings))
    try:
        await running.submit()
    except OptionFault as error:
        if tools.grammar is not None and str(error).startswith(tools.grammar.label):
            raise Failure(400, str(error), param="tools") from error
        raise
    return running


async def completed(request: Request, running: Generations) -> list[Completion]:
    """All completions of a request, once they have ended; they are cancelled if the client leaves."""
    try:
        return await unless_gone(request, running.whole())
    finally:
        running.close()


def _ended(
    service: Service,
    record: RequestRecord,
    name: str,
    decodings: Sequence[Decoding],
    index: int,
    found: Completion | None,
    statistics: Statistics,
) -> None:
    """Count a choice that has ended, and let it be audited."""
    choice = index % len(decodings)  # of its prompt
    service.metrics.ended(name, "abort" if found is None else finish_reason(found.ending), statistics, choice == 0)
    record.ended("cancelled" if found is None else found.ending, statistics)
    if found is not None and name in service.audits:
        service.audits[name].offer(decodings[choice], found)


async def unless_gone(request: Request, work: Awaitable[_Result]) -> _Result:
    """The result of work that is cancelled when the client leaves."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone, task = asyncio.create_task(left()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Failure(499, "the client has left")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
