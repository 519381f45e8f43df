"""OpenAI's Python client, unmodified, with a service on this machine: a real bundle in each protocol, else a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.serving.options import ServiceOptions
from support.chat_runtime import NO_DRAFTS, RunningService, chat_runtime, running_service
from support.tool_files import tool_files

KEY = "sk-test"
TOKENS = 24
PROMPT = "import json\n\n\ndef load(path):\n"
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": TOKENS}
SLOW: dict[str, Any] = {**GREEDY, "prompt": "import json\n", "max_tokens": 600, "extra_body": {"spaceport": NO_DRAFTS}}


def messages(user: str = "How is the weather in Oslo?") -> Any:
    return [{"role": "user", "content": user}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    opener = partial(chat_runtime, tool_files(tmp_path_factory.mktemp("client") / "hermes", "hermes"))
    with running_service({"demo": opener}, ServiceOptions(keys=(KEY,))) as found:
        yield found


@pytest.fixture(scope="module")
def narrow() -> Iterator[RunningService]:
    """A service that answers one request at a time, slowly, and lets none wait."""
    with running_service({"demo": partial(chat_runtime, requests=1, delay=0.005, queue_limit=0)}) as found:
        yield found


def client_of(service: RunningService, **options: Any) -> Any:
    return openai.OpenAI(base_url=service.url, api_key=KEY, **{"max_retries": 0, "timeout": 60, **options})


@pytest.fixture
def client(service: RunningService) -> Iterator[Any]:
    with client_of(service) as found:
        yield found
    service.wait_until_idle()


def chat(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(**{**GREEDY, "messages": messages(), **fields})


# Answers


@pytest.mark.slow
def test_a_real_bundle_gives_the_answers_of_its_runtime_in_each_protocol(demo_bundle: Path) -> None:
    opener = partial(Runtime.open, demo_bundle, max_requests=4, prefix_cache=True, step_costs="free")
    with (
        running_service({"demo": opener}) as service,
        client_of(service) as client,
        Runtime.open(demo_bundle, step_costs="free") as runtime,
    ):
        expected = runtime.generate(messages(), Decoding(max_tokens=TOKENS, fork=False))
        answer = chat(client)
        assert answer.choices[0].message.content == expected.text
        *parts, last = chat(client, stream=True, stream_options={"include_usage": True})
        assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text
        assert answer.usage.completion_tokens == last.usage.completion_tokens == expected.statistics.tokens
        given = {"model": "demo", "input": messages(), "max_output_tokens": TOKENS, "temperature": 0}
        whole = client.responses.create(**given)
        assert (whole.output_text, whole.usage.output_tokens) == (expected.text, expected.statistics.tokens)
        with client.responses.stream(**given) as stream:
            assert list(stream)[-1].response.output_text == expected.text
        expected = runtime.generate(PROMPT, Decoding(max_tokens=TOKENS, fork=False))
        for prompt in (PROMPT, [list(expected.prompt_tokens)] * 2):
            answer = client.completions.create(prompt=prompt, **GREEDY)
            assert {one.text for one in answer.choices} == {expected.text}
        parts = client.completions.create(prompt=PROMPT, stream=True, **GREEDY)
        assert "".join(part.choices[0].text for part in parts if part.choices) == expected.text
        service.wait_until_idle()


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Oslo", "Rome"]
    tomorrow: bool


def test_answers_are_parsed_into_a_type(client: Any) -> None:
    given = {**GREEDY, "messages": messages(), "max_tokens": 100, "response_format": Weather}
    message = client.chat.completions.parse(**given).choices[0].message
    assert json.loads(message.content) == message.parsed.model_dump()
    given = {"model": "demo", "input": "Hi", "max_output_tokens": 100, "temperature": 0}
    assert isinstance(client.responses.parse(text_format=Weather, **given).output_parsed, Weather)


def test_arguments_of_calls_are_parsed_streamed_and_answered(client: Any) -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")
    given = {**GREEDY, "messages": messages(), "tools": [tool], "tool_choice": "required", "max_tokens": 200}
    given["parallel_tool_calls"] = False
    message = client.chat.completions.parse(**given).choices[0].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**given) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == ("weather", call.function.arguments)
    assert "tool_calls.function.arguments.delta" in kinds
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history = [*messages(), message.model_dump(exclude_none=True, exclude={"parsed"}), result]
    answer = client.chat.completions.create(**{**given, "messages": history, "tool_choice": "none"})
    assert (answer.choices[0].message.tool_calls, answer.usage.completion_tokens) == (None, 200)


# Clients that leave, and errors


def test_clients_that_leave_end_their_requests(narrow: RunningService) -> None:
    async def cancel() -> None:
        async with openai.AsyncOpenAI(base_url=narrow.url, api_key=KEY, max_retries=0) as client:
            task = asyncio.create_task(client.completions.create(**SLOW))
            await asyncio.to_thread(narrow.wait_until_busy)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancel())
    narrow.wait_until_idle()
    with client_of(narrow) as client:
        stream = client.completions.create(**SLOW, stream=True)
        next(iter(stream))
        assert narrow.statuses["demo"].active_requests == 1
        stream.close()
        narrow.wait_until_idle()
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.1).completions.create(**SLOW)
        narrow.wait_until_idle()
    assert b'finished_reason="abort"' in narrow.service.metrics.text()


def test_models_and_errors_have_the_classes_of_the_client(client: Any, service: RunningService) -> None:
    assert [(model.id, model.object) for model in client.models.list().data] == [("demo", "model")]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as invalid:
            chat(client, temperature=-1, stream=stream)
        assert (invalid.value.type, invalid.value.param) == ("invalid_request_error", "temperature")
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(client, model="other")
    assert unknown.value.code == "model_not_found"
    with client_of(service) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.with_options(api_key="sk-wrong").models.list()
