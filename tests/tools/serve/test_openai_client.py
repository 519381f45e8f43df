"""OpenAI's Python client, unmodified, with a service on this machine: each protocol with a real bundle, then a fake engine."""

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
from spaceport.tools.serve.application import close_models
from spaceport.tools.serve.options import ServiceOptions
from support.chat_runtime import chat_runtime
from support.running_service import RunningService, running_service
from support.tool_files import tool_files

KEY = "sk-test"
PROMPT = "import json\n\n\ndef load(path):\n"
USERS = ["Explain the parameters of move( source, target )", "How is the weather in Oslo?", PROMPT]
TOKENS = 24
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": TOKENS}
SLOW: dict[str, Any] = {**GREEDY, "model": "slow", "prompt": PROMPT, "max_tokens": 400}


def messages(user: str = USERS[0]) -> Any:
    return [{"role": "user", "content": user}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_files(tmp_path_factory.mktemp("client") / "hermes", "hermes")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[RunningService]:
    slow = partial(chat_runtime, requests=1, delay=0.005)
    with running_service({"demo": partial(chat_runtime, folder), "slow": slow}, ServiceOptions(keys=(KEY,))) as found:
        yield found


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Iterator[Runtime]:
    with chat_runtime(folder, requests=1, prefix_cache=False) as found:
        yield found


def client_of(service: RunningService, **options: Any) -> Any:
    return openai.OpenAI(base_url=service.url, api_key=KEY, **{"max_retries": 0, "timeout": 60, **options})


@pytest.fixture
def client(service: RunningService) -> Iterator[Any]:
    with client_of(service) as found:
        yield found
    service.wait_until_idle()


def chat(client: Any, user: str = USERS[0], **fields: Any) -> Any:
    return client.chat.completions.create(**{**GREEDY, "messages": messages(user), **fields})


# Answers


def check_chats(client: Any, runtime: Runtime) -> None:
    """Whole and streamed answers to messages are those of a runtime."""
    for user in USERS:
        expected = runtime.generate(messages(user), Decoding(max_tokens=TOKENS, fork=False))
        answer = chat(client, user)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
        assert choice.finish_reason == ("stop" if expected.ending == "end" else "length")
        assert answer.usage.prompt_tokens == len(expected.prompt_tokens)
        assert answer.usage.completion_tokens == expected.statistics.tokens
        *parts, last = chat(client, user, stream=True, stream_options={"include_usage": True})
        assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text
        assert parts[0].choices[0].delta.role == "assistant"
        assert parts[-1].choices[0].finish_reason == choice.finish_reason
        assert (last.choices, last.usage.completion_tokens) == ([], expected.statistics.tokens)
        assert last.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def check_texts(client: Any, runtime: Runtime) -> None:
    """Texts and token ids are continued as a runtime does."""
    expected = runtime.generate(PROMPT, Decoding(max_tokens=TOKENS, fork=False))
    ids = list(expected.prompt_tokens)
    for prompt in (PROMPT, ids, [PROMPT, PROMPT], [ids]):
        answer = client.completions.create(prompt=prompt, **GREEDY, extra_body={"return_token_ids": True})
        assert {one.text for one in answer.choices} == {expected.text}
        assert answer.choices[0].model_extra["token_ids"] == list(expected.tokens)
    parts = client.completions.create(prompt=PROMPT, stream=True, **GREEDY)
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected.text


def check_responses(client: Any, runtime: Runtime) -> None:
    """Responses, whole and as events, have the text of a runtime."""
    expected = runtime.generate(messages(), Decoding(max_tokens=TOKENS, fork=False))
    given = {"model": "demo", "input": USERS[0], "max_output_tokens": TOKENS, "temperature": 0}
    whole = client.responses.create(**given)
    assert whole.output_text == expected.text
    assert whole.usage.output_tokens == expected.statistics.tokens
    with client.responses.stream(**given) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    assert events[0].type == "response.created"
    last = "response.completed" if whole.status == "completed" else "response.incomplete"
    assert (events[-1].type, events[-1].response.output_text) == (last, expected.text)


@pytest.mark.slow
def test_a_real_bundle_gives_the_answers_of_its_runtime_in_each_protocol(demo_bundle: Path) -> None:
    opener = partial(Runtime.open, demo_bundle, max_requests=4, prefix_cache=True, step_costs="free")
    with (
        running_service({"demo": opener}) as service,
        client_of(service) as client,
        Runtime.open(demo_bundle, step_costs="free") as runtime,
    ):
        for check in (check_chats, check_texts, check_responses):
            check(client, runtime)
        service.wait_until_idle()


def test_32_clients_at_a_time_get_the_answers_of_the_runtime(service: RunningService, runtime: Runtime) -> None:
    decoding = Decoding(max_tokens=TOKENS, fork=False)
    expected = {user: runtime.generate(messages(user), decoding) for user in USERS}

    async def ask(client: Any, number: int) -> tuple[str, list[int] | None]:
        user = USERS[number % len(USERS)]
        if number % 3:
            (choice,) = (await chat(client, user, extra_body={"return_token_ids": True})).choices
            return choice.message.content, choice.model_extra["token_ids"]
        text = ""
        async for part in await chat(client, user, stream=True):
            text += part.choices[0].delta.content or ""
        return text, None

    async def ask_all() -> list[tuple[str, list[int] | None]]:
        async with openai.AsyncOpenAI(base_url=service.url, api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(32)))

    for number, (text, tokens) in enumerate(asyncio.run(ask_all())):
        completion = expected[USERS[number % len(USERS)]]
        assert text == completion.text
        assert tokens in (None, list(completion.tokens))
    service.wait_until_idle()


