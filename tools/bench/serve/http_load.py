"""HTTP load: the requests of a run on an OpenAI-compatible service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.serve.exchange import REFUSED, Exchange
from spaceport.tools.bench.serve.http_client import Address, BadResponse, Connection
from spaceport.tools.bench.serve.load_run import Clock, Send
from spaceport.tools.bench.serve.workload import PlannedRequest, Workload

_TIMEOUT = 300.0  # seconds for one answer
_DONE = "[DONE]"


@dataclass(frozen=True)
class Target:
    """A model of a service."""

    address: Address
    model: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of all requests."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


@asynccontextmanager
async def sender(
    target: Target, workload: Workload, prompts: Sequence[Prompt], clock: Clock
) -> AsyncGenerator[Send, None]:
    """A function that sends requests to a service and records what comes back."""
    load = _HttpLoad(target, workload, prompts, clock)
    try:
        yield load.send
    finally:
        await load.close()


class _HttpLoad:
    """The connections of a run: one per client, reused while the service allows it."""

    def __init__(self, target: Target, workload: Workload, prompts: Sequence[Prompt], clock: Clock) -> None:
        self._target = target
        self._workload = workload
        self._prompts = prompts
        self._clock = clock
        self._idle: dict[int, Connection] = {}  # by client

    async def send(self, client: int, request: PlannedRequest, exchange: Exchange) -> None:
        """Send a request and read its answer as the client does."""
        connection = None
        complete = False
        try:
            connection = await self._connection(client, request)
            complete = await asyncio.wait_for(self._answer(connection, request, exchange), _TIMEOUT)
        except asyncio.TimeoutError:
            exchange.error = f"no answer within {_TIMEOUT:g} s"
        except (OSError, ValueError, KeyError, IndexError) as error:
            exchange.error = f"{type(error).__name__}: {error}"
        if connection is None:
            return
        if complete and connection.reusable and request.behaviour == "read":
            self._idle[client] = connection
        else:
            await connection.close(reset=request.behaviour == "drop")

    async def close(self) -> None:
        """Close the connections that wait for another request."""
        for connection in self._idle.values():
            await connection.close()

    async def _connection(self, client: int, request: PlannedRequest) -> Connection:
        idle = self._idle.pop(client, None)
        if idle is not None and idle.reusable and request.behaviour != "slow":
            return idle
        if idle is not None:
            await idle.close()
        return await Connection.open(self._target.address, slow=request.behaviour == "slow")

    async def _answer(self, connection: Connection, request: PlannedRequest, exchange: Exchange) -> bool:
        """Whether the answer was read to its end."""
        path, body = request_body(self._target.model, self._prompts[request.prompt], request, self._workload)
        work = connection.request("POST", path, body, self._target.headers)
        if request.leaves and not request.streamed:  # leaves while the answer is generated
            try:
                head = await asyncio.wait_for(work, request.events * self._workload.pause)
            except asyncio.TimeoutError:
                exchange.status = 200
                return False
        else:
            head = await work
        exchange.status = head.status
        if head.status != 200:
            await _refusal(connection, exchange, head.headers)
            return True
        if request.streamed:
            return await self._stream(connection, request, exchange)
        read_answer(json.loads(await connection.body()), exchange)
        return True

    async def _stream(self, connection: Connection, request: PlannedRequest, exchange: Exchange) -> bool:
        async for line in connection.lines():
            if not line.startswith(b"data: "):
                continue
            content = line[len(b"data: ") :].decode()
            if content == _DONE:
                continue
            if read_event(json.loads(content), exchange):
                exchange.text_times.append(self._clock())
                if request.behaviour == "slow":
                    await asyncio.sleep(self._workload.pause)
            if request.leaves and len(exchange.text_times) >= request.events:
                return False
        return True


def request_body(model: str, prompt: Prompt, request: PlannedRequest, workload: Workload) -> tuple[str, bytes]:
    """The path and the body of a request: greedy decoding of messages, a text or token ids."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": workload.max_tokens,
        "temperature": 0,
        "stream": request.streamed,
        "return_token_ids": True,
        "disable_spec_decode": not workload.drafts,
    }
    if request.streamed:
        body["stream_options"] = {"include_usage": True}
    is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
    body["messages" if is_chat else "prompt"] = prompt
    return "/v1/chat/completions" if is_chat else "/v1/completions", json.dumps(body).encode()


def read_event(event: Mapping[str, Any], exchange: Exchange) -> bool:
    """Add an event to the exchange; returns whether it has text."""
    if (error := event.get("error")) is not None:
        exchange.error = str(error.get("message") if isinstance(error, Mapping) else error)
        return False
    _read_report(event, exchange)
    text = ""
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        text += (choice.get("text") if delta is None else delta.get("content")) or ""
        _read_choice(choice, exchange)
    exchange.text += text
    return bool(text)


def read_answer(answer: Mapping[str, Any], exchange: Exchange) -> None:
    """Add a whole answer to the exchange."""
    (choice,) = answer["choices"]
    exchange.text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
    _read_choice(choice, exchange)
    _read_report(answer, exchange)


def _read_choice(choice: Mapping[str, Any], exchange: Exchange) -> None:
    exchange.ending = choice.get("finish_reason") or exchange.ending
    if (ids := choice.get("token_ids")) is not None:
        exchange.token_ids = [*(exchange.token_ids or ()), *ids]


def _read_report(found: Mapping[str, Any], exchange: Exchange) -> None:
    if (usage := found.get("usage")) is not None:
        exchange.tokens = usage["completion_tokens"]
    if (metrics := found.get("metrics")) is not None:
        exchange.drafts = metrics.get("speculative_decoding")


async def _refusal(connection: Connection, exchange: Exchange, headers: Mapping[str, str]) -> None:
    content = await connection.body()
    if exchange.status in REFUSED:
        exchange.retry_after = float(headers.get("retry-after", 1.0))
    else:
        exchange.error = content[:300].decode("utf-8", "replace")


async def get_json(target: Target, path: str) -> tuple[int, Any]:
    """Status and JSON of an endpoint; the JSON is None if the body is not."""
    connection = await Connection.open(target.address)
    try:
        head = await connection.request("GET", path, headers=target.headers)
        try:
            return head.status, json.loads(await connection.body())
        except ValueError:
            return head.status, None
    finally:
        await connection.close()


async def model_of(address: Address, key: str) -> str:
    """The name of the first model of a service."""
    status, found = await get_json(Target(address, "", key), "/v1/models")
    if status != 200 or not isinstance(found, dict) or not found.get("data"):
        raise BadResponse(f"GET {address.url}/v1/models answered {status}: expected a list of models")
    return str(found["data"][0]["id"])
