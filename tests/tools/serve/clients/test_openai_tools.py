"""OpenAI's Python client, unmodified: calls of functions and the Responses API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from spaceport.runtime.session import Runtime
from support.running_service import RunningService, running_service
from support.tool_bundle import tool_bundle

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow

PROPERTIES = {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"], "additionalProperties": False}
FLAT = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
NESTED = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CITIES = ({"city": "Oslo"}, {"city": "Rome"})
TEXT = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]


class City(BaseModel):
    city: Literal["Oslo", "Rome"]


@pytest.fixture(scope="module")
def service(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    bundle = tool_bundle(demo_bundle, tmp_path_factory.mktemp("tools") / "hermes", "hermes")
    opener = partial(Runtime.open, bundle, max_requests=2, prefix_cache=True, step_costs="free")
    with running_service({"demo": opener}) as found:
        yield found


@pytest.fixture
def client(service: RunningService) -> Iterator[Any]:
    with openai.OpenAI(base_url=service.url, api_key="unused", max_retries=0, timeout=60) as found:
        yield found
    service.wait_until_idle()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": MESSAGES, "tools": [NESTED], "max_tokens": 200, "temperature": 0, **fields}


def test_a_function_is_called_and_its_result_sent_back(client: Any) -> None:
    message = client.chat.completions.create(**chat(tool_choice=NAMED)).choices[0].message
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) in CITIES
    turns = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    answer = client.chat.completions.create(**chat(messages=turns, max_tokens=4)).choices[0]
    assert answer.message.content is not None


@pytest.mark.parametrize("fields", [{"tool_choice": "required", "parallel_tool_calls": False}, {"extra_body": {"structured_outputs": {"choice": [TEXT]}}}])  # fmt: skip
def test_the_accumulated_stream_is_the_whole_message(client: Any, fields: dict[str, Any]) -> None:
    whole = client.chat.completions.create(**chat(**fields)).choices[0]
    kinds = set()
    with client.chat.completions.stream(**chat(**fields)) as stream:
        for event in stream:
            kinds.add(event.type)
        found = stream.get_final_completion().choices[0]
    assert found.finish_reason == whole.finish_reason == "tool_calls"
    (call,), (expected,) = found.message.tool_calls, whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == (expected.function.name, expected.function.arguments)
    assert call.function.parsed_arguments in CITIES
    assert (found.message.content or None) == whole.message.content
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


def test_tools_of_pydantic_models_are_parsed(client: Any) -> None:
    tool = openai.pydantic_function_tool(City, name="weather")
    found = client.chat.completions.parse(**chat(tools=[tool], tool_choice=NAMED))
    (call,) = found.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, City)


def test_responses_are_parsed(client: Any) -> None:
    given = {"model": "demo", "input": "Hi", "temperature": 0, "max_output_tokens": 60}
    found = client.responses.create(**given, extra_body={"structured_outputs": {"choice": ["Hello."]}})
    assert (found.output_text, found.status) == ("Hello.", "completed")
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    call = client.responses.create(**given, tools=[FLAT], tool_choice={"type": "function", "name": "weather"}).output[0]
    assert json.loads(call.arguments) in CITIES
    turns = [
        {"role": "user", "content": "Hi"},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    again = client.responses.create(**{**given, "input": turns, "max_output_tokens": 4}, tools=[FLAT])
    assert again.output[0].type == "message"
    parsed = client.responses.parse(**given, text_format=City, instructions="Name a city.")
    assert isinstance(parsed.output_parsed, City)


def test_a_streamed_response_is_accumulated(client: Any) -> None:
    given = {"model": "demo", "input": "Hi", "temperature": 0, "max_output_tokens": 200, "tools": [FLAT]}
    more = {"extra_body": {"structured_outputs": {"choice": [TEXT]}}}
    snapshot = ""
    with client.responses.stream(**given, **more) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                snapshot = event.snapshot
        found = stream.get_final_response()
    assert snapshot == found.output_text == "I look."
    message, call = found.output
    assert (message.type, call.type, call.parsed_arguments) == ("message", "function_call", {"city": "Rome"})
    events = list(client.responses.create(**given, tool_choice="required", parallel_tool_calls=False, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output[0].name == "weather"


def test_responses_for_asyncio(service: RunningService) -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=service.url, api_key="unused") as client:
            given = {
                "model": "demo",
                "input": "Hi",
                "temperature": 0,
                "extra_body": {"structured_outputs": {"choice": ["Hello."]}},
            }
            async with client.responses.stream(**given) as stream:
                return await stream.get_final_response()

    assert asyncio.run(ask()).output_text == "Hello."


def test_what_is_not_supported_is_an_error_of_the_client(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
        client.responses.create(model="demo", input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].function.name"):
        client.chat.completions.create(**chat(tools=[{"type": "function", "function": {"name": "a b"}}]))