# Helpers of the client


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Oslo", "Rome"]
    tomorrow: bool


TOOL = openai.pydantic_function_tool(Weather, name="weather")
CALLING: dict[str, Any] = {
    **GREEDY,
    "messages": messages(USERS[1]),
    "tools": [TOOL],
    "tool_choice": "required",
    "max_tokens": 200,
    "parallel_tool_calls": False,
}


def test_the_streaming_helper_collects_the_answer(client: Any) -> None:
    stop = chat(client).choices[0].message.content[12:15]  # this client raises an error where the length is the end
    whole = chat(client, stop=stop)
    assert whole.choices[0].finish_reason == "stop"
    given = {**GREEDY, "messages": messages(), "stop": stop, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**given) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_completion()
    assert found.choices[0].message.content == whole.choices[0].message.content
    assert found.usage.completion_tokens == whole.usage.completion_tokens
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_json_answers_are_parsed_into_the_type_that_was_asked_for(client: Any) -> None:
    given = {**GREEDY, "messages": messages(), "max_tokens": 100}
    message = client.chat.completions.parse(response_format=Weather, **given).choices[0].message
    assert isinstance(message.parsed, Weather)
    assert json.loads(message.content) == message.parsed.model_dump()
    with client.chat.completions.stream(response_format=Weather, **given) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == message.parsed
    given = {"model": "demo", "input": "Hi", "max_output_tokens": 100, "temperature": 0}
    assert isinstance(client.responses.parse(text_format=Weather, **given).output_parsed, Weather)


def test_arguments_of_calls_are_parsed_streamed_and_answered(client: Any) -> None:
    message = client.chat.completions.parse(**CALLING).choices[0].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert Weather.model_validate_json(call.function.arguments) == call.function.parsed_arguments
    with client.chat.completions.stream(**CALLING) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == ("weather", call.function.arguments)
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history = [*messages(USERS[1]), message.model_dump(exclude_none=True, exclude={"parsed"}), result]
    answer = client.chat.completions.create(**{**CALLING, "messages": history, "tool_choice": "none"})
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage.completion_tokens > 0
    given = {"model": "demo", "input": messages(USERS[1]), "tools": [{"type": "function", **TOOL["function"]}]}
    found = client.responses.create(**given, temperature=0, tool_choice="required", parallel_tool_calls=False)
    (item,) = found.output
    assert (item.type, item.name) == ("function_call", "weather")
    Weather.model_validate_json(item.arguments)


# Clients that leave


def test_closing_a_stream_and_a_timeout_end_the_request(service: RunningService) -> None:
    with client_of(service) as client:
        stream = client.completions.create(**SLOW, stream=True)
        next(iter(stream))
        assert service.statuses["slow"].active_requests == 1
        stream.close()
        service.wait_until_idle()
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.1).completions.create(**SLOW)
        service.wait_until_idle()


def test_a_cancelled_task_ends_its_request(service: RunningService) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=service.url, api_key=KEY, max_retries=0) as client:
            for stream in (False, True):
                task = asyncio.create_task(read(client, stream))
                await asyncio.to_thread(service.wait_until_busy)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await asyncio.to_thread(service.wait_until_idle)

    async def read(client: Any, stream: bool) -> None:
        answer = await client.completions.create(**SLOW, n=4, stream=stream)
        if stream:
            async for _ in answer:
                pass

    asyncio.run(leave())


# Errors


def test_a_refused_request_is_sent_again_as_the_service_asks() -> None:
    opener = partial(chat_runtime, requests=1, delay=0.005, queue_limit=0)
    given = {**SLOW, "model": "demo", "max_tokens": 150}
    with (
        running_service({"demo": opener}) as narrow,
        client_of(narrow) as impatient,
        client_of(narrow, max_retries=5) as patient,
    ):
        events = iter(impatient.completions.create(**given, stream=True, extra_body={"disable_spec_decode": True}))
        next(events)
        with pytest.raises(openai.InternalServerError) as refused:
            impatient.completions.create(**given)
        assert (refused.value.status_code, refused.value.code) == (503, "queue_full")
        assert refused.value.response.headers["retry-after"] == "1"
        raw = patient.completions.with_raw_response.create(**{**given, "max_tokens": 4})
        assert raw.retries_taken >= 1
        assert raw.parse().choices[0].finish_reason == "length"


def test_models_and_errors_have_the_classes_of_the_client(client: Any, service: RunningService) -> None:
    for fields, param in (
        ({"temperature": -1}, "temperature"),
        ({"n": 99}, "n"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"max_tokens": "many"}, "max_tokens"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as invalid:
                chat(client, **fields, stream=stream)
            assert (invalid.value.type, invalid.value.param) == ("invalid_request_error", param)
    assert [model.id for model in client.models.list().data] == ["demo", "slow"]
    assert client.models.retrieve("demo").model_extra["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(client, model="other")
    assert unknown.value.code == "model_not_found"
    for call in (partial(client.models.retrieve, "other"), partial(client.embeddings.create, model="demo", input="a")):
        with pytest.raises(openai.NotFoundError):
            call()
    with client_of(service) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.with_options(api_key="sk-wrong").models.list()


def test_a_stream_that_cannot_go_on_raises() -> None:
    with running_service({"slow": partial(chat_runtime, delay=0.005)}) as stopping, client_of(stopping) as client:
        stream = iter(client.completions.create(**SLOW, stream=True))
        next(stream)
        asyncio.run(close_models(stopping.service.models))
        with pytest.raises(openai.APIError, match="the service is stopping") as raised:
            list(stream)
        assert raised.value.code == "stopping"
