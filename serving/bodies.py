"""The JSON bodies of requests: the fields with their types, meanings and bounds, and what other servers' fields do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Raw, Struct, ValidationError

from spaceport.runtime.limits import Limits
from spaceport.serving.failures import Failure

# What a supported field does, by its name; in several kinds of requests it does the same.
SUPPORTED = {
    "add_generation_prompt": "Whether the chat template opens the model's turn; default true.",
    "add_special_tokens": "Whether the text gets the tokens that begin and end a prompt; default true.",
    "background": "Refused if true: the service stores nothing.",
    "cache_salt": "Only requests with the same salt reuse each other's KV rows.",
    "chat_template_kwargs": "Further variables of the chat template.",
    "continue_final_message": "Whether the model continues the last message.",
    "conversation": "Refused: the service stores nothing.",
    "disable_spec_decode": "Whether to decode without drafts; the text is the same.",
    "echo": "Whether the answer begins with the prompt; not with `stream`.",
    "frequency_penalty": "Subtracted from a token's logit for each time that the text holds it.",
    "ignore_eos": "Whether to generate end tokens like others.",
    "include": "Reports of the Responses API: `message.output_text.logprobs`.",
    "include_stop_str_in_output": "Whether the text ends with the stop string.",
    "input": "A text or items of a conversation.",
    "instructions": "System message before the input.",
    "logit_bias": "Token id to a bias of its logit; -100 bans the token.",
    "logprobs": "Chat: whether to report log probabilities. Text: number of most probable tokens to report.",
    "max_completion_tokens": "The same as `max_tokens`, before which it counts.",
    "max_output_tokens": "The same as `max_tokens`.",
    "max_tokens": "Maximum tokens of each choice; of texts 16 by default, 0 only with `echo`.",
    "messages": "The conversation; contents are texts or parts of type `text`.",
    "metadata": "Returned with the answer.",
    "min_p": "Sample from tokens with at least this fraction of the highest probability.",
    "min_tokens": "Tokens before which end tokens and `stop_token_ids` are not generated.",
    "model": "Name of the model; may be left out if there is one only.",
    "n": "Number of choices for each prompt.",
    "parallel_tool_calls": "Whether an answer may have several calls.",
    "presence_penalty": "Subtracted from the logit of each token that the text holds.",
    "previous_response_id": "Refused: the service stores nothing.",
    "prompt": "A text, token ids, or several of either.",
    "reasoning": "Ignored: it asks for reasoning models.",
    "repetition_penalty": "Factor against tokens of the prompt and the text.",
    "request_id": "Id of the answer and of its log entry.",
    "response_format": "`text`, `json_object`, or `json_schema` with a schema.",
    "return_token_ids": "Whether to report token ids.",
    "safety_identifier": "Ignored: all users are treated alike.",
    "prompt_cache_key": "Ignored: all requests share the prefix cache; `cache_salt` separates them.",
    "prompt_cache_retention": "Ignored: KV rows stay until others need their buffer.",
    "max_tool_calls": "Ignored: there are no tools that the service calls itself.",
    "seed": "The same seed gives the same text.",
    "service_tier": "Ignored: there is one tier.",
    "skip_special_tokens": "Whether special tokens are left out of the text; default true.",
    "spaceport": "Options of this service alone: how fast it decodes, forks, reports.",
    "stop": "The text ends before the first of these texts.",
    "stop_token_ids": "Token ids that end the text.",
    "store": "Ignored: the service stores nothing.",
    "stream": "Whether to send events while the text is generated.",
    "stream_options": "What a stream reports: `include_usage`, `continuous_usage_stats`.",
    "structured_outputs": "Grammar of the text: `json`, `regex` or `choice`.",
    "suffix": "Refused unless empty: the models continue a text only.",
    "temperature": "Sampling temperature; 0 = greedy.",
    "text": "Format of the text in the Responses API.",
    "tokens": "Token ids.",
    "tool_choice": "`auto`, `none`, `required` or a function; the latter two are enforced.",
    "tools": "Functions that the model may call.",
    "top_k": "Sample from this many most probable tokens; 0 or -1: from all.",
    "top_logprobs": "Number of most probable tokens to report for each token.",
    "top_p": "Sample from the fewest most probable tokens whose probabilities sum up to this.",
    "truncation": "Ignored: prompts that are too long are refused.",
    "user": "Ignored: all users are treated alike; `cache_salt` separates them in the prefix cache.",
}

# Fields of OpenAI's API and of vLLM that have no effect on a text, or only for servers that this one is not.
IGNORED = {
    "metadata": "it would be stored with the answer",
    "priority": "requests run in the order in which they come",
    "prompt_cache_key": "all requests share the prefix cache; `cache_salt` separates them",
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
    bounds: dict[str, dict[str, dict[str, Any]]] = {
        "n": {"integer": {"minimum": 1, "maximum": most_choices}},
        "top_k": {"integer": {"minimum": -1}},
        "top_logprobs": {"integer": {"minimum": 0, "maximum": limits.logprobs}},
        "logprobs": {"integer": {"minimum": 0, "maximum": limits.logprobs}},
        "min_tokens": {"integer": {"minimum": 0}},
        "max_tokens": {"integer": {"minimum": 0}},
        "max_completion_tokens": {"integer": {"minimum": 1}},
        "max_output_tokens": {"integer": {"minimum": 1}},
        "stop": {
            "string": {"minLength": 1, "maxLength": limits.stop_chars},
            "array": {"maxItems": limits.stop_strings},
        },
        "stop_token_ids": {"array": {"maxItems": limits.banned_tokens}},
        "logit_bias": {"object": {"maxProperties": limits.bias_entries}},
        "cache_salt": {"string": {"maxLength": 256}},
        "prompt": {"string": text, "array": ids},
        "messages": {"array": {"minItems": 1, "maxItems": MOST_MESSAGES}},
        "request_id": {"string": {"minLength": 1, "maxLength": 128}},
    }
    for name, least, most in (
        ("temperature", 0, 100),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("repetition_penalty", 0.01, 100),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
    ):
        bounds[name] = {"number": {"minimum": least, "maximum": most}}
    return bounds


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
