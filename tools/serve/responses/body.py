"""Body: the JSON body of a request to the Responses API, and what of it is refused."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from spaceport.tools.serve.bodies import GenerationBody
from spaceport.tools.serve.failures import Failure
from spaceport.tools.serve.request_inputs import check_least

_STORED = ("previous_response_id", "conversation", "prompt")  # they name what an earlier request has stored
_ADVICE = "the service stores nothing: send all messages as input"


class TextFormat(Struct):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None  # ignored


class ResponsesStreamOptions(Struct):
    """What a stream reports."""

    include_obfuscation: bool | None = None  # ignored: no event is padded


class ResponsesBody(GenerationBody, kw_only=True):
    """A request to the Responses API."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    stream_options: ResponsesStreamOptions | None = None  # type: ignore[assignment]
    # Ignored: they ask for what this service does not have.
    store: bool | None = None
    truncation: str | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None


def check_fields(body: ResponsesBody) -> None:
    """Raise for fields that need stored responses, and for reports that only the other endpoints have."""
    for name in _STORED:
        if getattr(body, name) is not None:
            raise Failure(400, f"{name} is not supported: {_ADVICE}", param=name)
    if body.background:
        raise Failure(400, f"background is not supported: {_ADVICE}, or a stream", param="background")
    for name, given in (("return_token_ids", body.return_token_ids), ("spaceport.threads", body.spaceport.threads)):
        if given:
            raise Failure(400, f"{name} is not supported here: expected a request for /v1/chat/completions", param=name)
    for name in ("max_tokens", "max_output_tokens"):
        if (given := getattr(body, name)) is not None:
            check_least(name, given)
    if body.n not in (None, 1):
        raise Failure(400, f"n is {body.n}: expected 1, a response has one output", param="n")
