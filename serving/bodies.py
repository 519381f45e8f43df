"""The JSON bodies of requests: the fields with their types, meanings and bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

import anyio
import msgspec
from msgspec import Raw, Struct, ValidationError, defstruct
from starlette.requests import ClientDisconnect, Request

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.limits import Limits
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.option_fields import OptionField, option_fields
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.serving.failures import Failure, invalid, overloaded
from spaceport.serving.options import ServiceOptions
from spaceport.serving.service import ServedModel, Service, service_of
from spaceport.serving.tool_use import NO_TOOLS, ToolUse

# Generation options that are fields of requests, by field; `spaceport.` names those of the object `spaceport`.
OPTION_FIELDS = {
    declared.request: declared
    for options in (Decoding, Sampling, Grammar)
    for declared in option_fields(options)
    if declared.request is not None
}
_NOT_SHARED = ("top_logprobs",)  # fields of options that only the bodies have which declare them themselves
# What options mean in requests only.
_SUGGESTED = "Requests: by default as the model's `generation_config.json` suggests"
_ADDED = {
    **dict.fromkeys(("top_p", "min_p", "repetition_penalty"), f"{_SUGGESTED}."),
    "logit_bias": "Requests: -100 bans the token.",
    "max_tokens": "Requests for texts: 16 by default, 0 only with `echo`.",
    "temperature": f"{_SUGGESTED}, else 1.",
    "top_k": f"{_SUGGESTED}; -1 = from all, too.",
}

# What a supported field does, by its name; in several kinds of requests it does the same.
SUPPORTED = {
    **{name: " ".join(filter(None, (declared.text, _ADDED.get(name)))) for name, declared in OPTION_FIELDS.items()},
    "add_generation_prompt": "Whether the chat template opens the model's turn; default true.",
    "add_special_tokens": "Whether to add the tokens that begin and end a prompt; default true.",
    "background": "Refused if true: the service stores nothing.",
    "chat_template_kwargs": "Further variables of the chat template.",
    "continue_final_message": "Whether the model continues the last message.",
    "conversation": "Refused: the service stores nothing.",
    "echo": "Whether the answer begins with the prompt; not in streams.",
    "include": "Reports of the Responses API: `message.output_text.logprobs`.",
    "input": "A text or items of a conversation.",
    "input_extra": "Other files, or parts of them: `text` and `filename` of each.",
    "input_prefix": "The text before the line of the gap.",
    "input_suffix": "The text after the gap.",
    "instructions": "System message before the input.",
    "logprobs": "Chat: whether to report log probabilities. Text: as `top_logprobs`.",
    "max_completion_tokens": "The same as `max_tokens`, before which it counts.",
    "max_output_tokens": "The same as `max_tokens`.",
    "messages": "The conversation; contents are texts or parts of type `text`.",
    "metadata": "Returned with the answer.",
    "model": "Name of the model; may be left out if there is one only.",
    "n": "Number of choices for each prompt.",
    "n_cmpl": "The same as `n`, before which it counts.",
    "n_indent": "Characters of indentation that each further line needs; the text ends before one with less.",
    "n_predict": "The same as `max_tokens`, before which it counts; 0 = only read the prompt, -1 = no maximum.",
    "parallel_tool_calls": "Whether an answer may have several calls.",
    "previous_response_id": "Refused: the service stores nothing.",
    "prompt": "A text, token ids, or several of either; of `/infill`, the text of the line before the gap.",
    "response_fields": "Entries to answer with, such as `content` and `timings/predicted_ms`; default: all.",
    "response_format": "`text`, `json_object` (perhaps with a `schema`), or `json_schema` with one.",
    "samplers": "Samplers in the order in which they run: a part of "
    "`penalties`, `temperature`, `top_k`, `top_p`, `min_p`; `infill` is ignored.",
    "spaceport": "Options of this service alone.",
    "spaceport.threads": "Whether events have the text of each thread at once.",
    "stream": "Whether to send events while the text is generated.",
    "stream_options": "What a stream reports: `include_usage`, `continuous_usage_stats`.",
    "suffix": "The text behind a gap that the answer fills; refused by models that were not trained to.",
    "t_max_predict_ms": "Milliseconds after the first token, after which the text ends with its line; 0 = no limit.",
    "text": "Format of the text in the Responses API.",
    "tokens": "Token ids.",
    "tool_choice": "`auto`, `none`, or enforced: `required` or a function.",
    "tools": "Functions that the model may call.",
}

# Fields of OpenAI's API that change no text here: the service stores nothing, has one tier and no reasoning models.
# Those of llama.cpp's server change none either: `samplers`, but of /infill, says which of its defaults apply, and here
# none do.
IGNORED = frozenset(
    (
        *("cache_prompt", "id_slot", "samplers", "t_max_prompt_ms", "timings_per_token"),
        *("max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("reasoning", "reasoning_effort", "safety_identifier", "service_tier", "store", "truncation", "user"),
        *("verbosity", "text.verbosity", "stream_options.include_obfuscation"),
    )
)

Body = TypeVar("Body", bound="Struct")
MOST_MESSAGES = 4096  # of a request, and parts of a message
_MOST_NAMED = 5  # unknown fields in an error message
_MOST_NAME = 64  # characters of each
_MOST_DIRECT = 256 << 10  # bytes of a body that is parsed on the event loop
_MOST_SMALL = 64 << 10  # bytes of a body that is read whatever others send
_LEAST_RATE = 16 << 10  # bytes per second of a body
_CLOSE = {"Connection": "close"}  # after the answer to a body that was not received

# The entries of an object as they were sent: values that are not used are never built, which would cost most.
_ENTRIES = msgspec.json.Decoder(dict[str, Raw])


def bounds_of(limits: Limits, most_choices: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Bounds of fields by name and JSON type, as JSON schema says them."""
    text, ids = {"maxLength": limits.prompt_chars}, {"maxItems": limits.prompt_chars}
    return {
        **{name: _declared_bounds(declared) for name, declared in OPTION_FIELDS.items()},
        "n": {"integer": {"minimum": 1, "maximum": most_choices}},
        "top_k": {"integer": {"minimum": -1}},
        "seed": {},  # all integers of 64 bits count as seeds
        "top_logprobs": {"integer": {"minimum": 0, "maximum": limits.logprobs}},
        "logprobs": {"integer": {"minimum": 0, "maximum": limits.logprobs}},
        "max_tokens": {"integer": {"minimum": 0}},
        "max_completion_tokens": {"integer": {"minimum": 1}},
        "max_output_tokens": {"integer": {"minimum": 1}},
        "stop": {
            "string": {"minLength": 1, "maxLength": limits.stop_chars},
            "array": {"maxItems": limits.stop_strings},
        },
        "stop_token_ids": {"array": {"maxItems": limits.banned_tokens}},
        "logit_bias": {"object": {"maxProperties": limits.bias_entries}},
        "prompt": {"string": text, "array": ids},
        **{name: {"string": text} for name in ("input_prefix", "input_suffix")},
        "input_extra": {"array": {"maxItems": MOST_MESSAGES}},
        "n_indent": {"integer": {"minimum": 0}},
        "n_predict": {"integer": {"minimum": -1}},
        "response_fields": {"array": {"maxItems": MOST_MESSAGES}},
        "t_max_predict_ms": {"number": {"minimum": 0}},
        "messages": {"array": {"minItems": 1, "maxItems": MOST_MESSAGES}},
    }


