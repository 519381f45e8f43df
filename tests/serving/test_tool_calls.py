"""Tool calls over HTTP: enforced and found calls with templates of each format, whole and streamed, and invalid tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from starlette.testclient import TestClient

from spaceport.serving import tool_use
from spaceport.serving.application import application
from support.chat_runtime import NO_DRAFTS, chat_runtime, only
from support.tool_files import TEMPLATES, tool_files

CITY = {"type": "string", "enum": ["Oslo", "Rome"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
MESSAGES = [{"role": "user", "content": "How is the weather in Oslo?"}]
FORMATS = sorted(TEMPLATES)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("tools")
    openers = {name: partial(chat_runtime, tool_files(folder / name, name)) for name in FORMATS}
    with TestClient(application(openers)) as found:
        yield found


def request_of(model: str, **fields: Any) -> dict[str, Any]:
    given = {"model": model, "messages": MESSAGES, "tools": [WEATHER, NOW], "max_tokens": 200, "temperature": 0}
    return {name: value for name, value in {**given, **fields}.items() if value is not ...}


def ask(client: TestClient, model: str, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json=request_of(model, **fields))
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def streamed(client: TestClient, model: str, **fields: Any) -> tuple[dict[str, Any], str, list[dict[str, Any]]]:
    """The message that the deltas make, the reason of its end, and the deltas."""
    response = client.post("/v1/chat/completions", json=request_of(model, stream=True, **fields))
    assert response.status_code == 200, response.text
    events = [json.loads(one.removeprefix("data: ")) for one in response.text.split("\n\n")[:-2]]
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for event in events:
        delta = event["choices"][0]["delta"]
        message["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:  # the first part: it has the name
                assert (call["index"], call["type"]) == (len(message["tool_calls"]), "function")
                message["tool_calls"].append({**call["function"], "id": call["id"]})
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message, events[-1]["choices"][0]["finish_reason"], [event["choices"][0]["delta"] for event in events]


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = [one.get("function", one) for one in message["tool_calls"]]
    return [(one["name"], one["arguments"]) for one in calls]


@pytest.mark.parametrize("model", ["json", "mistral"])
def test_a_required_call_is_the_same_whole_and_streamed_with_and_without_drafts(client: TestClient, model: str) -> None:
    expected = ask(client, model, tool_choice="required", spaceport=NO_DRAFTS)
    assert calls_of(ask(client, model, tool_choice="required")["message"]) == calls_of(expected["message"])
    message, reason, deltas = streamed(client, model, tool_choice="required")
    assert calls_of(message) == calls_of(expected["message"])
    assert len(calls_of(message)) >= 1
    assert (message["content"], reason) == ("", expected["finish_reason"])
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    given = {"tool_choice": "required", "temperature": 1.0, "seed": 3, "parallel_tool_calls": False}
    plain = ask(client, model, **given, spaceport=NO_DRAFTS)
    assert calls_of(plain["message"]) == calls_of(ask(client, model, **given)["message"])
    ((name, arguments),) = calls_of(plain["message"])
    assert name == "now" or json.loads(arguments) in ({"city": "Oslo"}, {"city": "Rome"})
    (call,) = plain["message"]["tool_calls"]
    assert len(call["id"]) == 9 if model == "mistral" else call["id"].startswith("call_")


def text_of(model: str, call: str) -> str:
    form = {"hermes": "<tool_call>\n{}\n</tool_call>", "llama3": "{}", "json": "[{}]"}[model]
    return form.replace("{}", call)


@pytest.mark.parametrize("model", ["llama3", "json"])
def test_calls_in_any_text_are_found(client: TestClient, model: str) -> None:
    call = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    form = {"spaceport": only(text_of(model, call))}
    choice = ask(client, model, **form)
    assert choice["finish_reason"] == "tool_calls"
    assert calls_of(choice["message"]) == [("weather", '{"city": "Bonn"}')]
    assert choice["message"]["content"] is None
    message, reason, _ = streamed(client, model, **form)
    assert (calls_of(message), message["content"], reason) == ([("weather", '{"city": "Bonn"}')], "", "tool_calls")
    for other in ({"tool_choice": "none"}, {"tools": [NOW]}, {"tools": ...}):
        plain = ask(client, model, **form, **other)
        assert plain["message"] == {"role": "assistant", "content": text_of(model, call), "refusal": None}
        assert plain["finish_reason"] == "stop"


def test_a_conversation_goes_on_after_a_call_that_was_cut_off(client: TestClient) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    cut = ask(client, "hermes", tool_choice=tool, max_tokens=42)
    assert cut["finish_reason"] == "length"
    ((_, arguments),) = calls_of(cut["message"])
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    result = {"role": "tool", "tool_call_id": cut["message"]["tool_calls"][0]["id"], "content": "error: no JSON"}
    assert ask(client, "hermes", messages=[*MESSAGES, cut["message"], result], max_tokens=2)["message"]


def test_text_before_a_call_is_content(client: TestClient) -> None:
    text = "I look.\n" + text_of("hermes", '{"name": "now"}') * 2
    choice = ask(client, "hermes", spaceport=only(text))
    assert (choice["message"]["content"], calls_of(choice["message"])) == ("I look.", [("now", "{}")] * 2)
    single = ask(client, "hermes", spaceport=only(text), parallel_tool_calls=False)
    assert calls_of(single["message"]) == [("now", "{}")]


def test_a_call_in_a_code_block_is_found_and_its_format_logged_once(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    tool_use._log_other_format.cache_clear()
    with caplog.at_level("INFO", "spaceport.service"):
        message, reason, _ = streamed(client, "hermes", spaceport=only('I look.\n```json\n{"name": "now"}\n```'))
        assert (calls_of(message), message["content"], reason) == ([("now", "{}")], "I look.", "tool_calls")
        for _ in range(2):
            own = only(text_of("hermes", '{"name": "now"}'))
            assert "tool_calls" not in ask(client, "json", spaceport=own)["message"]
    assert [entry.getMessage() for entry in caplog.records if "format" in entry.getMessage()] == [
        "hermes writes calls in the format json, expected hermes: try --tool-format json",
        "json writes calls in the format hermes, expected json: try --tool-format hermes",
    ]


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


INVALID: list[tuple[dict[str, Any], str, str | None]] = [
    *(({"tools": tools, "tool_choice": "required"}, message, "tools") for tools, message in (
        ([{"type": "function"}], "tools[0].function is None"),
        ([{"type": "retrieval"}], "tools[0] is an object"),
        *(([tool(name=name)], "tools[0].function.name is ") for name in ("", "a b", 'a"}\n', "x" * 65, 3)),
        ([tool(), tool()], "tools[1].function.name is 'f' again"),
        ([tool(name=f"f{index}") for index in range(129)], "tools has 129 functions"),
        ([tool(description=[1])], "tools[0].function.description is a list"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters.type is 'string'"),
        ([tool(parameters={"properties": {"a": 3}})], "tools[0].function.parameters.properties is an object"),
        ([tool(parameters={"description": "x" * 70_000})], "tools[0].function.parameters has 7"),
        ([tool(parameters={"properties": {"a": {"pattern": "(?=a)"}}})], "the grammar of tools cannot be used: "),
        ([tool(name=f"f{index}", parameters={"title": "x" * 1000}) for index in range(70)], "the grammar of tools has "),
    )),
    ({"tool_choice": "always"}, "tool_choice is 'always': expected none, auto, required or", "tool_choice"),
    ({"tool_choice": tool()}, "tool_choice names 'f': expected one of tools: weather", "tool_choice"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "the request has several grammars", None),
    ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "message 0: tool_calls[0] is 'f'", None),
]  # fmt: skip


def test_invalid_tools_choices_and_calls_are_named(client: TestClient) -> None:
    for fields, message, param in INVALID:
        response = client.post("/v1/chat/completions", json=request_of("hermes", **fields))
        error = response.json()["error"]
        assert (response.status_code, error["message"][: len(message)], error["param"]) == (400, message, param), fields
