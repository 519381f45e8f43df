"""Decoding options: the options of a completion from the fields of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.tools.serve.bodies import ChatBody, GenerationBody, ResponseFormat, StructuredOutputs, TextBody
from spaceport.tools.serve.failures import Failure
from spaceport.tools.serve.tool_use import NO_TOOLS, ToolUse

_TEXT_TOKENS = 16  # of a text request that names no maximum, as in OpenAI's API
_SEEDS = 2**64


def decodings_of(
    body: ChatBody | TextBody,
    defaults: Mapping[str, Any],
    timeout: float,
    most_choices: int,
    tools: ToolUse = NO_TOOLS,
) -> tuple[Decoding, ...]:
    """The options of each choice of a request; `defaults` is the generation_config of the bundle."""
    count = 1 if body.n is None else body.n
    if not 1 <= count <= most_choices:
        raise Failure(400, f"n is {count}: expected 1 to {most_choices}", param="n")
    return tuple(_decoding(body, defaults, timeout, choice, tools) for choice in range(count))


def _decoding(
    body: ChatBody | TextBody, defaults: Mapping[str, Any], timeout: float, choice: int, tools: ToolUse
) -> Decoding:
    own, plain = body.spaceport, bool(body.disable_spec_decode)
    return Decoding(
        max_tokens=_max_tokens(body),
        stop=() if body.stop is None else body.stop,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False and not tools.shows_special_tokens,
        stop_token_ids=body.stop_token_ids or (),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        cache_salt=body.cache_salt or "",
        timeout=timeout,
        sampling=_sampling(body, defaults, choice),
        grammar=_grammar(body, tools),
        mask_slots=0 if plain else own.mask_slots,
        draft_rows=own.draft_rows,
        lookup=0 if plain else own.lookup,
        fork=own.fork,
        max_threads=own.max_threads,
        max_depth=Decoding.max_depth if own.max_depth is None else own.max_depth,
        trace=own.trace,
        logprobs=_logprobs(body),
    )


def _max_tokens(body: ChatBody | TextBody) -> int | None:
    if isinstance(body, TextBody):
        return _TEXT_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_completion_tokens is None:
        return body.max_tokens
    check_least("max_completion_tokens", body.max_completion_tokens)
    return body.max_completion_tokens


def check_least(name: str, value: int) -> None:
    """Raise for a number of tokens below 1."""
    if value < 1:
        raise Failure(400, f"{name} is {value}: expected at least 1", param=name)


def _logprobs(body: ChatBody | TextBody) -> int | None:
    if isinstance(body, TextBody):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise Failure(400, "top_logprobs without logprobs: set logprobs to true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _sampling(body: GenerationBody, defaults: Mapping[str, Any], choice: int) -> Sampling:
    """How tokens are chosen: as the request says, else as the model's publisher suggests, else as in OpenAI's API."""
    suggested = defaults if defaults.get("do_sample") else {}

    def value(name: str, otherwise: float) -> Any:
        given = getattr(body, name)
        if given is None:
            given = suggested.get(name)
        return otherwise if given is None else given

    temperature = value("temperature", 1.0)
    top_k = value("top_k", 0)
    seed = None if body.seed is None or not temperature else (body.seed + choice) % _SEEDS
    return Sampling(
        temperature=temperature,
        top_k=0 if top_k == -1 else top_k,  # vLLM spells "all tokens" as -1
        top_p=value("top_p", 1.0),
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        logit_bias=_biases(body.logit_bias),
        banned=[int(token) for token, bias in (body.logit_bias or {}).items() if bias == -100],
        seed=seed,
    )


def _biases(given: Mapping[str, float] | None) -> dict[int, float]:
    """Biases by token id; -100 bans a token, as OpenAI's API says."""
    try:
        return {int(token): bias for token, bias in (given or {}).items() if bias != -100}
    except ValueError as error:
        raise Failure(400, f"logit_bias: {error}: expected token ids as keys", param="logit_bias") from error


def _grammar(body: ChatBody | TextBody, tools: ToolUse) -> Grammar | None:
    found = [] if tools.grammar is None else [tools.grammar]
    found += [] if body.structured_outputs is None else _structured(body.structured_outputs)
    if isinstance(body, ChatBody) and body.response_format is not None:
        found += _formatted(body.response_format)
    if len(found) > 1:
        raise Failure(
            400, "the request has several grammars: expected one of response_format, structured_outputs and tool_choice"
        )
    return found[0] if found else None


def _formatted(given: ResponseFormat) -> list[Grammar]:
    if given.type == "text":
        return []
    if given.type == "json_object":
        return [Grammar(json_schema={"type": "object"})]
    if given.json_schema is None:
        raise Failure(400, "response_format has no json_schema: expected one with a schema", param="response_format")
    return [Grammar(json_schema=given.json_schema.schema)]


def _structured(given: StructuredOutputs) -> list[Grammar]:
    if given.grammar is not None:
        raise Failure(400, "structured_outputs.grammar is not supported: expected json, regex or choice")
    found = []
    if given.json is not None:
        schema = given.json if isinstance(given.json, str) else json.dumps(given.json)
        found.append(Grammar(json_schema=schema))
    if given.regex is not None:
        found.append(Grammar(regex=given.regex))
    if given.choice is not None:
        if not given.choice or not all(given.choice):
            raise Failure(400, "structured_outputs.choice has no text or an empty one: expected several texts")
        found.append(Grammar(regex="|".join(_literal(text) for text in given.choice)))
    return found


def _literal(text: str) -> str:
    """A regular expression that matches this text only; \\< and \\> would be borders of words."""
    return "".join(f"\\{character}" if re.match(r"[^\w\s<>]", character, re.ASCII) else character for character in text)
