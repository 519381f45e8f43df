"""Load of services: what clients send and read, against a server that does what a test says, and figures."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.load import run_figures
from spaceport.tools.bench.load_clients import (
    Address,
    Behaviour,
    Clock,
    HttpClients,
    LoadExchange,
    LoadRun,
    PlannedRequest,
    Target,
    Workload,
    planned,
    run_load,
)

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
PROMPTS: list[Prompt] = [[{"role": "user", "content": "a"}], "text", [1, 2]]


STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DELTAS = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in ("", "on", "e")]
METRICS = {"speculative_decoding": {"num_spec_steps": 2}}
ENDING = [
    {"choices": [{"delta": {}, "finish_reason": "stop", "token_ids": [7]}]},
    {"choices": [], "usage": {"completion_tokens": 3}, "metrics": METRICS},
]
EXPECTED = [([1, 2, 3], "abc"), ([4], "d")]


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
        except (asyncio.IncompleteReadError, BrokenPipeError):
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


async def stream(writer: asyncio.StreamWriter) -> None:
    content = b": ping\n\n" + events(*DELTAS, *ENDING) + b"data: [DONE]\n\n"
    writer.write(STREAM + chunk(content[:50]) + chunk(content[50:]) + chunk(b""))  # an event may come in two parts


def requests(count: int, behaviour: Behaviour = "read", streamed: bool = True) -> list[PlannedRequest]:
    return [PlannedRequest(number, number % 3, behaviour, streamed, 3, 0.0) for number in range(count)]


def load(
    answer: Answer, given: list[PlannedRequest], key: str = "", workload: Workload | None = None
) -> tuple[Seen, LoadRun]:
    work = workload or Workload(clients=1, requests=len(given), max_tokens=9, pause=0.01)
    runs: list[LoadRun] = []

    async def check(address: Address) -> None:
        clients = HttpClients(Target(address, "m", key), work, PROMPTS, clock := Clock())
        runs.append(await run_load(work, iter(given), clients.send, clock))
        await clients.close()

    return with_server(answer, check), runs[0]


def one(run: LoadRun) -> LoadExchange:
    (found,) = run.exchanges
    return found


def test_prompts_are_sent_to_the_endpoint_for_their_kind_and_streams_are_read_to_their_end() -> None:
    seen, run = load(stream, requests(3), key="sk-1")
    assert seen.paths == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert [body.get("messages", body.get("prompt")) for body in seen.bodies] == PROMPTS
    for body in seen.bodies:
        assert {"max_tokens": 9, "temperature": 0, "model": "m", "disable_spec_decode": False}.items() <= body.items()
    assert (seen.keys, seen.connections) == (["Bearer sk-1"] * 3, 1)  # the connection is reused
    for found in run.exchanges:
        assert (found.text, found.tokens, found.ending, found.outcome) == ("one", 3, "stop", "answered")
        assert (found.token_ids, found.drafts, len(found.text_times)) == ([7], {"num_spec_steps": 2}, 2)


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

    async def displaced(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(events({"error": {"message": "others wait", "code": "queue_full"}})) + chunk(b""))

    waited = one(load(displaced, requests(1))[1])
    assert (waited.outcome, waited.status, waited.retry_after) == ("refused", 503, 1.0)
    refused = one(load(full, requests(1))[1])
    assert (refused.outcome, refused.retry_after, refused.error) == ("refused", 0.01, None)
    for answer, message in ((invalid, '"no"'), (broken, "closed before"), (failed, "the engine failed")):
        found = one(load(answer, requests(1))[1])
        assert found.outcome == "failed"
        assert message in str(found.error)


def test_each_service_gets_the_same_requests_with_the_shares_that_were_asked_for() -> None:
    workload = Workload(requests=4000, cancelled=0.3, dropped=0.1, slow=0.2, unstreamed=0.25, seed=3)
    found = list(planned(workload, 7, first=5))
    assert found == list(planned(workload, 7, first=5))
    assert [one.prompt for one in found[:4]] == [5, 6, 0, 1]
    assert [one.number for one in found] == list(range(4000))
    counts = Counter(one.behaviour for one in found)
    expected = {"cancel": 0.3, "drop": 0.1, "slow": 0.2, "read": 0.4}
    assert {name: counts[name] / 4000 for name in expected} == pytest.approx(expected, abs=0.03)
    assert sum(not one.streamed for one in found) / 4000 == pytest.approx(0.25, abs=0.03)
    assert {one.behaviour for one in found if one.leaves} == {"cancel", "drop"}
    assert {one.gap for one in found} == {0.0}


def exchange(**fields: Any) -> LoadExchange:
    answered = {"status": 200, "text": "abc", "tokens": 3, "ending": "stop", "text_times": [1.1, 1.4, 1.5]}
    given: dict[str, Any] = {"behaviour": "read", "streamed": True, "started": 1.0, "ended": 2.0, **answered}
    return LoadExchange(0, **{"prompt": 0, **given, **fields})


def test_the_outcome_of_a_request_follows_from_its_answer() -> None:
    for fields, outcome in (
        ({}, "answered"),
        ({"ending": None, "behaviour": "cancel"}, "left"),
        ({"ending": None, "behaviour": "drop"}, "left"),
        ({"ending": None}, "failed"),  # the stream ended without its last event
        ({"status": 503}, "refused"),
        ({"status": 429}, "refused"),
        ({"status": 500}, "failed"),
        ({"error": "the engine failed"}, "failed"),
    ):
        assert exchange(**fields).outcome == outcome


def test_wrong_and_late_answers_are_no_goodput() -> None:
    run = LoadRun(
        [
            exchange(),
            exchange(text="abx"),
            exchange(token_ids=[1, 2, 9]),
            exchange(token_ids=[1, 2, 3], text_times=[1.9, 2.0]),
            exchange(ending=None, behaviour="cancel", tokens=None, text_times=[1.1, 1.2]),
            exchange(status=503, ending=None, tokens=0, text="", text_times=[], ended=1.25),
        ],
        2.0,
    )
    found = run_figures(run, EXPECTED, None, first_token_limit=0.5)
    assert (found.answered, found.left, found.refused, found.failed) == (4, 1, 1, 0)
    assert (found.compared, found.different) == (4, 2)
    assert found.tokens_per_second == (4 * 3 + 2) / 2
    assert found.goodput == 3 / 2
    assert found.requests_per_second == 2
    assert found.refusal is not None
    assert found.refusal.highest == pytest.approx(250)
    assert run_figures(run, None, None, None).compared == 0
