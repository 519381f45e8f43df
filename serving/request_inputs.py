"""What a request asks the model for: its prompt, its tools and the decoding options of its choices."""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.limits import Limits
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.option_fields import option_fields
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.text.messages import ChatPrompt
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.tool_calls.functions import (
    FORMATS,
    ToolFormat,
    ToolFunction,
    calls_grammar,
    functions_of,
    renders_tools,
    with_description,
)
from spaceport.runtime.tool_calls.parser import MOST_CALLS, ToolCallParser
from spaceport.serving.bodies import (
    MOST_MESSAGES,
    ChatBody,
    GenerationBody,
    ResponseFormat,
    TextBody,
)
from spaceport.serving.failures import Failure
from spaceport.serving.options import ServiceOptions
from spaceport.serving.service import ServedModel

_CHOICES = ("none", "auto", "required")
_EXPECTED = f'{", ".join(_CHOICES)} or {{"type": "function", "function": {{"name": …}}}}'
_LETTERS = string.ascii_letters + string.digits
_MOST_PROMPTS = 64  # of one text request
_TEXT_TOKENS = 16  # of a text request that names no maximum, as in OpenAI's API
_SEEDS = 2**64


@dataclass(frozen=True)
class ToolUse:
    """How the answer to a chat request uses tools; without functions, its text has no calls."""

    tool_format: ToolFormat
    functions: tuple[ToolFunction, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()  # as the chat template renders them
    grammar: Grammar | None = None  # of an answer that has to call functions
    parallel: bool = True
    opening: int | None = None  # token that opens calls, if it is a special one

    @property
    def enforced(self) -> bool:
        """Whether the answer has to consist of calls."""
        return self.grammar is not None

    @property
    def shows_special_tokens(self) -> bool:
        """Whether calls can be found only if the text shows special tokens."""
        return bool(self.functions) and self.opening is not None

    def parser(self) -> ToolCallParser | None:
        """A parser for one choice; None: its text is content."""
        if not self.functions:
            return None
        return ToolCallParser(
            self.tool_format,
            [function.name for function in self.functions],
            most_calls=MOST_CALLS if self.parallel else 1,
            constrained=self.enforced,
            opened=self.enforced and self.opening is not None,
        )

    def call_id(self) -> str:
        """The id of a new call."""
        if self.tool_format.short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


NO_TOOLS = ToolUse(FORMATS["json"])


def _shown(value: object) -> str:
    return f"{value!r:.60}" if isinstance(value, str) else "an object"


def _named(choice: object) -> str | None:
    """The function that has to be called; None: any."""
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise Failure(400, f"tool_choice is {_shown(choice)}: expected {_EXPECTED}", param="tool_choice")
    return name


def _called(choice: object, functions: tuple[ToolFunction, ...]) -> tuple[ToolFunction, ...] | None:
    """The functions of which the answer has to call some; empty: it may call any; None: it may call none."""
    if choice is None or choice == "auto":
        return () if functions else None
    if choice == "none":
        return None
    name = _named(choice)
    if not functions:
        raise Failure(
            400, f"tool_choice is {_shown(choice)} without tools: expected tools to call", param="tool_choice"
        )
    if name is None:
        return functions
    called = tuple(function for function in functions if function.name == name)
    if not called:
        known = ", ".join(function.name for function in functions[:5])
        raise Failure(400, f"tool_choice names {name!r:.80}: expected one of tools: {known}", param="tool_choice")
    return called


def _special_token(model: ServedModel, text: str) -> int | None:
    """The id of a special token with this text; None: there is none."""
    added = model.runtime.tokenizer.get_added_tokens_decoder() if text else {}
    return next((token for token, entry in added.items() if entry.special and entry.content == text), None)


def tool_use_of(body: ChatBody, model: ServedModel, options: ServiceOptions) -> ToolUse:
    """How the answer to a request uses tools; raises if the fields about tools are invalid."""
    tools = body.tools or []
    try:
        functions = functions_of(tools, model.runtime.limits)
    except OptionFault as error:
        raise Failure(400, str(error), param="tools") from error
    called = _called(body.tool_choice, functions)
    if called is None:
        return NO_TOOLS
    tool_format = model.tool_format if options.tool_format is None else FORMATS[options.tool_format]
    opening, parallel = _special_token(model, tool_format.opening), body.parallel_tool_calls is not False
    if not called:
        return ToolUse(tool_format, functions, tools, None, parallel, opening)
    several = parallel and not isinstance(body.tool_choice, dict)
    grammar = calls_grammar(
        tool_format, called, parallel=several, opened=opening is not None, whitespace=json_whitespace(body)
    )
    try:
        model.runtime.limits.check_grammar(grammar)
    except OptionFault as error:
        raise Failure(400, str(error), param="tools") from error
    return ToolUse(tool_format, called, tools, grammar, parallel, opening)


def check_count(name: str, entries: Sized, most: int = MOST_MESSAGES) -> None:
    """Raise for a list with too many entries, before anything is computed for each of them."""
    if len(entries) > most:
        raise Failure(400, f"{name} has {len(entries)} entries: expected at most {most}", param=name)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise for messages that are none, too many, or not text."""
    if not messages:
        raise Failure(400, "messages is empty: expected at least one message", param="messages")
    check_count("messages", messages)
    for message in messages:
        parts = message.get("content")
        if not isinstance(parts, list):
            continue
        if len(parts) > MOST_MESSAGES:
            expected = f"expected at most {MOST_MESSAGES}"
            raise Failure(400, f"a message has {len(parts)} parts: {expected}", param="messages")
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            raise Failure(400, "a message has a part that is not text: the models read text only", param="messages")


async def chat_prompt(body: ChatBody, tools: ToolUse, model: ServedModel) -> Prompt:
    """The prompt of a chat request; one whose answer has to consist of calls may end with the token that opens them."""
    check_messages(body.messages)
    messages: Sequence[Mapping[str, Any]] = body.messages
    if tools.tools and not renders_tools(model.chat_template):
        messages = with_description(messages, tools.tools, tools.tool_format)
    prompt = ChatPrompt(
        messages,
        tools=list(tools.tools),
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    if not tools.enforced or tools.opening is None:
        return prompt
    return [*await asyncio.to_thread(model.runtime.tokens_of, prompt), tools.opening]


def text_prompts(prompt: str | list[Any]) -> list[Prompt]:
    """The prompts of a text request: one text, one list of token ids, or several of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Failure(400, "prompt is empty: expected a text or token ids", param="prompt")
    if len({type(item) for item in prompt}) > 1:
        raise Failure(400, "prompt mixes texts and token ids: expected one kind", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > _MOST_PROMPTS:
        raise Failure(400, f"prompt has {len(prompt)} prompts: expected at most {_MOST_PROMPTS}", param="prompt")
    return list(prompt)


def check_least(name: str, value: int) -> None:
    """Raise for a number of tokens below 1."""
    if value < 1:
        raise Failure(400, f"{name} is {value}: expected at least 1", param=name)


def _max_tokens(body: ChatBody | TextBody) -> int | None:
    if isinstance(body, TextBody):
        return _TEXT_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_completion_tokens is None:
        return body.max_tokens
    check_least("max_completion_tokens", body.max_completion_tokens)
    return body.max_completion_tokens


def _logprobs(body: ChatBody | TextBody) -> int | None:
    if isinstance(body, TextBody):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise Failure(400, "top_logprobs without logprobs: set logprobs to true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _chosen(options: type, body: GenerationBody, suggested: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options of a request: as it says, else as suggested, else those of requests that say nothing."""
    values = {}
    for declared in option_fields(options):
        prefix, _, name = (declared.request or ".").rpartition(".")
        if prefix not in ("", "spaceport"):
            continue
        asked = getattr(body.spaceport if prefix else body, name, None)
        choices = (asked, (suggested or {}).get(declared.name), declared.request_default)
        values[declared.name] = next((value for value in choices if value is not None), None)
    return values


def _biases(body: GenerationBody) -> dict[int, float]:
    """Biases by token id."""
    try:
        return {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    except ValueError as error:
        raise Failure(400, f"logit_bias: {error}: expected token ids as keys", param="logit_bias") from error


def _sampling(body: GenerationBody, suggested: Mapping[str, Any], choice: int) -> Sampling:
    """How tokens are chosen: as the request says, else as the model's publisher suggests, else as in OpenAI's API."""
    values, biases = _chosen(Sampling, body, suggested), _biases(body)
    seed = None if body.seed is None else (body.seed + choice) % _SEEDS
    top_k = 0 if values["top_k"] == -1 else values["top_k"]  # vLLM spells "all tokens" as -1
    kept = {token: bias for token, bias in biases.items() if bias != -100}  # which bans a token, as OpenAI's API says
    return Sampling(
        **values | {"seed": seed, "top_k": top_k, "logit_bias": kept, "banned": biases.keys() - kept.keys()}
    )


def _formatted(response_format: ResponseFormat, whitespace: bool) -> list[Grammar]:
    if response_format.type == "text":
        return []
    if response_format.type == "json_object":
        return [Grammar(json_schema={"type": "object"}, json_whitespace=whitespace)]
    if response_format.json_schema is None:
        expected = '{"type": "json_schema", "json_schema": {"schema": …}}'
        raise Failure(400, f"response_format has no json_schema: expected {expected}", param="response_format")
    return [Grammar(json_schema=response_format.json_schema.schema, json_whitespace=whitespace)]


def json_whitespace(body: GenerationBody) -> bool:
    """Whether JSON that a grammar describes may have whitespace between its tokens."""
    return bool(_chosen(Grammar, body)["json_whitespace"])


def _grammar(body: ChatBody | TextBody, tools: ToolUse) -> Grammar | None:
    own = _chosen(Grammar, body)
    grammars = [] if tools.grammar is None else [tools.grammar]
    if own["regex"] is not None or own["json_schema"] is not None:
        grammars.append(Grammar(**own))
    if isinstance(body, ChatBody) and body.response_format is not None:
        grammars += _formatted(body.response_format, own["json_whitespace"])
    if len(grammars) > 1:
        expected = "expected one of response_format, tool_choice and a grammar in spaceport"
        raise Failure(400, f"the request has several grammars: {expected}")
    return grammars[0] if grammars else None


def _check_sizes(body: GenerationBody, limits: Limits) -> None:
    """Raise for lists beyond the limits, before anything is computed from them for each choice."""
    if isinstance(body.stop, list):
        limits.check("stop has", len(body.stop), "stop_strings", " stop strings")
    limits.check("stop_token_ids has", len(body.stop_token_ids or ()), "banned_tokens", " entries")
    biases = len(body.logit_bias or ())
    if biases > limits.bias_entries + limits.banned_tokens:  # a bias of -100 bans a token
        limits.check("logit_bias has", biases, "bias_entries", " entries")


def decodings_of(
    body: ChatBody | TextBody, model: ServedModel, options: ServiceOptions, tools: ToolUse = NO_TOOLS
) -> list[Decoding]:
    """The options of each choice of a request."""
    choices = 1 if body.n is None else body.n
    if not 1 <= choices <= options.most_choices:
        raise Failure(400, f"n is {choices}: expected 1 to {options.most_choices}", param="n")
    _check_sizes(body, model.runtime.limits)
    grammar = _grammar(body, tools)
    suggested = model.runtime.bundle.manifest.generation_config
    if not suggested.get("do_sample"):
        suggested = {}
    decoding = Decoding(
        **_chosen(Decoding, body)
        | {
            "max_tokens": _max_tokens(body),
            "timeout": options.request_timeout,
            "logprobs": _logprobs(body),
            "grammar": grammar,
            **({"skip_special_tokens": False} if tools.shows_special_tokens else {}),
        }
    )
    return [replace(decoding, sampling=_sampling(body, suggested, choice)) for choice in range(choices)]
