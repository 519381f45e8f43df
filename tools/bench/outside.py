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

from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.costs import fixed_costs
from spaceport.runtime.decode.planner import DraftPlanner
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import CPU_COSTS, Batch, Engine
from spaceport.runtime.scheduling.admission import Admission
from spaceport.runtime.scheduling.capacity import capacity_for
from spaceport.runtime.scheduling.generation import Delivery, Generation
from spaceport.runtime.scheduling.scheduler import Scheduler
from spaceport.runtime.scheduling.task import Task
from spaceport.runtime.text.tokenizer import open_tokenizer
from spaceport.tools.bench.made_up import MadeUpEngine, Predicted, endless, writable_tokens

CASES = ((1, 1), (1, 9), (1, 36), (8, 1), (8, 9))  # requests, and rows of each in a step
LENGTH = 512
_PROMPT = 64
_LETTERS = 200  # tokens that are written
_WARM = 20  # rounds before any is measured
_RANKS = np.array([12, 10, 8], np.float32)  # logits over 32,000 others of 0: the first one is nearly certain
_RIGHT = 80  # percent of the tokens that mask slots say


def made_up_engine(manifest: Manifest, requests: int, inner: Engine | None) -> MadeUpEngine:
    """An engine whose logits follow from positions."""
    letters = writable_tokens(manifest, _LETTERS)
    masks = list(manifest.tokens.mask)

    def predict(batch: Batch) -> Predicted:
        lines = np.arange(batch.requests)[:, None]
        places, tokens = batch.position_ids[lines, batch.logit_rows], batch.input_ids[lines, batch.logit_rows]
        wrong = np.isin(tokens, masks) & (places * 7919 % 100 >= _RIGHT)
        likely = (places * 31 + wrong)[..., None] + np.arange(len(_RANKS))
        return Predicted(letters[likely % len(letters)], np.broadcast_to(_RANKS, likely.shape))

    # With rows that cost nothing the tree is as wide as it may be, whatever its rows promise.
    costs = replace(CPU_COSTS, row=0.0)
    return MadeUpEngine(manifest.signature, requests, capacity_for(manifest, LENGTH), predict, inner, costs)


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
    planner = DraftPlanner(fixed_costs(engine.costs.row))
    admission = Admission(endless(bundle), open_tokenizer(bundle), engine, LENGTH, LENGTH, planner)
    random = np.random.default_rng(0)
    mask_slots = 0 if rows == 1 else bundle.manifest.max_mask_slots
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
    engine = made_up_engine(bundle.manifest, requests, inner)
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
