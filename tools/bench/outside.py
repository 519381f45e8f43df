"""Outside: the time per scheduler round outside the engine, with an engine that takes no time or with a real one.

The logits are synthetic, so that drafts are as wide as allowed: at each position one token is probable and two more are
possible, and 80 % of the mask slots predict the right token.
"""

from __future__ import annotations

import cProfile
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter

import numpy as np

from spaceport.graphs.contract.exactness import unmeasured
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import Bundle, read_correction
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.planner import DraftPlanner
from spaceport.runtime.decode.sequence_group import SequenceGroup
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import CPU_COSTS, Batch, Engine
from spaceport.runtime.scheduling.admission import Admission
from spaceport.runtime.scheduling.capacity import capacity_for
from spaceport.runtime.scheduling.request import Request
from spaceport.runtime.scheduling.scheduler import Scheduler
from spaceport.runtime.text.tokenizer import open_tokenizer
from spaceport.tools.bench.synthetic_engine import Predicted, SyntheticEngine, allowed_tokens, without_end_tokens

CASES = ((1, 1), (1, 9), (1, 36), (8, 1), (8, 9))  # requests, rows per request and step
LENGTH = 512
_PROMPT = 64  # tokens
_VOCABULARY = 200  # different tokens that are generated
_WARM_UP = 20  # rounds that are not measured
_RANKS = np.array(
    [12, 10, 8], np.float32
)  # logits of the best tokens; all others have 0, so the first one is nearly certain
_CORRECT = 80  # percent of the mask slots


def synthetic_engine(manifest: Manifest, requests: int, inner: Engine | None) -> SyntheticEngine:
    """An engine whose logits depend on positions only."""
    vocabulary = allowed_tokens(manifest, _VOCABULARY)
    masks = list(manifest.tokens.mask)

    def predict(batch: Batch) -> Predicted:
        requests = np.arange(batch.requests)[:, None]
        positions, tokens = batch.position_ids[requests, batch.logit_rows], batch.input_ids[requests, batch.logit_rows]
        wrong = np.isin(tokens, masks) & (positions * 7919 % 100 >= _CORRECT)
        predicted = (positions * 31 + wrong)[..., None] + np.arange(len(_RANKS))
        return Predicted(vocabulary[predicted % len(vocabulary)], np.broadcast_to(_RANKS, predicted.shape))

    # Rows count as free, so draft trees are as wide as allowed.
    costs = replace(CPU_COSTS, row=0.0)
    return SyntheticEngine(manifest.signature, requests, capacity_for(manifest, LENGTH), predict, inner, costs)


@dataclass(frozen=True)
class RoundCost:
    """The time of scheduler rounds outside the engine."""

    requests: int
    rows: float  # mean rows per request and step
    rounds: int
    milliseconds: float  # median
    p95_milliseconds: float


def prepared_requests(bundle: Bundle, engine: SyntheticEngine, rows: int) -> list[tuple[Request, SequenceGroup]]:
    """One request with its sequences for each index of the engine."""
    planner = DraftPlanner(relative_costs(engine.costs.row))
    correction = read_correction(bundle)
    exactness = unmeasured(bundle.manifest)
    admission = Admission(
        without_end_tokens(bundle),
        open_tokenizer(bundle),
        engine,
        LENGTH,
        LENGTH,
        planner,
        exactness,
        correction=correction,
    )
    random = np.random.default_rng(0)
    mask_slots = 0 if rows == 1 else bundle.manifest.drafts.mask_slots
    decoding = Decoding(mask_slots=mask_slots, draft_rows=rows, fork=False)
    prepared = []
    for _ in range(engine.requests):
        request = Request(random.integers(0, _VOCABULARY, _PROMPT).tolist(), decoding)
        sequences = admission.prepare(request)
        assert sequences is not None
        prepared.append((request, sequences))
    return prepared


def rounds(
    engine: SyntheticEngine, requests: Sequence[tuple[Request, SequenceGroup]], profile: cProfile.Profile | None
) -> Iterator[tuple[float, int]]:
    """The seconds outside the engine and the rows of each round, until a generation ends."""
    scheduler = Scheduler(engine, 0)
    for request, sequences in requests:
        scheduler.submit(request, sequences)
    for number in count():
        engine.rows_fed, engine.seconds = 0, 0.0
        if profile is not None and number > _WARM_UP:
            profile.enable()
        started = perf_counter()
        scheduler.round()
        seconds = perf_counter() - started
        if profile is not None:
            profile.disable()
        if any(request.done for request, _ in requests):
            return
        if number > _WARM_UP:
            yield seconds - engine.seconds, engine.rows_fed


def measure(
    bundle: Bundle, inner: Engine | None, requests: int, rows: int, min_rounds: int, profile: cProfile.Profile | None
) -> RoundCost:
    """The cost of at least `min_rounds` rounds with this number of requests and of rows per request."""
    engine = synthetic_engine(bundle.manifest, requests, inner)
    found: list[tuple[float, int]] = []
    while len(found) < min_rounds:
        found += rounds(engine, prepared_requests(bundle, engine, rows), profile)
    times = [seconds for seconds, _ in found]
    return RoundCost(
        requests,
        statistics.mean(fed for _, fed in found) / requests,
        len(found),
        statistics.median(times) * 1e3,
        float(np.quantile(times, 0.95)) * 1e3,
    )
