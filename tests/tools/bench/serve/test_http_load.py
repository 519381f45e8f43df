"""HTTP load: what clients send, read and leave, against a server that does exactly what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.serve.exchange import Exchange
from spaceport.tools.bench.serve.http_client import Address, address_of
from spaceport.tools.bench.serve.http_load import Target, get_json, model_of, sender
from spaceport.tools.bench.serve.load_run import LoadRun, run_load
from spaceport.tools.bench.serve.workload import Behaviour, PlannedRequest, Workload

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
PROMPTS: list[Prompt] = [[{"role": "user", "content": "a"}], "text", [1, 2]]


@dataclass
class Seen:
    """What the server got."""

    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    connections: int = 0
    left: list[str] = field(default_factory=list)  # how connections ended


def with_server(answer: Answer, check: Callable[[Address], Awaitable[None]]) -> Seen:
    """Run a check against a server that answers each request alike."""
    seen = Seen()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = dict(line.split(": ", 1) for line in lines)
                body = await reader.readexactly(int(headers["content-length"]))
                seen.paths.append(first.split()[1])
                seen.bodies.append(json.loads(body or b"{}"))
                seen.keys.append(headers.get("authorization", ""))
                await answer(writer)
        except asyncio.IncompleteReadError:
            seen.left.append("closed")
        except BrokenPipeError:
            seen.left.append("closed")
        except ConnectionResetError:
            seen.left.append("reset")
        finally:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            await check(Address("127.0.0.1", port, ""))
            await asyncio.sleep(0.05)  # the server notices who left

    asyncio.run(run())
    return seen


def reply(content: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(content)}\r\n{headers}\r\n".encode() + content


def chunk(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def events(*contents: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in contents)


STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DELTAS = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in ("", "on", "e")]
ENDING = [
    {"choices": [{"delta": {}, "finish_reason": "stop", "token_ids": [7]}]},
    {
        "choices": [],
        "usage": {"completion_tokens": 3},
        "metrics": {"speculative_decoding": {"num_spec_steps": 2}},
    },
]


async def stream(writer: asyncio.StreamWriter) -> None:
    content = b": ping\n\n" + events(*DELTAS, *ENDING) + b"data: [DONE]\n\n"
    writer.write(STREAM + chunk(content[:50]) + chunk(content[50:]) + chunk(b""))  # an event may come in two parts


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM)
    while not writer.transport.is_closing():
        writer.write(chunk(events(DELTAS[1])))
        await asyncio.sleep(0.005)


def requests(count: int, behaviour: Behaviour = "read", streamed: bool = True) -> list[PlannedRequest]:
    return [PlannedRequest(number, number % 3, behaviour, streamed, 3, 0.0) for number in range(count)]


def load(answer: Answer, planned: list[PlannedRequest], key: str = "", clients: int = 1) -> tuple[Seen, LoadRun]:
    workload = Workload(clients=clients, requests=len(planned), max_tokens=9, pause=0.01)
    runs: list[LoadRun] = []

    async def check(address: Address) -> None:
        target = Target(address, "m", key)
        runs.append(await run_load(workload, iter(planned), lambda clock: sender(target, workload, PROMPTS, clock)))

    return with_server(answer, check), runs[0]


def one(run: LoadRun) -> Exchange:
    (found,) = run.exchanges
    return found


def test_a_stream_is_read_to_its_end() -> None:
    seen, run = load(stream, requests(1), key="sk-1")
    found = one(run)
    assert (found.text, found.tokens, found.ending, found.outcome) == ("one", 3, "stop", "answered")
    assert (found.token_ids, found.drafts) == ([7], {"num_spec_steps": 2})
    assert len(found.text_times) == 2
    assert seen.keys == ["Bearer sk-1"]


def test_prompts_are_sent_to_the_endpoint_for_their_kind() -> None:
    seen, run = load(stream, requests(3))
    assert seen.paths == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert [body.get("messages", body.get("prompt")) for body in seen.bodies] == PROMPTS
    assert {(body["max_tokens"], body["temperature"], body["model"]) for body in seen.bodies} == {(9, 0, "m")}
    assert [body["disable_spec_decode"] for body in seen.bodies] == [False] * 3
    assert len(run.exchanges) == 3
    assert seen.connections == 1  # reused


def test_a_whole_answer_is_read() -> None:
    content = {
        "choices": [{"text": "abc", "finish_reason": "length", "token_ids": [1, 2]}],
        "usage": {"completion_tokens": 2},
    }

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(reply(json.dumps(content).encode()))

    _, run = load(answer, requests(1, streamed=False))
    found = one(run)
    assert (found.text, found.token_ids, found.tokens, found.outcome) == ("abc", [1, 2], 2, "answered")


def test_clients_leave_after_some_events() -> None:
    for behaviour, how in (("cancel", "closed"), ("drop", "reset")):
        seen, run = load(endless, requests(1, behaviour))  # type: ignore[arg-type]
        found = one(run)
        assert (found.outcome, len(found.text_times), found.text) == ("left", 3, "ononon"), behaviour
        assert seen.left == [how]


def test_clients_of_whole_answers_leave_while_these_are_generated() -> None:
    async def never(writer: asyncio.StreamWriter) -> None:
        del writer

    seen, run = load(never, requests(1, "cancel", streamed=False))
    assert one(run).outcome == "left"
    assert seen.left == ["closed"]


def test_slow_clients_pause_after_each_event() -> None:
    _, run = load(stream, requests(1, "slow"))
    found = one(run)
    assert (found.outcome, found.text) == ("answered", "one")
    assert found.ended - found.text_times[-1] >= 0.01


def test_refusals_differ_from_failures() -> None:
    async def full(writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b"{}", "503 Service Unavailable", "Retry-After: 0.01\r\n"))

    async def invalid(writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b'{"error": "no"}', "400 Bad Request"))

    async def broken(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(events(DELTAS[1])))
        writer.close()

    async def failed(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(events(DELTAS[1], {"error": {"message": "the engine failed"}})) + chunk(b""))

    refused = one(load(full, requests(1))[1])
    assert (refused.outcome, refused.retry_after, refused.error) == ("refused", 0.01, None)
    for answer, message in ((invalid, '"no"'), (broken, "closed before"), (failed, "the engine failed")):
        found = one(load(answer, requests(1))[1])
        assert found.outcome == "failed"
        assert message in str(found.error)


def test_several_clients_send_at_a_time() -> None:
    running: list[int] = []
    most: list[int] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.02)
        running.pop()
        await stream(writer)

    seen, run = load(answer, requests(12), clients=4)
    assert (len(run.exchanges), max(most), seen.connections) == (12, 4, 4)


def test_clients_start_one_after_the_other() -> None:
    workload = Workload(clients=4, requests=4, ramp=0.2)
    runs: list[LoadRun] = []

    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)  # so that each client sends one request
        await stream(writer)

    async def check(address: Address) -> None:
        target = Target(address, "m")
        work = run_load(workload, iter(requests(4)), lambda clock: sender(target, workload, PROMPTS, clock))
        runs.append(await work)

    with_server(late, check)
    started = [each.started for each in runs[0].exchanges]
    assert all(begun >= 0.05 * number for number, begun in enumerate(started))


def test_random_arrivals_do_not_wait_for_answers() -> None:
    waiting: list[asyncio.StreamWriter] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        waiting.append(writer)
        if len(waiting) == 5:  # the last one answers all
            for each in waiting:
                await stream(each)

    planned = [PlannedRequest(number, 0, "read", True, 0, 0.001) for number in range(5)]
    workload = Workload(requests=5, rate=1000.0)
    runs: list[LoadRun] = []

    async def check(address: Address) -> None:
        target = Target(address, "m")
        runs.append(await run_load(workload, iter(planned), lambda clock: sender(target, workload, PROMPTS, clock)))

    with_server(answer, check)
    assert [each.outcome for each in runs[0].exchanges] == ["answered"] * 5


def test_the_first_model_of_a_service_is_found() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b'{"data": [{"id": "one"}, {"id": "two"}]}'))

    async def check(address: Address) -> None:
        assert await model_of(address, "k") == "one"
        assert (await get_json(Target(address, ""), "/load"))[0] == 200

    assert with_server(answer, check).keys == ["Bearer k", ""]


def test_addresses_are_those_of_http_services() -> None:
    assert address_of("http://localhost:8000/v1/") == Address("localhost", 8000, "")
    assert address_of("http://[::1]:80/a/v1") == Address("::1", 80, "/a")
    for url in ("https://host:1", "host:8000", "http://", "http://host:99999", ""):
        with pytest.raises(OptionFault, match="expected http://HOST:PORT"):
            address_of(url)
