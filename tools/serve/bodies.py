"""Bodies: the JSON bodies of requests, with the types of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Struct

from spaceport.tools.serve.failures import Failure
from spaceport.tools.serve.fields import IGNORED, REFUSED

_Body = TypeVar("_Body", bound="Struct")
_MOST_NAMED = 5  # unknown fields in an error message


class StreamOptions(Struct):
    """What a stream reports besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SchemaFormat(Struct):
    """A JSON schema that the answer conforms to."""

    schema: dict[str, Any] = {}
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: SchemaFormat | None = None


class StructuredOutputs(Struct):
    """Grammar of the answer, as vLLM spells it; one of the fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Own(Struct):
    """Options that only this service has: how fast a request is decoded and what is reported; see docs/service.md."""

    mask_slots: int | None = None
    draft_rows: int | None = None
    lookup: int | None = None
    fork: bool = False
    max_threads: int | None = None
    max_depth: int | None = None
    threads: bool = False  # whether events have the text of each thread as soon as it is generated
    trace: bool = False  # whether the answer has what each step did


class GenerationBody(Struct, kw_only=True):
    """Fields that chat requests and text requests share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    disable_spec_decode: bool | None = None
    request_id: str | None = None
    spaceport: Own = msgspec.field(default_factory=Own)


class ChatBody(GenerationBody, kw_only=True):
    """A chat request."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TextBody(GenerationBody, kw_only=True):
    """A text request: one prompt or several."""

    prompt: str | list[int | str | list[int]]  # one text or list of token ids, or several of either
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class TokenizeBody(Struct, kw_only=True):
    """A text or messages to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True  # false: the tokens of the text alone, and texts of special tokens are these


class DetokenizeBody(Struct, kw_only=True):
    """Token ids to turn into text."""

    tokens: list[int]
    model: str | None = None


@cache  # takes a millisecond
def _types(kind: type[Struct]) -> dict[str, Any]:
    """The types of the entries that objects of this kind have."""
    return {one.encode_name: one.type for one in msgspec.structs.fields(kind)}


def _unknown(content: dict[str, Any], kind: type[Struct], path: str = "") -> Iterator[str]:
    """The paths of entries that objects of this kind do not have, such as `spaceport.depth`."""
    known = _types(kind)
    for name, value in content.items():
        if name not in known:
            yield f"{path}{name}"
        elif isinstance(value, dict):
            for inner in (known[name], *get_args(known[name])):
                if isinstance(inner, type) and issubclass(inner, Struct):
                    yield from _unknown(value, inner, f"{path}{name}.")


def body_of(kind: type[_Body], raw: bytes, strict: bool) -> tuple[_Body, list[str]]:
    """A request's body, and its unknown fields; raises for invalid JSON, wrong types and, if `strict`, unknown fields."""
    try:
        content = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Failure(400, f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Failure(400, f"the body is a JSON {type(content).__name__}: expected an object")
    unknown = sorted(_unknown(content, kind))
    for name in unknown:
        if name in REFUSED and content[name] not in REFUSED[name].neutral:
            raise Failure(400, f"{name} is not supported: {REFUSED[name].advice}", param=name)
    unknown = [name for name in unknown if name not in IGNORED and name not in REFUSED]
    if unknown and strict:
        names = ", ".join(unknown[:_MOST_NAMED])
        raise Failure(400, f"unknown fields: {names}; leave them out, or start the service without --strict")
    try:
        body = msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        param = where.rstrip("`").lstrip(".") or None
        raise Failure(400, f"{param or 'the body'}: {what}", param=param) from error
    _check_integers(body)
    return body, unknown


def _check_integers(body: Struct, path: str = "") -> None:
    """Raise for fields with numbers that are too large to compute with them and to print them."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Struct):
            _check_integers(value, f"{path}{name}.")
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise Failure(400, f"{path}{name} has more than 64 bits: expected a smaller number", param=f"{path}{name}")
