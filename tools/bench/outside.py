"""Outside: what a round of the scheduler takes beside the engine, with an engine that takes no time or behind a real one.

The logits are made up, so that drafts are as wide as they may be: at each position one token is likely and two more are
possible, and a mask slot is right in four cases of five.
"""

from __future__ import annotations

import cProfile
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.costs import fixed_costs
from spaceport.runtime.decode.planner import DraftPlanner
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import PROCESSOR, Batch, Engine, Moves
from spaceport.runtime.scheduling.admission import Admission
from spaceport.runtime.scheduling.capacity import capacity_for
from spaceport.runtime.scheduling.generation import Delivery, Generation
from spaceport.runtime.scheduling.scheduler import Scheduler
from spaceport.runtime.scheduling.task import Task
from spaceport.runtime.text.tokenizer import open_tokenizer

CASES = ((1, 1), (1, 9), (1, 36), (8, 1), (8, 9))  # requests, and rows of each in a step
LENGTH = 512
_PROMPT = 64
_LETTERS = 200  # tokens that are written
_WARM = 20  # rounds before any is measured
_LIKELY = 12.0  # a logit over 32,000 others of 0: nearly certain; the next two are 2 lower each
_RIGHT = 80  # percent of the tokens that mask slots say


class MadeUpEngine:
    """An engine whose logits follow from positions; the engine behind it, if there is one, computes in vain."""

    device = "none"
    costs = replace(PROCESSOR, row=0.0)  # the tree is as wide as it may be, whatever its rows promise
    notes: tuple[str, ...] = ()

    def __init__(self, manifest: Manifest, requests: int, inner: Engine | None):
        self.signature, self.requests = manifest.signature, requests
        self.capacity = self.rows = capacity_for(manifest, LENGTH)
        special = {*manifest.tokens.end, *manifest.tokens.unwritable, *manifest.tokens.forking}
        self._letters = np.setdiff1d(np.arange(_LETTERS + len(special)), list(special))[:_LETTERS]
        self._masks = list(manifest.tokens.mask)
        self._inner = inner
        self._logits = np.zeros((0, 0, self.signature.vocab_size), np.float32)
        self.rows_fed = 0
        self.seconds = 0.0

    def run(self, batch: Batch) -> NDArray[np.float32]:
        started = perf_counter()
        logits = self._run(batch)
        self.rows_fed += batch.input_ids.size
        self.seconds += perf_counter() - started
        return logits

    def _run(self, batch: Batch) -> NDArray[np.float32]:
        if self._inner is not None:
            self._inner.run(batch)
        shape = batch.logit_rows.shape
        if self._logits.shape[:2] != shape:
            self._logits = np.zeros((*shape, self.signature.vocab_size), np.float32)
        lines = np.arange(shape[0])[:, None]
        places, tokens = batch.position_ids[lines, batch.logit_rows], batch.input_ids[lines, batch.logit_rows]
        wrong = np.isin(tokens, self._masks) & (places * 7919 % 100 >= _RIGHT)
        likely = places * 31 + wrong
        self._logits.fill(0)  # all of them, so that they are in the caches like any engine's
        rows = np.arange(shape[1])[None]
        for rank in range(3):
            self._logits[lines, rows, self._letters[(likely + rank) % _LETTERS]] = _LIKELY - 2 * rank
        return self._logits

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        if self._inner is not None:
            self._inner.move(first, moves)

    def clear(self, request: int) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class RoundCost:
    """What rounds took beside the engine."""

    requests: int
    rows: float  # that a request had in a step, on average
    rounds: int
    milliseconds: float  # median
    slow_milliseconds: float  # 95 of 100 were faster


def texts(bundle: Bundle, engine: MadeUpEngine, rows: int) -> list[Generation]:
    """A text for each of the engine's places."""
    manifest = bundle.manifest
    endless = replace(manifest, tokens=replace(manifest.tokens, end=()))  # made-up logits know no end
    planner = DraftPlanner(fixed_costs(engine.costs.row))
    admission = Admission(replace(bundle, manifest=endless), open_tokenizer(bundle), engine, LENGTH, LENGTH, planner)
    random = np.random.default_rng(0)
    mask_slots = 0 if rows == 1 else manifest.max_mask_slots
    decoding = Decoding(mask_slots=mask_slots, draft_rows=rows, fork=False)
    return [
        admission.generation(random.integers(0, _LETTERS, _PROMPT).tolist(), decoding, _nobody)
        for _ in range(engine.requests)
    ]


def _nobody(delivery: Delivery | None) -> None:
    """Nobody reads what is written."""


def rounds(
    engine: MadeUpEngine, tasks: Sequence[Task], profile: cProfile.Profile | None
) -> Iterator[tuple[float, int]]:
    """What each round took beside the engine, and how many rows the engine computed, until a text ends."""
    scheduler = Scheduler(engine, 0)
    for task in tasks:
        scheduler.submit(task)
    for number in count():
        engine.rows_fed, engine.seconds = 0, 0.0
        if profile is not None and number > _WARM:
            profile.enable()
        started = perf_counter()
        scheduler.round()
        taken = perf_counter() - started
        if profile is not None:
            profile.disable()
        if any(task.done for task in tasks):
            return
        if number > _WARM:
            yield taken - engine.seconds, engine.rows_fed


def measure(
    bundle: Bundle, inner: Engine | None, requests: int, rows: int, least: int, profile: cProfile.Profile | None
) -> RoundCost:
    """At least so many rounds of so many requests with so many rows each."""
    engine = MadeUpEngine(bundle.manifest, requests, inner)
    found: list[tuple[float, int]] = []
    while len(found) < least:
        found += rounds(engine, texts(bundle, engine, rows), profile)
    times = [taken for taken, _ in found]
    return RoundCost(
        requests,
        statistics.mean(fed for _, fed in found) / requests,
        len(found),
        statistics.median(times) * 1e3,
        float(np.quantile(times, 0.95)) * 1e3,
    )
