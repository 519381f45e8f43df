"""OpenAI's Python client, unmodified, with a service on this machine."""

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
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.tools.serve.application import close_models
from spaceport.tools.serve.options import ServiceOptions
from support.paths import DEMO
from support.running_service import RunningService, running_service

pytestmark = pytest.mark.slow

KEY = "sk-test"
PROMPT = "import json\n\n\ndef load(path):\n"
USERS = [one["user"] for one in json.loads((DEMO / "prompts.json").read_text("utf-8")).values() if "user" in one]
TOKENS = 24
LONG: dict[str, Any] = {
    "model": "demo",
    "prompt": PROMPT,
    "max_tokens": 450,
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "disable_spec_decode": True},
}


def messages(user: str = USERS[0]) -> Any:
    return [{"role": "user", "content": user}]


@pytest.fixture(scope="module")
def service(demo_bundle: Path) -> Iterator[RunningService]:
    opener = partial(Runtime.open, demo_bundle, max_requests=4, prefix_cache=True, step_costs="free")
    with running_service({"demo": opener}, ServiceOptions(keys=(KEY,))) as found:
        yield found


@pytest.fixture(scope="module")
def narrow(demo_bundle: Path) -> Iterator[RunningService]:
    """A service that answers one request at a time and lets none wait."""
    with running_service({"demo": partial(Runtime.open, demo_bundle, queue_limit=0)}) as found:
        yield found