def _declared_bounds(declared: OptionField) -> dict[str, dict[str, Any]]:
    kind = {str: "string", int: "integer"}.get(declared.kind, "number")
    names = {"maxLength": declared.most} if kind == "string" else {"minimum": declared.least, "maximum": declared.most}
    return {kind: {name: bound for name, bound in names.items() if bound is not None}}


def json_type(kind: Any) -> Any:
    origin, members = get_origin(kind), get_args(kind)
    if origin is Mapping:
        return dict[str, members[1]]  # type: ignore[valid-type]
    if origin in (Sequence, Collection):
        return str | list[str] if members[0] is str else list[members[0]]  # type: ignore[valid-type]
    return kind


def _with_options(struct: type[Body]) -> type[Body]:
    """The struct with a field for each generation option of its requests, None where it is not set."""
    prefix = "spaceport." if struct.__name__ == "Own" else ""
    own = {*struct.__struct_fields__, *_NOT_SHARED}
    fields = [
        (name.removeprefix(prefix), json_type(declared.kind) | None, None)
        for name, declared in OPTION_FIELDS.items()
        if name.startswith(prefix) and "." not in name.removeprefix(prefix) and name not in own
    ]
    named = {"__doc__": struct.__doc__, "__module__": struct.__module__}
    return defstruct(struct.__name__, fields, bases=(struct,), namespace=named, kw_only=True)  # type: ignore[return-value]


