"""Requests that come while completions run begin apart from each other, and large bodies are parsed one at a time."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from threading import current_thread
from typing import Any

import pytest
from starlette.testclient import TestClient

from spaceport.serving import bodies
from spaceport.serving.application import application
from spaceport.serving.bodies import body_of
from spaceport.serving.service import Spacing
from support.chat_runtime import chat_runtime


@pytest.mark.parametrize(
    ("come", "begin"),
    [
        ([1000, 1200, 1203], [1000, 1200, 1206]),
        ([1000] * 9, [1000, 1006, 1012, 1018, 1024, 1030, 1030, 1030, 1030]),  # nobody waits longer
        ([1000] * 6 + [1031], [1000, 1006, 1012, 1018, 1024, 1030, 1036]),
    ],
)
def test_requests_begin_apart_and_none_waits_long(come: list[int], begin: list[int]) -> None:
    spacing = Spacing()
    assert [round(1000 * spacing.start(at / 1000)) for at in come] == begin


def test_large_bodies_are_parsed_one_at_a_time_with_rests() -> None:
    async def parsed(spacing: Spacing) -> list[tuple[float, float]]:
        clock, times = asyncio.get_running_loop().time, []

        async def parse() -> None:
            async with spacing.one_large():
                began = clock()
                await asyncio.sleep(0.01)
                times.append((began, clock()))

        await asyncio.gather(*(parse() for _ in range(4)))
        return times

    for (began, ended), (following, _) in pairwise(asyncio.run(parsed(Spacing()))):
        assert following - ended >= 2 * (ended - began) - 1e-6


def test_a_large_body_that_is_refused_makes_room_for_the_next() -> None:
    async def fail_twice() -> None:
        spacing = Spacing()
        for _ in range(2):
            with pytest.raises(KeyError):
                async with spacing.one_large():
                    raise KeyError

    asyncio.run(fail_twice())


def test_requests_are_spaced_while_completions_run_and_large_bodies_parsed_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    one_large = Spacing.one_large

    def start(spacing: Spacing, now: float) -> float:
        called.append("request")
        return now

    def large(spacing: Spacing) -> AbstractAsyncContextManager[None]:
        called.append("large body")
        return one_large(spacing)

    def parse(*arguments: Any) -> Any:
        called.append("apart" if current_thread().name.startswith("asyncio_") else "parsed")
        return body_of(*arguments)

    monkeypatch.setattr(Spacing, "start", start)
    monkeypatch.setattr(Spacing, "one_large", large)
    monkeypatch.setattr(bodies, "body_of", parse)
    app = application({"demo": chat_runtime})
    ask = {"prompt": "import json", "max_tokens": 2}
    with TestClient(app) as client:
        for running, fields in ((False, {"user": "a" * 300_000}), (True, {})):
            if running:
                app.state.service.completions["another"] = 1
            assert client.post("/v1/completions", json=ask | fields).status_code == 200
    assert called == ["large body", "apart", "request", "parsed"]
