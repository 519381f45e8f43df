"""The two endpoints that generate, for chat messages and for text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.sequence import Ending
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.serving.answers import ChatAnswer, RequestAnswer, TextAnswer, counts_of, finish_reason, text_logprobs
from spaceport.serving.bodies import Body, ChatBody, TextBody
from spaceport.serving.clients import Client, client_of
from spaceport.serving.failures import RETRY, Failure, json_response
from spaceport.serving.generations import EventStream, Generations, events_of, left
from spaceport.serving.request_inputs import chat_prompt, decodings_of, text_prompts, tool_use_of
from spaceport.serving.request_log import RequestRecord, record_of
from spaceport.serving.service import ServedModel, Service, read_body, service_of

_Result = TypeVar("_Result")


async def request_body(request: Request, kind: type[Body]) -> Body:
    """The body of a request that generates; raises while the service takes none."""
    service = service_of(request)
    if service.draining:
        service.metrics.refused("stopping")
        raise Failure(503, "the service is stopping: send the request again", "overloaded_error", headers=RETRY)
    service.require_open()
    return await read_body(request, kind)


def requested_model(request: Request, name: str | None) -> ServedModel:
    """The model that a request asks for."""
    model = service_of(request).model(name)
    record_of(request).model = model.name
    return model


def _ended(
    service: Service,
    record: RequestRecord,
    client: Client,
    model: ServedModel,
    decodings: Sequence[Decoding],
    index: int,
    completion: Completion | None,
    statistics: Statistics,
) -> None:
    """Count a choice that has ended, and let it be audited."""
    choice = index % len(decodings)  # of its prompt
    reason = "abort" if completion is None else finish_reason(completion.ending)
    service.metrics.ended(model.name, reason, statistics, choice == 0, client.key)
    service.end(client.tenant)
    record.ended("cancelled" if completion is None else completion.ending, statistics)
    if completion is not None and model.audit is not None:
        model.audit.offer(decodings[choice], completion)


async def started(request: Request, answer: RequestAnswer, prompts: Sequence[Prompt]) -> Generations:
    """The running completions of a request."""
    service, record, model, tools = service_of(request), record_of(request), answer.model, answer.tools
    client = client_of(request)
    decodings = [client.applied_to(decoding) for decoding in decodings_of(answer.body, model, service.options, tools)]
    if model.audit is not None:
        decodings = [model.audit.applied_to(decoding) for decoding in decodings]
        await model.audit.give_way(len(prompts) * len(decodings))
    record.answer, record.prompts = answer.id, len(prompts)
    on_end = partial(_ended, service, record, client, model, decodings)
    running = Generations(model.runtime, prompts, decodings, on_end)
    service.begin(client.tenant, len(prompts) * len(decodings))
    try:
        await running.submit()
    except BaseException as error:
        service.end(client.tenant, len(prompts) * len(decodings))
        if not isinstance(error, OptionFault):
            raise
        if tools.grammar is not None and str(error).startswith(tools.grammar.label):
            raise Failure(400, str(error), param="tools") from error
        raise
    return running


async def _unless_gone(request: Request, work: Awaitable[_Result]) -> _Result:
    """The result of work that is cancelled when the client leaves."""
    gone, task = asyncio.create_task(left(request.receive)), asyncio.ensure_future(work)
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


async def completed(request: Request, running: Generations) -> list[Completion]:
    """All completions of a request, once they have ended; they are cancelled if the client leaves."""
    try:
        return await _unless_gone(request, running.whole())
    finally:
        running.close()


async def _answer(request: Request, answer: ChatAnswer | TextAnswer, prompts: Sequence[Prompt]) -> Any:
    """The answer to a request, whole or streamed."""
    running = await started(request, answer, prompts)
    if answer.body.stream:
        options = service_of(request).options
        return EventStream(events_of(running, answer), running.close, options.ping_interval, options.send_timeout)
    completions = await completed(request, running)
    choices = [answer.choice(index, completion) for index, completion in enumerate(completions)]
    return json_response(answer.whole(choices, **running.counts))


@dataclass(frozen=True)
class _Echo:
    """A prompt with what was generated after it."""

    text: str
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]  # generated ones
    logprobs: Sequence[TokenLogprob | None] | None  # of all these tokens; the first one has none
    statistics: Statistics
    ending: Ending = "length"


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


async def _echo_choice(runtime: Runtime, prompt: Prompt, decoding: Decoding, continued: bool) -> _Echo:
    tokens: Sequence[int]
    if decoding.logprobs is None:
        tokens = await asyncio.to_thread(runtime.tokens_of, prompt)
        scored, logprobs, following = Statistics(prompt_tokens=len(tokens)), None, None
    else:
        score = await runtime.ascore(
            prompt, top=decoding.logprobs, tenant=decoding.tenant, cache_salt=decoding.cache_salt
        )
        tokens, scored, logprobs, following = score.tokens, score.statistics, [None, *score.logprobs], score.following
    text = prompt if isinstance(prompt, str) else runtime.tokenizer.decode(tokens, skip_special_tokens=False)
    if not continued:
        return _Echo(text, tokens, [], logprobs, scored)
    if logprobs is not None and following is not None and _is_greedy_token(decoding):
        statistics = replace(scored, tokens=1, first_token_seconds=scored.seconds)
        return _Echo(text + following.text, tokens, [following.token], [*logprobs, following], statistics)
    completion = await runtime.agenerate(list(tokens), decoding)
    if logprobs is not None:
        logprobs += completion.logprobs
    statistics = _together(scored, completion.statistics)
    return _Echo(text + completion.text, tokens, completion.tokens, logprobs, statistics, completion.ending)


async def _echo(request: Request, answer: TextAnswer, body: TextBody, prompts: Sequence[Prompt]) -> Response:
    """The answer to a text request that wants its prompts back; with `max_tokens` 0, nothing else."""
    service, record, model, client = service_of(request), record_of(request), answer.model, client_of(request)
    record.answer, record.prompts = answer.id, len(prompts)
    if model.audit is not None:
        await model.audit.give_way(1)
    continued = body.max_tokens != 0
    asked = body if continued else structs.replace(body, max_tokens=1)
    decodings = [client.applied_to(decoding) for decoding in decodings_of(asked, model, service.options)]

    async def echo_all() -> list[_Echo]:
        echoes = []
        for prompt in prompts:
            for decoding in decodings:
                echo = await _echo_choice(model.runtime, prompt, decoding, continued)
                first, reason = decoding is decodings[0], finish_reason(echo.ending)
                service.metrics.ended(model.name, reason, echo.statistics, first, client.key)
                record.ended(echo.ending, echo.statistics)
                echoes.append(echo)
        return echoes

    service.begin(client.tenant, 1)  # one after the other
    try:
        echoes = await _unless_gone(request, echo_all())
    finally:
        service.end(client.tenant)
    decode = partial(model.runtime.tokenizer.decode, skip_special_tokens=False)
    choices = [
        {
            "index": index,
            "text": echo.text,
            "logprobs": None
            if echo.logprobs is None
            else text_logprobs(echo.logprobs, first=decode(echo.prompt_tokens[:1])),
            "finish_reason": finish_reason(echo.ending),
        }
        for index, echo in enumerate(echoes)
    ]
    statistics = [echo.statistics for echo in echoes]
    return json_response(answer.whole(choices, **counts_of(statistics, len(decodings))))


async def chat(request: Request) -> Any:
    """Answer chat messages."""
    body = await request_body(request, ChatBody)
    model = requested_model(request, body.model)
    tools = tool_use_of(body, model, service_of(request).options)
    prompt = await chat_prompt(body, tools, model)
    return await _answer(request, ChatAnswer(model, record_of(request).id, body, tools), [prompt])


async def text(request: Request) -> Any:
    """Continue one text or several."""
    body = await request_body(request, TextBody)
    model = requested_model(request, body.model)
    if body.suffix:
        raise Failure(400, "suffix is not supported: the models continue a text only", param="suffix")
    answer = TextAnswer(model, record_of(request).id, body)
    prompts = text_prompts(body.prompt)
    if not body.echo:
        return await _answer(request, answer, prompts)
    if body.stream:
        raise Failure(400, "echo with stream is not supported: leave one of them out", param="echo")
    return await _echo(request, answer, body, prompts)
