"""Chat: input items, tools and formats of the Responses API as those of the chat endpoint."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from spaceport.tools.serve.bodies import ChatBody
from spaceport.tools.serve.failures import Failure
from spaceport.tools.serve.responses.body import ResponsesBody, check_fields
from spaceport.tools.serve.responses.chat import chat_body

CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}', "id": "fc_1"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def converted(**fields: Any) -> ChatBody:
    return chat_body(msgspec.convert({"input": "Hi", **fields}, ResponsesBody))


HI = {"role": "user", "content": "Hi"}
INPUTS: list[tuple[Any, list[dict[str, Any]]]] = [
    ("Hi", [HI]),
    ([HI], [HI]),
    (
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "c"}]},
        ],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "c"},
        ],
    ),
    ([HI, CALL, CALL], [HI, {"role": "assistant", "content": "", "tool_calls": [CHAT_CALL, CHAT_CALL]}]),
    (
        [{"role": "assistant", "content": "I look."}, CALL, OUTPUT],
        [
            {"role": "assistant", "content": "I look.", "tool_calls": [CHAT_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
    ),
]


def test_the_input_becomes_messages() -> None:
    for given, expected in INPUTS:
        assert converted(input=given).messages == expected
    given = [{"role": "system", "content": "Be kind."}, HI]  # one message with the instructions
    system = {"role": "system", "content": "Be brief.\n\nBe kind."}
    assert converted(input=given, instructions="Be brief.").messages == [system, HI]


def test_tools_and_formats_are_those_of_the_chat_endpoint() -> None:
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    choice = {"type": "function", "name": "weather"}
    numbers = {"max_output_tokens": 7, "top_logprobs": 2, "seed": 3}
    body = converted(tools=[tool], tool_choice=choice, text={"format": form}, **numbers)
    function = {"name": "weather", "parameters": {"type": "object"}, "strict": True}
    assert body.tools == [{"type": "function", "function": function}]
    assert body.tool_choice == {"type": "function", "function": {"name": "weather"}}
    assert body.response_format is not None
    assert body.response_format.json_schema is not None
    assert (body.response_format.type, body.response_format.json_schema.schema) == ("json_schema", {"type": "object"})
    assert (body.max_completion_tokens, body.logprobs, body.top_logprobs, body.seed) == (7, True, 2, 3)
    assert converted(tool_choice="required").tool_choice == "required"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"spaceport": {"threads": True}}, "spaceport.threads"),
        ({"input": []}, "input"),
        ({"input": [{"content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type"),
        ({"input": [{"type": ["x"]}]}, "input[0].type"),
        ({"input": [{**CALL, "name": 3}]}, "input[0]"),
        ({"input": [{**OUTPUT, "call_id": None}]}, "input[0].call_id"),
        ({"input": [{**OUTPUT, "output": 3}]}, "input[0].output"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], param: str) -> None:
    body = msgspec.convert({"input": "Hi", **fields}, ResponsesBody)
    with pytest.raises(Failure) as caught:
        check_fields(body) or chat_body(body)
    assert (caught.value.status, caught.value.param) == (400, param)
