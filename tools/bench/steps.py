"""Steps: step time by number of rows, and the time that the runtime spends outside the engine."""

from __future__ import annotations

import cProfile
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import count
from time import perf_counter

import numpy as np

from spaceport.graphs.contract.exactness import unmeasured
from spaceport.graphs.contract.manifest import Manifest
from spaceport.graphs.contract.signature import visible_length
from spaceport.runtime.bundle import Bundle, read_correction
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.planner import DraftPlanner
from spaceport.runtime.decode.sequence_group import SequenceGroup
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import CPU_COSTS, Batch, Engine, capacity_for
from spaceport.runtime.scheduling.admission import Admission
from spaceport.runtime.scheduling.request import Request
from spaceport.runtime.scheduling.scheduler import Scheduler
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.tokenizer import open_tokenizer
from spaceport.tools.bench.report import Report, Table
from spaceport.tools.bench.synthetic_engine import Predicted, SyntheticEngine, allowed_tokens, without_end_tokens

WARM_UP = 3
CASES = ((1, 1), (1, 9), (1, 36), (8, 1), (8, 9))  # requests, rows per request and step
LENGTH = 512
_PROMPT = 64  # tokens
_VOCABULARY = 200  # different tokens that are generated
_WARM_UP = 20  # rounds that are not measured
# Logits of the best tokens; all others have 0, so the first one is nearly certain.
_RANKS = np.array([12, 10, 8], np.float32)
_CORRECT = 80  # percent of the mask slots


@dataclass(frozen=True)
class StepCost:
    """The time of a step with a number of rows."""

    rows: int
    milliseconds: float  # median
    ratio: float  # to the first measured number of rows


@dataclass(frozen=True)
class LoopCost:
    """The time per decode step inside and outside the engine."""

    mask_slots: int
    steps: int
    engine_milliseconds: float
    outside_milliseconds: float  # planning, masks, verification, text


def step_costs(engine: Engine, rows: Sequence[int], context: int, rounds: int) -> list[StepCost]:
    """Median step times; the numbers of rows alternate within each round, so other load affects all of them."""
    random = np.random.default_rng(0)
    batches = [chain_batch(engine, count, context, random) for count in rows]
    times: list[list[float]] = [[] for _ in rows]
    for number in range(-WARM_UP, rounds):
        for batch, taken in zip(batches, times, strict=True):
            started = perf_counter()
            engine.run(batch)
            if number >= 0:
                taken.append(perf_counter() - started)
    medians = [statistics.median(taken) * 1e3 for taken in times]
    return [StepCost(count, median, median / medians[0]) for count, median in zip(rows, medians, strict=True)]


def chain_batch(engine: Engine, rows: int, context: int, random: np.random.Generator) -> Batch:
    """A chain of rows after `context` cached tokens, with the logits of every row, as in a verification step."""
    signature = engine.signature
    visible = visible_length(context + rows)
    positions = np.arange(context, context + rows)
    mask = (np.arange(visible) <= positions[:, None])[None, None]
    window = signature.window or visible
    near = mask & (positions[:, None] - np.arange(visible) < window)
    return Batch(
        first=0,
        input_ids=random.integers(0, signature.vocab_size, (1, rows)),
        position_ids=positions[None].copy(),
        slot_ids=positions[None].copy(),
        attention_mask=mask,
        logit_rows=np.arange(rows)[None],
        sliding_attention_mask=near if signature.window else None,
    )


def loop_cost(runtime: Runtime, manifest: Manifest, mask_slots: int, context: int, steps: int) -> LoopCost:
    """The time per step of decoding random prompts, over at least `steps` steps."""
    random = np.random.default_rng(0)
    inside, outside, count = [], [], 0
    for number in range(1000):
        prompt = random.integers(0, manifest.signature.vocab_size, context).tolist()
        with runtime.stream(
            prompt, Decoding(max_tokens=min(48, runtime.max_seq_len - context), mask_slots=mask_slots)
        ) as stream:
            found = stream.completion().statistics
        if number:  # the first completion is a warm-up
            count += found.steps + found.prompt_steps
            inside.append(found.engine_seconds)
            outside.append(found.outside_seconds / (found.steps + found.prompt_steps))
        if count >= steps:
            break
    return LoopCost(mask_slots, count, sum(inside) / max(1, count) * 1e3, statistics.median(outside) * 1e3)


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


def scheduler_rounds(
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


def outside_cost(
    bundle: Bundle, inner: Engine | None, requests: int, rows: int, min_rounds: int, profile: cProfile.Profile | None
) -> RoundCost:
    """The cost of at least `min_rounds` rounds with this number of requests and of rows per request."""
    engine = synthetic_engine(bundle.manifest, requests, inner)
    found: list[tuple[float, int]] = []
    while len(found) < min_rounds:
        found += scheduler_rounds(engine, prepared_requests(bundle, engine, rows), profile)
    times = [seconds for seconds, _ in found]
    return RoundCost(
        requests,
        statistics.mean(fed for _, fed in found) / requests,
        len(found),
        statistics.median(times) * 1e3,
        float(np.quantile(times, 0.95)) * 1e3,
    )


def steps_report(steps: Sequence[StepCost], loops: Sequence[LoopCost], context: int, threads: int) -> Report:
    """Step times and the time outside the engine as tables."""
    tables = (
        Table(f"Steps after {context} tokens", ("rows", "ms", "ratio"), [astuple(cost) for cost in steps]),
        Table(
            "Decoding, per step",
            ("mask slots", "steps", "ms in the engine", "ms outside"),
            [(c.mask_slots, c.steps, c.engine_milliseconds, f"{c.outside_milliseconds:.3f}") for c in loops],
        ),
    )
    rows = {"steps": [asdict(cost) for cost in steps], "loop": [asdict(cost) for cost in loops]}
    return Report((), tables, (), {"context": context, "threads": threads, **rows})
