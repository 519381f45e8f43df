"""Completions: the two endpoints that generate, for chat messages and for text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.text.chat_prompt import ChatPrompt
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.serve.answers import finish_reason, metrics_of, timings_of
from spaceport.tools.serve.bodies import ChatBody, StreamOptions, TextBody, body_of
from spaceport.tools.serve.decoding_options import decodings_of
from spaceport.tools.serve.echoes import echoed
from spaceport.tools.serve.event_stream import EventStream
from spaceport.tools.serve.failures import RETRY, Failure
from spaceport.tools.serve.generations import Generations, Wanted, events_of, usage
from spaceport.tools.serve.request_record import RequestRecord, record_of
from spaceport.tools.serve.served_models import ServedModel
from spaceport.tools.serve.service import Service, log, read_body, service_of
from spaceport.tools.serve.shapes import ChatShape, TextShape

_Result = TypeVar("_Result")
_MOST_PROMPTS = 64  # of one text request


async def chat(request: Request) -> Any:
    """Answer chat messages."""
    service = service_of(request)
    body = await _body(request, service, ChatBody)
    model = _model(request, service, body.model)
    if not body.messages:
        raise Failure(400, "messages is empty: expected at least one message", param="messages")
    shape = ChatShape(model.name, model.fingerprint, record_of(request).rename(body.request_id))
    return await _answer(request, service, model, body, [_chat_prompt(body)], shape)


async def text(request: Request) -> Any:
    """Continue one text or several."""
    service = service_of(request)
    body = await _body(request, service, TextBody)
    model = _model(request, service, body.model)
    if body.suffix:
        raise Failure(400, "suffix is not supported: the models continue a text only", param="suffix")
    shape = TextShape(model.name, model.fingerprint, record_of(request).rename(body.request_id))
    prompts = _prompts(body.prompt)
    if body.echo:
        if body.stream:
            raise Failure(400, "echo with stream is not supported: leave one of them out", param="echo")
        answer = await unless_gone(request, echoed(model.runtime, body, prompts, service.options, shape))
        return json_response(answer)
    return await _answer(request, service, model, body, prompts, shape)


def _model(request: Request, service: Service, name: str | None) -> ServedModel:
    """The model that a request asks for."""
    model = service.models.find(name)
    record_of(request).model = model.name
    return model


async def _body(request: Request, service: Service, kind: type[Any]) -> Any:
    if service.draining:
        service.metrics.refused("stopping")
        raise Failure(503, "the service is stopping: send the request again", "overloaded_error", headers=RETRY)
    if service.opening:
        raise Failure(503, "the models are being opened: send the request again", "overloaded_error", headers=RETRY)
    body, unknown = body_of(kind, await read_body(request, service.options.most_bytes), service.options.strict)
    if unknown:
        log.debug("ignored fields: %s", ", ".join(ascii(name[:64]) for name in unknown[:20]))
    return body


def _chat_prompt(body: ChatBody) -> ChatPrompt:
    """The messages of a chat request with what the chat template renders besides them."""
    if body.tool_choice not in (None, "auto", "none"):
        raise Failure(400, "tool_choice is supported as auto and none only", param="tool_choice")
    for message in body.messages:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict) or part.get("type") != "text":
                raise Failure(400, "a message has a part that is not text: the models read text only", param="messages")
    return ChatPrompt(
        body.messages,
        tools=() if body.tool_choice == "none" else body.tools or (),
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )


def _prompts(given: str | list[Any]) -> list[Prompt]:
    """The prompts of a text request: one text, one list of token ids, or several of either."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise Failure(400, "prompt is empty: expected a text or token ids", param="prompt")
    if len({type(one) for one in given}) > 1:
        raise Failure(400, "prompt mixes texts and token ids: expected one kind", param="prompt")
    if isinstance(given[0], int):
        return [given]
    if len(given) > _MOST_PROMPTS:
        raise Failure(400, f"prompt has {len(given)} prompts: expected at most {_MOST_PROMPTS}", param="prompt")
    return list(given)


async def _answer(
    request: Request,
    service: Service,
    model: ServedModel,
    body: ChatBody | TextBody,
    prompts: list[Prompt],
    shape: ChatShape | TextShape,
) -> Any:
    """The answer to a request, whole or streamed."""
    defaults = model.runtime.bundle.manifest.generation_config
    decodings = decodings_of(body, defaults, service.options.request_timeout, service.options.most_choices)
    audit = service.audits.get(model.name)
    if audit is not None:
        decodings = tuple(audit.applied_to(one) for one in decodings)
        await audit.give_way(len(prompts) * len(decodings))
    wanted = [Wanted(prompt, decoding) for prompt in prompts for decoding in decodings]
    record = record_of(request)
    record.answer, record.stream, record.prompts, record.decoding = (
        shape.id,
        bool(body.stream),
        len(prompts),
        decodings[0],
    )
    running = Generations(model.runtime, wanted, partial(_ended, service, record, model.name))
    await running.submit()
    if body.stream:
        events = events_of(running, shape, body.stream_options or StreamOptions(), len(prompts))
        return EventStream(events, running.close, service.options.ping_interval, service.options.send_timeout)
    try:
        found = await unless_gone(request, running.whole())
    finally:
        running.close()
    shown = wanted[0].decoding.logprobs is not None
    choices = [shape.choice(index, one, shown) for index, one in enumerate(found)]
    if body.return_token_ids:
        for choice, one in zip(choices, found, strict=True):
            choice["token_ids"] = list(one.tokens)
    statistics = running.statistics
    answer = shape.answer(
        choices,
        usage=usage(running, len(prompts)),
        metrics=metrics_of(statistics),
        timings=timings_of(statistics),
    )
    return json_response(answer)


def _ended(
    service: Service,
    record: RequestRecord,
    name: str,
    wanted: Wanted,
    found: Completion | None,
    statistics: Statistics,
) -> None:
    """Count a choice that has ended, and let it be audited."""
    service.metrics.ended(name, "abort" if found is None else finish_reason(found.ending), statistics)
    record.ended("cancelled" if found is None else found.ending, statistics)
    if found is not None and name in service.audits:
        service.audits[name].offer(wanted.decoding, found)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


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
