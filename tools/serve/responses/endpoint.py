"""Endpoint: answers requests to the Responses API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from spaceport.tools.serve.completions import completed, request_body, requested_model, started
from spaceport.tools.serve.event_stream import EventStream
from spaceport.tools.serve.failures import json_response
from spaceport.tools.serve.progress import reported_to
from spaceport.tools.serve.request_inputs import chat_prompt, tool_use_of
from spaceport.tools.serve.request_log import record_of
from spaceport.tools.serve.responses.body import ResponsesBody, check_fields
from spaceport.tools.serve.responses.chat import chat_body
from spaceport.tools.serve.responses.response import Response, events_of, whole_response
from spaceport.tools.serve.service import service_of


async def responses(request: Request) -> Any:
    """Answer the input of a request to the Responses API."""
    options = service_of(request).options
    body = await request_body(request, ResponsesBody)
    check_fields(body)
    model = requested_model(request, body.model)
    chat = chat_body(body)
    tools = tool_use_of(chat, model, options)
    prompt = await chat_prompt(chat, tools, model)
    response = Response(model, record_of(request).rename(body.request_id), body, tools, reported_to(chat))
    running = await started(request, model, chat, [prompt], response.id, tools)
    if body.stream:
        return EventStream(events_of(response, running), running.close, options.ping_interval, options.send_timeout)
    (completion,) = await completed(request, running)
    return json_response(whole_response(response, running, completion))
