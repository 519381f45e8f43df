"""Loop: one step of every request: plan, run, accept, keep."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.accept import Verdict, accept
from spaceport.runtime.engine import Batch, Engine, pack, split
from spaceport.runtime.plan import Plan
from spaceport.runtime.request import Request
from spaceport.runtime.slots import NO_MOVES


def step(engine: Engine, requests: Sequence[Request]) -> None:
    """Every live thread of every request feeds a part of its prompt or writes one token or more."""
    plans = [request.plan() for request in requests]
    taken = [request.slots.take(plan.positions) for request, plan in zip(requests, plans, strict=True)]
    batch = pack(engine, requests, plans, taken)
    logits = run(engine, batch, requests)
    moves = [NO_MOVES] * batch.requests
    for request, plan, slots in zip(requests, plans, taken, strict=True):
        verdicts = judge(plan, logits[request.index - batch.first], request)
        moves[request.index - batch.first] = request.keep(plan, slots, verdicts)
    engine.move(batch.first, moves)


def run(engine: Engine, batch: Batch, requests: Sequence[Request]) -> NDArray[np.float32]:
    """The engine's logits; its time is put down to every request of the step."""
    started = perf_counter()
    logits = engine.run(batch)
    seconds = perf_counter() - started
    for request in requests:
        request.statistics.engine_seconds += seconds
    return logits


def judge(plan: Plan, logits: NDArray[np.float32], request: Request) -> list[Verdict]:
    """The verdict on each thread's rows."""
    lines = split(plan, logits)
    return [accept(part, own, request.choose) for part, own in zip(plan.parts, lines, strict=True)]