class StreamOptions(Struct):
    """What a stream reports besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


@_with_options
class Own(Struct, kw_only=True):
    """Options that only this service has."""

    threads: bool = False


@_with_options
class GenerationBody(Struct, kw_only=True):
    """Fields that chat requests and text requests share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    spaceport: Own = msgspec.field(default_factory=Own)

    def chosen(self, options: type, suggested: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The values of options: as the request says, else as suggested, else those of requests that say nothing."""
        values = {}
        for declared in option_fields(options):
            prefix, _, name = (declared.request or ".").rpartition(".")
            if prefix not in ("", "spaceport"):
                continue
            asked = getattr(self.spaceport if prefix else self, name, None)
            choices = (asked, (suggested or {}).get(declared.name), declared.request_default)
            values[declared.name] = next((value for value in choices if value is not None), None)
        return values

    @property
    def json_whitespace(self) -> bool:
        """Whether JSON that a grammar describes may have whitespace between its tokens."""
        return bool(self.chosen(Grammar)["json_whitespace"])

    def most_tokens(self) -> int | None:
        """Maximum number of generated tokens of a choice; None: as many as fit."""
        return self.max_tokens

    def top_tokens(self) -> int | None:
        """Number of most probable tokens to report beside each token; None: without log probabilities."""
        return None

    def formats(self) -> list[Grammar]:
        """Grammars of the answer that are named in fields of this kind of request."""
        return []

    def tool_use(self, model: ServedModel, options: ServiceOptions) -> ToolUse:
        """How the answer uses tools; raises if the fields about them are invalid."""
        return NO_TOOLS


@cache  # takes a millisecond
def _types(kind: type[Struct]) -> dict[str, type[Struct] | None]:
    """The entries that objects of this kind have, with the kind of those that are objects with known entries too."""
    return {
        entry.encode_name: next(
            (
                inner
                for inner in (entry.type, *get_args(entry.type))
                if isinstance(inner, type) and issubclass(inner, Struct)
            ),
            None,
        )
        for entry in msgspec.structs.fields(kind)
    }


def _unknown(entries: dict[str, Raw], kind: type[Struct], path: str = "") -> Iterator[str]:
    """The paths of entries that objects of this kind do not have, such as `spaceport.depth`; null asks for nothing."""
    known = _types(kind)
    for name, value in entries.items():
        if name not in known:
            if f"{path}{name}" not in IGNORED and bytes(memoryview(value)[:5]) != b"null":
                yield f"{path}{name}"
        elif (inner := known[name]) is not None:
            with suppress(ValidationError):  # no object
                yield from _unknown(_ENTRIES.decode(value), inner, f"{path}{name}.")


def _choices(kind: type[Struct], path: str) -> tuple[str, ...]:
    """The values of the field at this path, if it has a few only."""
    name, _, rest = path.partition(".")
    inner = _types(kind).get(name)
    if rest:
        return () if inner is None else _choices(inner, rest)
    types = [entry.type for entry in msgspec.structs.fields(kind) if entry.encode_name == name]
    literals = [hint for member in types for hint in (member, *get_args(member)) if get_origin(hint) is Literal]
    return tuple(map(str, get_args(literals[0]))) if literals else ()


def body_of(kind: type[Body], raw: bytes | bytearray) -> Body:
    """A request's body; raises for invalid JSON, wrong types and unknown fields, as OpenAI's service does."""
    try:
        if unknown := sorted(_unknown(_ENTRIES.decode(raw), kind)):
            names = ", ".join(name[:_MOST_NAME] for name in unknown[:_MOST_NAMED])
            message = f"unknown fields: {names}; leave them out, /openapi.json lists the fields that are known"
            raise Failure(400, message, param=unknown[0][:_MOST_NAME])
        body = msgspec.json.decode(raw, type=kind)
    except ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        param = where.rstrip("`").lstrip(".") or None
        if choices := _choices(kind, param or ""):
            what += f": expected one of {', '.join(choices)}"
        raise Failure(400, f"{param or 'the body'}: {what}", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Failure(400, f"the body is not JSON: {error}") from error
    _check_integers(body)
    return body


def _check_integers(body: Struct, path: str = "") -> None:
    """Raise for fields with numbers that are too large to compute with them and to print them."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Struct):
            _check_integers(value, f"{path}{name}.")
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise invalid(f"{path}{name}", "has more than 64 bits: expected a smaller number")


def check_count(name: str, entries: Sized, most: int = MOST_MESSAGES) -> None:
    """Raise for a list with too many entries, before anything is computed for each of them."""
    if len(entries) > most:
        raise invalid(name, f"has {len(entries)} entries: expected at most {most}")


def check_least(name: str, value: int) -> None:
    """Raise for a number of tokens below 1."""
    if value < 1:
        raise invalid(name, f"is {value}: expected at least 1")


async def _receive(request: Request, service: Service, raw: bytearray) -> None:
    """Receive the body of a request; what has come counts for the service until the body is read."""
    options = service.options
    try:
        with anyio.move_on_after(options.body_timeout) as scope:
            async for part in request.stream():
                raw += part
                service.body_bytes += len(part)
                if service.body_bytes > options.most_body_bytes and len(raw) > _MOST_SMALL:
                    raise overloaded("the service reads too many bodies", "too_many_bodies", _CLOSE)
                scope.deadline += len(part) / _LEAST_RATE
                if len(raw) > options.most_bytes:
                    message = (
                        f"the body has more than {options.most_bytes} bytes: send a smaller one, or raise --max-body"
                    )
                    raise Failure(413, message, code="body_too_large", headers=_CLOSE)
    except ClientDisconnect as error:
        raise Failure(499, "the client has left") from error
    if scope.cancelled_caught:
        message = f"the body did not come at {_LEAST_RATE} bytes per second: send the request again"
        raise Failure(408, message, headers=_CLOSE)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body of a request; raises for one that is too large, too slow or invalid, or while too many are read."""
    service, raw = service_of(request), bytearray()
    try:
        await _receive(request, service, raw)
        if len(raw) > _MOST_DIRECT:
            async with service.spacing.one_large():
                return await asyncio.to_thread(body_of, kind, raw)
        return body_of(kind, raw)
    finally:
        service.body_bytes -= len(raw)
