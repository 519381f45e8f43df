"""OpenAI's Python client, unmodified: tools, and the Responses API."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from support.running_service import RunningService, running_service
from support.tool_bundle import tool_bundle

pytestmark = pytest.mark.slow

MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
TEXT = "import json\n"


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Oslo", "Rome"]
    tomorrow: bool


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_bundle(demo_bundle, tmp_path_factory.mktemp("tools") / "hermes", "hermes")


@pytest.fixture(scope="module")
def service(bundle: Path) -> Iterator[RunningService]:
    with running_service({"demo": partial(Runtime.open, bundle, max_requests=4, step_costs="free")}) as found:
        yield found


@pytest.fixture
def client(service: RunningService) -> Iterator[Any]:
    with openai.OpenAI(base_url=service.url, api_key="unused", max_retries=0, timeout=60) as found:
        yield found
    service.wait_until_idle()


def with_tools(**fields: Any) -> dict[str, Any]:
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    given = {"model": "demo", "messages": MESSAGES, "tools": tools, "tool_choice": "required", "temperature": 0}
    return {**given, "max_tokens": 200, "parallel_tool_calls": False, **fields}


def test_arguments_of_calls_are_parsed_into_their_type(client: Any) -> None:
    choice = client.chat.completions.parse(**with_tools()).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, call.type) == ("weather", "function")
    assert isinstance(call.function.parsed_arguments, Weather)
    assert Weather.model_validate_json(call.function.arguments) == call.function.parsed_arguments


def test_streamed_calls_are_those_of_the_whole_answer(client: Any) -> None:
    (expected,) = client.chat.completions.create(**with_tools()).choices[0].message.tool_calls
    with client.chat.completions.stream(**with_tools()) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_completion()
    (call,) = found.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == (expected.function.name, expected.function.arguments)
    assert isinstance(call.function.parsed_arguments, Weather)
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1


def test_the_result_of_a_call_is_answered(client: Any) -> None:
    message = client.chat.completions.create(**with_tools()).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    history = [*MESSAGES, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**with_tools(messages=history, tool_choice="none", max_tokens=8))
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage.completion_tokens > 0


def test_responses_are_those_of_the_runtime(client: Any, bundle: Path) -> None:
    with Runtime.open(bundle) as runtime:
        expected = runtime.generate([{"role": "user", "content": TEXT}], Decoding(max_tokens=24, fork=False))
    given = {"model": "demo", "input": TEXT, "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**given)
    assert whole.output_text == expected.text
    assert whole.usage.output_tokens == expected.statistics.tokens
    with client.responses.stream(**given) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    assert events[0].type == "response.created"
    last = "response.completed" if whole.status == "completed" else "response.incomplete"
    assert (events[-1].type, events[-1].response.output_text) == (last, expected.text)


def test_responses_call_functions(client: Any) -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")["function"]
    given = {"model": "demo", "input": MESSAGES, "tools": [{"type": "function", **tool}], "temperature": 0}
    found = client.responses.create(**given, tool_choice="required", max_output_tokens=200, parallel_tool_calls=False)
    (call,) = found.output
    assert (call.type, call.name) == ("function_call", "weather")
    Weather.model_validate_json(call.arguments)


def test_responses_are_parsed_into_the_type_that_was_asked_for(client: Any) -> None:
    given = {"model": "demo", "input": TEXT, "max_output_tokens": 100, "temperature": 0}
    found = client.responses.parse(text_format=Weather, **given)
    assert isinstance(found.output_parsed, Weather)
