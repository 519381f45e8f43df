"""Responses API: its items become messages; text, calls and JSON are those of the chat endpoint, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from spaceport.serving.application import application
from spaceport.serving.chat import ChatBody
from spaceport.serving.responses import ResponsesBody, chat_body
from support.chat_runtime import chat_runtime, only
from support.tool_files import tool_files

PROPERTIES = {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
}
NESTED = {"type": "function", "function": {name: WEATHER[name] for name in ("name", "parameters")}}
NAMED = {"type": "function", "name": "weather"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    opener = partial(chat_runtime, tool_files(tmp_path_factory.mktemp("responses") / "hermes", "hermes"))
    with TestClient(application({"demo": opener})) as found:
        yield found


def post(client: TestClient, **fields: Any) -> Any:
    given = {"model": "demo", "input": "Say hi.", "temperature": 0, "max_output_tokens": 24, **fields}
    response = client.post("/v1/responses", json=given)
    assert response.status_code == 200, response.text
    return response


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = post(client, **fields).json()
    return found


def events(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    found = []
    for one in post(client, stream=True, **fields).text.split("\n\n")[:-1]:
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def chat(client: TestClient, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Say hi."}]
    given = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 24, **fields}
    found: dict[str, Any] = client.post("/v1/chat/completions", json=given).json()
    return found


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_a_response_has_the_text_of_the_chat_endpoint(client: TestClient) -> None:
    expected = chat(client)
    found = ask(client, metadata={"a": "b"}, store=True)
    (item,) = found["output"]
    assert item["content"] == [
        {"type": "output_text", "text": expected["choices"][0]["message"]["content"], "annotations": []}
    ]
    assert (item["type"], item["role"]) == ("message", "assistant")
    assert found["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert found["usage"]["output_tokens"] == expected["usage"]["completion_tokens"]
    assert found["id"].startswith("resp_")
    assert (found["object"], found["metadata"], found["store"]) == ("response", {"a": "b"}, False)
    assert found["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_an_answer_that_is_cut_off_is_incomplete(client: TestClient) -> None:
    found = ask(client, max_output_tokens=2)
    assert (found["status"], found["output"][0]["status"]) == ("incomplete", "incomplete")
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events(client, max_output_tokens=2)[-1]["type"] == "response.incomplete"
    whole = ask(client, spaceport=only("Hi."))
    found = (whole["status"], whole["incomplete_details"], whole["output"][0]["status"])
    assert found == ("completed", None, "completed")
    given = {"spaceport": only("Hi."), "stop": "H"}  # without text, there is an empty message
    for output in (ask(client, **given)["output"], events(client, **given)[-1]["response"]["output"]):
        assert [(one["type"], one["content"][0]["text"]) for one in output] == [("message", "")]


def test_the_events_of_a_text_make_its_response(client: TestClient) -> None:
    whole = ask(client, spaceport=only("Hello world."))
    found = events(client, spaceport=only("Hello world."))
    kinds = [one["type"].removeprefix("response.") for one in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    deltas = [one["delta"] for one in found if one["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "Hello world." == found[-4]["text"]
    last = found[-1]["response"]
    assert without_ids(last["output"]) == without_ids(whole["output"]) == without_ids([found[-2]["item"]])
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    assert {one.get("item_id", last["output"][0]["id"]) for one in found} == {last["output"][0]["id"]}


def test_calls_are_items_of_their_own_and_can_be_sent_back(client: TestClient) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    expected = chat(client, tools=[NESTED], tool_choice=choice, max_tokens=80)
    (call,) = expected["choices"][0]["message"]["tool_calls"]
    given = {"tools": [WEATHER], "tool_choice": NAMED, "max_output_tokens": 80}
    whole = ask(client, **given)
    assert without_ids(whole["output"]) == [{"type": "function_call", "status": "completed", **call["function"]}]
    found = events(client, **given)
    kinds = [one["type"].removeprefix("response.") for one in found]
    assert kinds[2] == "output_item.added"
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    deltas = [one["delta"] for one in found if one["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["function"]["arguments"] == found[-3]["arguments"]
    assert len(deltas) > 1
    assert without_ids(found[-1]["response"]["output"]) == without_ids(whole["output"])
    output = {"type": "function_call_output", "call_id": whole["output"][0]["call_id"], "output": "rain"}
    turns = [{"role": "user", "content": "Say hi."}, *whole["output"], output]
    second = ask(client, input=turns, tools=[WEATHER], max_output_tokens=4)
    assert second["usage"]["input_tokens"] > whole["usage"]["input_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0  # the first turn


def test_text_and_calls_are_items_in_their_order(client: TestClient) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    given = {"spaceport": only(f"I look. {call}{call}"), "tools": [WEATHER], "max_output_tokens": 200}
    for output in (ask(client, **given)["output"], events(client, **given)[-1]["response"]["output"]):
        assert [one["type"] for one in output] == ["message", "function_call", "function_call"]
        assert [one["status"] for one in output] == ["completed"] * 3
        assert output[0]["content"][0]["text"] == "I look."
        assert len({one["call_id"] for one in output[1:]}) == 2


def test_json_and_log_probabilities(client: TestClient) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"enum": [{"n": 1}]}}
    found = ask(client, text={"format": form}, top_logprobs=2)
    (part,) = found["output"][0]["content"]
    assert json.loads(part["text"]) == {"n": 1}
    assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    streamed = events(client, text={"format": form}, top_logprobs=2)
    deltas = [one["logprobs"] for one in streamed if one["type"] == "response.output_text.delta"]
    assert [one["token"] for entries in deltas for one in entries] == [one["token"] for one in part["logprobs"]]


# Input items as messages

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
        ({"spaceport": {"threads": True}}, "spaceport.threads"),
        ({"input": 3}, "input"),
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
        ({"text": {"formt": 1}}, "text.formt"),
    ],
)
def test_what_is_not_supported_is_named(client: TestClient, fields: dict[str, Any], param: str) -> None:
    response = client.post("/v1/responses", json={"model": "demo", "input": "Hi", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
