"""Fields: what each field of a request does, its bounds, and the fields of other servers that have no effect here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spaceport.runtime.limits import Limits

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
    found: dict[str, dict[str, dict[str, Any]]] = {
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
        "messages": {"array": {"minItems": 1}},
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
        found[name] = {"number": {"minimum": least, "maximum": most}}
    return found