@pytest.fixture(scope="module")
def runtime(demo_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(demo_bundle) as found:
        yield found


def client_of(service: RunningService, **options: Any) -> Any:
    return openai.OpenAI(base_url=service.url, api_key=KEY, **{"max_retries": 0, "timeout": 60, **options})


@pytest.fixture
def client(service: RunningService) -> Iterator[Any]:
    with client_of(service) as found:
        yield found
    service.wait_until_idle()


def chat(client: Any, user: str = USERS[0], **fields: Any) -> Any:
    given = {"model": "demo", "messages": messages(user), "max_tokens": TOKENS, "temperature": 0, **fields}
    return client.chat.completions.create(**given)


# Answers


def test_answers_and_streams_are_those_of_the_runtime(client: Any, runtime: Runtime) -> None:
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


def test_texts_and_token_ids_are_continued(client: Any, runtime: Runtime) -> None:
    expected = runtime.generate(PROMPT, Decoding(max_tokens=TOKENS, fork=False))
    given = {"model": "demo", "max_tokens": TOKENS, "temperature": 0}
    ids = list(expected.prompt_tokens)
    for prompt in (PROMPT, ids, [PROMPT, PROMPT], [ids]):
        answer = client.completions.create(prompt=prompt, **given, extra_body={"return_token_ids": True})
        assert {one.text for one in answer.choices} == {expected.text}
        assert answer.choices[0].model_extra["token_ids"] == list(expected.tokens)
    parts = client.completions.create(prompt=PROMPT, stream=True, **given)
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected.text


def test_32_clients_at_a_time_get_the_answers_of_the_runtime(service: RunningService, runtime: Runtime) -> None:
    decoding = Decoding(max_tokens=TOKENS, fork=False)
    expected = {user: runtime.generate(messages(user), decoding) for user in USERS}

    async def ask(client: Any, number: int) -> tuple[str, list[int] | None]:
        user, given = USERS[number % len(USERS)], {"extra_body": {"return_token_ids": True}}
        if number % 3:
            (choice,) = (await chat(client, user, **given)).choices
            return choice.message.content, choice.model_extra["token_ids"]
        text = ""
        async for part in await chat(client, user, stream=True, **given):
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


def test_the_streaming_helper_collects_the_answer(client: Any) -> None:
    stop = chat(client).choices[0].message.content[12:15]  # this client raises an error where the length is the end
    whole = chat(client, stop=stop)
    assert whole.choices[0].finish_reason == "stop"
    given = {"model": "demo", "messages": messages(), "max_tokens": TOKENS, "temperature": 0, "stop": stop}
    with client.chat.completions.stream(**given, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_completion()
    assert found.choices[0].message.content == whole.choices[0].message.content
    assert found.usage.completion_tokens == whole.usage.completion_tokens
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_choices_and_seeds(client: Any, runtime: Runtime) -> None:
    found = chat(client, n=3, seed=5, temperature=0.9).choices
    assert [one.index for one in found] == [0, 1, 2]
    for number, choice in enumerate(found):
        sampling = Sampling(temperature=0.9, seed=5 + number)
        expected = runtime.generate(messages(), Decoding(max_tokens=TOKENS, fork=False, sampling=sampling))
        assert choice.message.content == expected.text
    texts = ["", "", ""]
    for part in chat(client, n=3, seed=5, temperature=0.9, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [one.message.content for one in found]


class Answer(BaseModel):
    """What a JSON answer has."""

    n: Literal[1, 2]
    ready: bool


def test_json_answers_are_parsed_into_the_type_that_was_asked_for(client: Any) -> None:
    given = {"model": "demo", "messages": messages(), "max_tokens": 60, "temperature": 0}
    message = client.chat.completions.parse(response_format=Answer, **given).choices[0].message
    assert isinstance(message.parsed, Answer)
    assert json.loads(message.content) == message.parsed.model_dump()
    with client.chat.completions.stream(response_format=Answer, **given) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == message.parsed


def test_log_probabilities(client: Any, runtime: Runtime) -> None:
    expected = runtime.generate(messages(), Decoding(max_tokens=6, fork=False, logprobs=2)).logprobs
    found = chat(client, max_tokens=6, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert [bytes(one.bytes) for one in found] == [bytes(one.bytes) for one in expected]
    assert [len(one.top_logprobs) for one in found] == [2] * 6
    score = runtime.score(PROMPT, top=1)
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    first, *scored = answer.choices[0].logprobs.token_logprobs
    assert first is None
    assert scored == pytest.approx([one.logprob for one in score.logprobs], abs=1e-4)


def test_models_are_listed(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("demo", "model")
    assert client.models.retrieve("demo").model_extra["max_model_len"] > 100


# Clients that leave


def test_closing_a_stream_ends_its_request(service: RunningService) -> None:
    with client_of(service) as client:
        stream = client.completions.create(**LONG, stream=True)
        next(iter(stream))
        assert service.statuses["demo"].active_requests == 1
        stream.close()
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
        answer = await client.completions.create(**{**LONG, "n": 4}, stream=stream)
        if stream:
            async for _ in answer:
                pass

    asyncio.run(leave())


def test_a_timeout_ends_its_request(service: RunningService) -> None:
    with client_of(service, timeout=0.1) as client:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(**{**LONG, "n": 4})
        service.wait_until_idle()


# Errors


def test_a_refused_request_is_sent_again_as_the_service_asks(narrow: RunningService) -> None:
    given = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    with client_of(narrow) as impatient, client_of(narrow, max_retries=5) as patient:
        busy = impatient.completions.create(**LONG, stream=True)
        events = iter(busy)
        next(events)
        with pytest.raises(openai.InternalServerError) as refused:
            impatient.completions.create(**given)
        assert (refused.value.status_code, refused.value.code) == (503, "queue_full")
        assert refused.value.response.headers["retry-after"] == "1"
        raw = patient.with_options(timeout=60).completions.with_raw_response.create(**given)
        assert raw.retries_taken >= 1
        assert raw.parse().choices[0].finish_reason == "length"
        list(events)


def test_errors_have_the_classes_of_the_client(client: Any, service: RunningService) -> None:
    for fields, param in (
        ({"temperature": -1}, None),
        ({"n": 99}, "n"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"max_tokens": "many"}, "max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as invalid:
            chat(client, **fields)
        assert invalid.value.type == "invalid_request_error"
        assert param in (None, invalid.value.param)
        with pytest.raises(openai.BadRequestError):
            chat(client, **fields, stream=True)
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(client, model="other")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="demo", input="a")
    with client_of(service) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.with_options(api_key="sk-wrong").models.list()


def test_a_stream_that_cannot_go_on_raises(demo_bundle: Path) -> None:
    with running_service({"demo": partial(Runtime.open, demo_bundle)}) as stopping, client_of(stopping) as client:
        stream = iter(client.completions.create(**LONG, stream=True))
        next(stream)
        asyncio.run(close_models(stopping.service.models))
        with pytest.raises(openai.APIError, match="the service is stopping") as raised:
            list(stream)
        assert raised.value.code == "stopping"
