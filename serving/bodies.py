"""The JSON bodies of requests: the fields with their types, meanings and bounds, and what other servers' fields do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Raw, Struct, ValidationError, defstruct

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.limits import Limits
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.option_fields import OptionField, option_fields
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.serving.failures import Failure

# Generation options that are fields of requests, by field; `spaceport.` names those of the object `spaceport`.
OPTION_FIELDS = {
    declared.request: declared
    for options in (Decoding, Sampling, Grammar)
    for declared in option_fields(options)
    if declared.request is not None
}
_OF_CHAT = ("top_logprobs",)  # fields of options that text requests have under another name
# What options mean in requests only.
_ADDED = {
    "logit_bias": "Requests: -100 bans the token.",
    "max_tokens": "Requests for texts: 16 by default, 0 only with `echo`.",
    "top_k": "Requests: -1 = from all, too.",
}

# What a supported field does, by its name; in several kinds of requests it does the same.
SUPPORTED = {
    **{name: " ".join(filter(None, (declared.text, _ADDED.get(name)))) for name, declared in OPTION_FIELDS.items()},
    "add_generation_prompt": "Whether the chat template opens the model's turn; default true.",
    "add_special_tokens": "Whether the text gets the tokens that begin and end a prompt; default true.",
    "background": "Refused if true: the service stores nothing.",
    "chat_template_kwargs": "Further variables of the chat template.",
    "continue_final_message": "Whether the model continues the last message.",
    "conversation": "Refused: the service stores nothing.",
    "disable_spec_decode": "Whether to decode without drafts; the text is the same.",
    "echo": "Whether the answer begins with the prompt; not with `stream`.",
    "include": "Reports of the Responses API: `message.output_text.logprobs`.",
    "input": "A text or items of a conversation.",
    "instructions": "System message before the input.",
    "logprobs": "Chat: whether to report log probabilities. Text: as `top_logprobs`.",
    "max_completion_tokens": "The same as `max_tokens`, before which it counts.",
    "max_output_tokens": "The same as `max_tokens`.",
    "messages": "The conversation; contents are texts or parts of type `text`.",
    "metadata": "Returned with the answer.",
    "model": "Name of the model; may be left out if there is one only.",
    "n": "Number of choices for each prompt.",
    "parallel_tool_calls": "Whether an answer may have several calls.",
    "previous_response_id": "Refused: the service stores nothing.",
    "prompt": "A text, token ids, or several of either.",
    "reasoning": "Ignored: it asks for reasoning models.",
    "request_id": "Id of the answer and of its log entry.",
    "response_format": "`text`, `json_object`, or `json_schema` with a schema.",
    "return_token_ids": "Whether to report token ids.",
    "safety_identifier": "Ignored: all users are treated alike.",
    "prompt_cache_key": "Ignored: requests with one API key share the prefix cache; `cache_salt` separates them.",
    "prompt_cache_retention": "Ignored: KV rows stay until others need their buffer.",
    "max_tool_calls": "Ignored: there are no tools that the service calls itself.",
    "service_tier": "Ignored: there is one tier.",
    "spaceport": "Options of this service alone.",
    "spaceport.threads": "Whether events have the text of each thread as soon as it is generated.",
    "store": "Ignored: the service stores nothing.",
    "stream": "Whether to send events while the text is generated.",
    "stream_options": "What a stream reports: `include_usage`, `continuous_usage_stats`.",
    "structured_outputs": "Grammar of the text: `json`, `regex` or `choice`.",
    "suffix": "Refused unless empty: the models continue a text only.",
    "text": "Format of the text in the Responses API.",
    "tokens": "Token ids.",
    "tool_choice": "`auto`, `none`, `required` or a function; the latter two are enforced.",
    "tools": "Functions that the model may call.",
    "truncation": "Ignored: prompts that are too long are refused.",
    "user": "Ignored: all users are treated alike; `cache_salt` separates them in the prefix cache.",
}

# Fields of OpenAI's API and of vLLM that have no effect on a text, or only for servers that this one is not.
IGNORED = {
    "metadata": "it would be stored with the answer",
    "priority": "clients take turns",
    "prompt_cache_key": "requests with one API key share the prefix cache; `cache_salt` separates them",
    "prompt_cache_retention": "KV rows stay until others need their buffer",
    "reasoning_effort": "it is for reasoning models; `chat_template_kwargs` reaches the template",
    "safety_identifier": "all users are treated alike",
    "service_tier": "there is one tier",
    "store": "the service stores nothing",
    "user": "all users are treated alike",
    "verbosity": "the models have no such option",
}

Body = TypeVar("Body", bound="Struct")
MOST_MESSAGES = 4096  # of a request, and parts of a message
_MOST_NAMED = 5  # unknown fields in an error message
_MOST_NEUTRAL = 64  # bytes of a value that asks for nothing

# The entries of an object as they were sent: values that are not used are never built, which would cost most.
_ENTRIES = msgspec.json.Decoder(dict[str, Raw])


@dataclass(frozen=True)
class Refused:
    """A field of other servers that would change an answer, and cannot here."""

    advice: str
    neutral: tuple[Any, ...] = (None,)  # values that ask for nothing


_GRAMMAR = Refused("send structured_outputs")


REFUSED = {
    "allowed_token_ids": Refused("ban tokens by logit_bias"),
    "audio": Refused("the models generate text only"),
    "bad_words": Refused("ban tokens by logit_bias", (None, [])),
    "best_of": Refused("send n", (None, 1)),
    "chat_template": Refused("the template is that of the bundle"),
    "documents": Refused("send them as messages", (None, [])),
    "function_call": Refused("send tool_choice", (None, "auto", "none")),
    "functions": Refused("send tools", (None, [])),
    "guided_choice": _GRAMMAR,
    "guided_grammar": _GRAMMAR,
    "guided_json": _GRAMMAR,
    "guided_regex": _GRAMMAR,
    "length_penalty": Refused("there is no beam search", (None, 1, 1.0)),
    "logits_processors": Refused("the service runs no code of clients", (None, [])),
    "mm_processor_kwargs": Refused("the models read text only", (None, {})),
    "modalities": Refused("the models generate text only", (None, [], ["text"])),
    "prediction": Refused("drafts come from the model and the prompt"),
    "prompt_embeds": Refused("send prompt"),
    "prompt_logprobs": Refused("send echo and logprobs to /v1/completions"),
    "truncate_prompt_tokens": Refused("send a shorter prompt"),
    "use_beam_search": Refused("there is no beam search", (None, False)),
    "web_search_options": Refused("the service searches nothing"),
}


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
        "messages": {"array": {"minItems": 1, "maxItems": MOST_MESSAGES}},
        "request_id": {"string": {"minLength": 1, "maxLength": 128}},
    }


def _declared_bounds(declared: OptionField) -> dict[str, dict[str, Any]]:
    if declared.kind is str:
        return {"string": {"maxLength": declared.most}}
    bounds = {"minimum": declared.least, "maximum": declared.most}
    kind = "integer" if declared.kind is int else "number"
    return {kind: {name: bound for name, bound in bounds.items() if bound is not None}}


def json_type(kind: Any) -> Any:
    """The type of an option in JSON."""
    origin, members = get_origin(kind), get_args(kind)
    if origin is Mapping:
        return dict[str, members[1]]  # type: ignore[valid-type]
    if origin in (Sequence, Collection):
        return str | list[str] if members[0] is str else list[members[0]]  # type: ignore[valid-type]
    return kind


def _with_options(struct: type[Body]) -> type[Body]:
    """The struct with a field for each generation option of its requests, None where it is not set."""
    prefix = "spaceport." if struct.__name__ == "Own" else ""
    own = {*struct.__struct_fields__, *_OF_CHAT}
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
    """The paths of entries that objects of this kind do not have, such as `spaceport.depth`."""
    known = _types(kind)
    for name, value in entries.items():
        if name not in known:
            yield f"{path}{name}"
        elif (inner := known[name]) is not None:
            with suppress(ValidationError):  # no object
                yield from _unknown(_ENTRIES.decode(value), inner, f"{path}{name}.")


def _asks_for_nothing(name: str, value: Raw) -> bool:
    """Whether the value of a field that is refused asks for nothing."""
    return memoryview(value).nbytes <= _MOST_NEUTRAL and msgspec.json.decode(value) in REFUSED[name].neutral


def _choices(kind: type[Struct], path: str) -> tuple[str, ...]:
    """The values of the field at this path, if it has a few only."""
    name, _, rest = path.partition(".")
    inner = _types(kind).get(name)
    if rest:
        return () if inner is None else _choices(inner, rest)
    types = [entry.type for entry in msgspec.structs.fields(kind) if entry.encode_name == name]
    literals = [hint for member in types for hint in (member, *get_args(member)) if get_origin(hint) is Literal]
    return tuple(map(str, get_args(literals[0]))) if literals else ()


def body_of(kind: type[Body], raw: bytes, strict: bool) -> tuple[Body, list[str]]:
    """A request's body, and its unknown fields; raises for invalid JSON, wrong types and, if `strict`, unknown fields."""
    try:
        entries = _ENTRIES.decode(raw)
        unknown = sorted(_unknown(entries, kind))
        for name in unknown:
            if name in REFUSED and not _asks_for_nothing(name, entries[name]):
                raise Failure(400, f"{name} is not supported: {REFUSED[name].advice}", param=name)
        unknown = [name for name in unknown if name not in IGNORED and name not in REFUSED]
        if unknown and strict:
            names = ", ".join(unknown[:_MOST_NAMED])
            raise Failure(400, f"unknown fields: {names}; leave them out, or start the service without --strict")
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
    return body, unknown


def _check_integers(body: Struct, path: str = "") -> None:
    """Raise for fields with numbers that are too large to compute with them and to print them."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Struct):
            _check_integers(value, f"{path}{name}.")
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise Failure(400, f"{path}{name} has more than 64 bits: expected a smaller number", param=f"{path}{name}")
