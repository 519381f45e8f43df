"""Embedded: the requests of a run on a `Runtime` inside the measuring program, in a process of its own.

The baseline of a service: the same engine and options without HTTP. `main` is the program of that process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import QueueFull
from spaceport.runtime.scheduling.stream import AsyncStream
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.serve.exchange import Exchange
from spaceport.tools.bench.serve.load_run import Clock, Send, run_load
from spaceport.tools.bench.serve.workload import PlannedRequest, Workload, planned


@asynccontextmanager
async def sender(
    runtime: Runtime, workload: Workload, prompts: Sequence[Prompt], clock: Clock
) -> AsyncGenerator[Send, None]:
    """A function that sends requests to a runtime and records what comes back."""
    decoding = decoding_of(workload)

    async def send(client: int, request: PlannedRequest, exchange: Exchange) -> None:
        del client
        try:
            stream = runtime.astream(prompts[request.prompt], decoding)
        except QueueFull:
            exchange.status, exchange.retry_after = 503, 1.0  # as the service answers
            return
        async with stream:
            await stream.submitted()
            exchange.status = 200
            await _read(stream, request, exchange, workload, clock)

    yield send


def decoding_of(workload: Workload) -> Decoding:
    """The decoding options of a workload's requests."""
    if workload.drafts:
        return Decoding(max_tokens=workload.max_tokens, fork=False)
    return Decoding(max_tokens=workload.max_tokens, fork=False, mask_slots=0, lookup=0)


def expected_answers(runtime: Runtime, workload: Workload, prompts: Sequence[Prompt]) -> list[tuple[list[int], str]]:
    """The tokens and the text of the answer to each prompt, generated one at a time and without the prefix cache."""
    decoding = replace(decoding_of(workload), prefix_cache=False)
    found = [runtime.generate(prompt, decoding) for prompt in prompts]
    return [(list(one.tokens), one.text) for one in found]


async def _read(
    stream: AsyncStream, request: PlannedRequest, exchange: Exchange, workload: Workload, clock: Clock
) -> None:
    while pieces := await stream.pieces():
        if text := "".join(piece.reading for piece in pieces):
            exchange.text += text
            exchange.text_times.append(clock())
            if request.behaviour == "slow":
                await asyncio.sleep(workload.pause)
        if request.leaves and len(exchange.text_times) >= request.events:
            return
    completion = await stream.completion()
    exchange.text, exchange.token_ids = completion.text, list(completion.tokens)
    exchange.tokens, exchange.ending = completion.statistics.tokens, completion.ending
    found = completion.statistics
    exchange.drafts = {
        "num_spec_steps": found.steps,
        "num_accepted_draft_tokens": sum(found.accepted_by_depth),
        "num_draft_tokens": sum(found.drafted_by_depth),
    }


def answer(runtime: Runtime, prompts: Sequence[Prompt], call: dict[str, Any]) -> dict[str, Any]:
    """The result of one call: the expected answers, or a run."""
    workload = Workload(**call["workload"])
    if call["call"] == "expected":
        return {"answers": expected_answers(runtime, workload, prompts)}
    requests = planned(workload, len(prompts), call["first"])
    run = asyncio.run(run_load(workload, requests, lambda clock: sender(runtime, workload, prompts, clock)))
    return {"exchanges": [asdict(one) for one in run.exchanges], "seconds": run.seconds}


def main() -> None:
    """Answer calls, one JSON object per line; the first line says what to open."""
    opening = json.loads(sys.stdin.readline())
    with Runtime.open(Path(opening["bundle"]), **opening["options"]) as runtime:
        _write({"device": runtime.engine.device})
        for line in sys.stdin:
            _write(answer(runtime, opening["prompts"], json.loads(line)))


def _write(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()
