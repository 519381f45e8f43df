"""Steps: step time by number of rows on each backend of a bundle, and the time that the runtime spends outside the engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter

import numpy as np

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import visible_length
from spaceport.runtime.backends import BACKENDS, open_engine, resolve
from spaceport.runtime.backends.measurements import measured_here
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, Engine, EngineOptions, capacity_for, seq_len
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.report import Report, Table

WARM_UP = 3
_COMPLETION = 48  # tokens of each completion that the time outside the engine is measured with
_DECODE_STEPS = 30  # at least


@dataclass(frozen=True)
class StepOptions:
    """What is measured, and how the engines are opened."""

    rows: tuple[int, ...] = (1, 2, 4, 9, 16, 36)
    context: int = 256  # cached tokens before each step
    rounds: int = 30
    threads: int = 0
    trust_engines: bool = False
    without_graphs: bool = False  # also time steps without CUDA graphs

    def __post_init__(self) -> None:
        if min(self.context, self.rounds) < 1:
            raise OptionFault(f"--context is {self.context} and --rounds {self.rounds}: expected at least 1 of each")


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


@dataclass(frozen=True)
class EngineSteps:
    """The measurements of one backend, with or without CUDA graphs."""

    backend: str
    graphs: bool  # replays CUDA graphs; False on a CPU
    device: str
    notes: tuple[str, ...]
    steps: tuple[StepCost, ...]
    loops: tuple[LoopCost, ...]  # none without CUDA graphs on a GPU

    @property
    def name(self) -> str:
        if not BACKENDS[self.backend].gpu:
            return self.backend
        return f"{self.backend}, {'CUDA graphs' if self.graphs else 'no CUDA graphs'}"


def measure_backend(bundle: Bundle, backend: str, options: StepOptions) -> list[EngineSteps]:
    """Step times of one backend; on a GPU also without CUDA graphs, if that is asked for."""
    manifest = bundle.manifest
    length, needed = seq_len(manifest, None), options.context + max(*options.rows, _COMPLETION) + 1
    if needed > length:
        raise OptionFault(
            f"{max(options.rows)} rows and completions of {_COMPLETION} tokens after {options.context} tokens make {needed}, "
            f"the context length is {length}: lower --rows or --context"
        )
    engine_options = EngineOptions(capacity_for(manifest, length), 1, options.threads, options.trust_engines)
    name, notes = resolve(bundle, backend, engine_options)
    gpu = BACKENDS[name].gpu
    engine = open_engine(bundle, name, engine_options)
    costs, exactness = measured_here(bundle, name, engine, engine_options, "measured")
    with Runtime(bundle, engine, length, costs=costs, exactness=exactness) as runtime:
        steps = step_costs(engine, options)
        loops = [loop_cost(runtime, k, options.context) for k in sorted({0, manifest.drafts.max_tokens})]
        found = [EngineSteps(name, gpu, engine.device, (*notes, *runtime.notes), tuple(steps), tuple(loops))]
    if gpu and options.without_graphs:
        engine = open_engine(bundle, name, replace(engine_options, graphs=False))
        try:
            found.append(EngineSteps(name, False, engine.device, engine.notes, tuple(step_costs(engine, options)), ()))
        finally:
            engine.close()
    return found


def step_costs(engine: Engine, options: StepOptions) -> list[StepCost]:
    """Median step times; the numbers of rows alternate within each round, so other load affects all of them."""
    if max(options.rows) > engine.rows:
        raise OptionFault(f"--rows has {max(options.rows)}: expected at most {engine.rows}, the rows of this engine")
    random = np.random.default_rng(0)
    batches = [chain_batch(engine, count, options.context, random) for count in options.rows]
    times: list[list[float]] = [[] for _ in batches]
    for number in range(-WARM_UP, options.rounds):
        for batch, taken in zip(batches, times, strict=True):
            started = perf_counter()
            engine.run(batch)
            if number >= 0:
                taken.append(perf_counter() - started)
    medians = [statistics.median(taken) * 1e3 for taken in times]
    return [StepCost(count, median, median / medians[0]) for count, median in zip(options.rows, medians, strict=True)]


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


def loop_cost(runtime: Runtime, mask_slots: int, context: int) -> LoopCost:
    """The time per step of decoding random prompts."""
    random = np.random.default_rng(0)
    inside, outside, count = [], [], 0
    for number in range(1000):
        prompt = random.integers(0, runtime.bundle.manifest.signature.vocab_size, context).tolist()
        found = runtime.generate(prompt, Decoding(max_tokens=_COMPLETION, mask_slots=mask_slots)).statistics
        if number:  # the first completion is a warm-up
            count += found.steps + found.prompt_steps
            inside.append(found.engine_seconds)
            outside.append(found.outside_seconds / (found.steps + found.prompt_steps))
        if count >= _DECODE_STEPS:
            break
    return LoopCost(mask_slots, count, sum(inside) / max(1, count) * 1e3, statistics.median(outside) * 1e3)


def steps_report(measured: Sequence[EngineSteps], options: StepOptions) -> Report:
    """Step times and the time outside the engine as tables: a row per backend, with or without CUDA graphs."""
    steps = [
        (one.name, *(f"{step.milliseconds:.2f} ({step.ratio:.2f})" for step in one.steps), one.device)
        for one in measured
    ]
    loops = [
        (one.name, loop.mask_slots, loop.steps, loop.engine_milliseconds, f"{loop.outside_milliseconds:.3f}")
        for one in measured
        for loop in one.loops
    ]
    title = f"Milliseconds of a step after {options.context} tokens, by number of rows (ratio to the first)"
    tables = (
        Table(title, ("backend", *map(str, options.rows), "device"), steps),
        Table("Decoding, per step", ("backend", "mask slots", "steps", "ms in the engine", "ms outside"), loops),
    )
    return Report((), tables, (), {"options": asdict(options), "backends": [asdict(one) for one in measured]})
