"""Steps: step time by number of rows, and the time that the runtime spends outside the engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from spaceport.graphs.contract.manifest import Manifest
from spaceport.graphs.contract.signature import visible_length
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, Engine
from spaceport.runtime.session import Runtime

WARM_UP = 3


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
