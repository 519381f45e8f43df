"""Loop: one step of every request: plan, run, accept, keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.decode.accept import Verdict, accept
from spaceport.runtime.decode.plan import Plan
from spaceport.runtime.decode.request import Request
from spaceport.runtime.decode.slots import NO_MOVES
from spaceport.runtime.engine import Batch, Engine, pack, split

# Hears which request failed, and of what; the others of the step go on.
Fault = Callable[[Request, Exception], None]


@dataclass(frozen=True)
class Turn:
    """What a request takes to a step."""

    request: Request
    plan: Plan
    slots: NDArray[np.int64]  # that its rows are written to


def step(engine: Engine, requests: Sequence[Request], fault: Fault | None = None) -> None:
    """Every live thread of every request feeds a part of its prompt or writes one token or more.

    `requests` are in the order of their indices. Without `fault`, what goes wrong with one of them is raised.
    """
    if turns := plan(requests, fault):
        play(engine, turns, fault)


def plan(requests: Sequence[Request], fault: Fault | None = None) -> list[Turn]:
    """What each request takes to its next step; nothing of those that fail."""
    turns = []
    for request in requests:
        with apart(request, fault):
            rows = request.plan()
            turns.append(Turn(request, rows, request.slots.take(rows.positions)))
    return turns


def play(engine: Engine, turns: Sequence[Turn], fault: Fault | None = None) -> None:
    """One call of the engine: run, accept, keep."""
    batch = pack(
        engine, [turn.request for turn in turns], [turn.plan for turn in turns], [turn.slots for turn in turns]
    )
    logits = run(engine, batch, turns)
    moves = [NO_MOVES] * batch.requests
    for turn in turns:
        with apart(turn.request, fault):
            line = turn.request.index - batch.first
            moves[line] = turn.request.keep(turn.plan, turn.slots, judge(turn, logits[line]))
    engine.move(batch.first, moves)


def run(engine: Engine, batch: Batch, turns: Sequence[Turn]) -> NDArray[np.float32]:
    """The engine's logits; its time is put down to every request of the step."""
    started = perf_counter()
    logits = engine.run(batch)
    seconds = perf_counter() - started
    for turn in turns:
        turn.request.statistics.engine_seconds += seconds
    return logits


def judge(turn: Turn, logits: NDArray[np.float32]) -> list[Verdict]:
    """The verdict on each thread's rows."""
    request, lines = turn.request, split(turn.plan, logits)
    most = request.drafting.guesses
    verdicts = [accept(part, own, request.choose, most) for part, own in zip(turn.plan.parts, lines, strict=True)]
    for observer in request.observers:
        observer.saw(request, turn.plan, verdicts, lines)
    return verdicts


@contextmanager
def apart(request: Request, fault: Fault | None) -> Iterator[None]:
    """What goes wrong within concerns this request alone, if there is somebody to tell."""
    try:
        yield
    except Exception as error:
        if fault is None:
            raise
        fault(request, error)
