"""Steps: step time by number of rows on each backend of a bundle, the time that the runtime spends outside the engine, and
the speedup of drafts at a given acceptance.

Each figure is reported when it is measured, since a loan of a GPU may end at any time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.graphs.contract.signature import DTYPES, visible_length
from spaceport.runtime.backends import BACKENDS, open_engine, resolve
from spaceport.runtime.backends.measurements import measured_here
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, Engine, EngineOptions, capacity_for, seq_len
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode import mode_summaries
from spaceport.tools.bench.decode_measuring import DecodeOptions, measure_modes, modes_for
from spaceport.tools.bench.replay import SyntheticTexts, replay_runtime
from spaceport.tools.bench.report import Report, Table

WARM_UP = 3
_COMPLETION = 48  # tokens of each completion that the time outside the engine is measured with
_DECODE_STEPS = 30  # at least
_FEWEST = 3  # rounds that are measured whatever the budget
_REPLAY_PROMPTS = 2

Reported = Callable[[], None]  # called when a figure has been added


@dataclass(frozen=True)
class StepOptions:
    """What is measured, and how the engines are opened."""

    rows: tuple[int, ...] = (1, 2, 4, 9, 16, 36)
    context: int = 256  # cached tokens before each step
    rounds: int = 30
    threads: int = 0
    trust_engines: bool = False
    without_graphs: bool = False  # also time steps without CUDA graphs
    replay: tuple[float, ...] | None = None  # acceptance rate by depth; None: no replay
    budget: float = float("inf")  # seconds after which no further figure is begun

    def __post_init__(self) -> None:
        if min(self.context, self.rounds) < 1:
            raise OptionFault(f"--context is {self.context} and --rounds {self.rounds}: expected at least 1 of each")
        if not self.budget > 0:
            raise OptionFault(f"--budget is {self.budget:g}: expected more than 0 seconds")


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
class ReplayCost:
    """Decoding of synthetic text with given acceptance rates."""

    mode: str
    tokens_per_second: float
    tokens_per_step: float
    speedup: float  # over plain decoding on the same engine


@dataclass
class EngineSteps:
    """The measurements of one backend, with or without CUDA graphs."""

    backend: str
    graphs: bool  # replays CUDA graphs; False on a CPU
    device: str
    notes: tuple[str, ...]
    weight_bytes: int  # bytes of weights that a step reads
    guarantee: str = ""  # what drafts leave unchanged on this engine, and its measured noise
    bandwidth: float | None = None  # bytes per second that copies on the device read and write
    steps: list[StepCost] = field(default_factory=list)
    loops: list[LoopCost] = field(default_factory=list)  # none without CUDA graphs on a GPU
    replay: list[ReplayCost] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # figures that the budget had no time for

    @property
    def name(self) -> str:
        if not BACKENDS[self.backend].gpu:
            return self.backend
        return f"{self.backend}, {'CUDA graphs' if self.graphs else 'no CUDA graphs'}"

    @property
    def share(self) -> float | None:
        """The share of the device's bandwidth with which the first step reads the weights."""
        if self.bandwidth is None or not self.steps:
            return None
        return self.weight_bytes / (self.steps[0].milliseconds / 1e3) / self.bandwidth


class Budget:
    """The seconds of a benchmark that are left."""

    def __init__(self, seconds: float, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._end = clock, clock() + seconds

    @property
    def left(self) -> float:
        return self._end - self._clock()


def weight_bytes(manifest: Manifest) -> int:
    """The bytes of a bundle's weights in the memory of its engine."""
    return (
        manifest.parameters * DTYPES[manifest.signature.dtype].bytes
        if manifest.weights == "same"
        else manifest.graph_bytes
    )


def measure_backend(
    bundle: Bundle, backend: str, options: StepOptions, budget: Budget, measured: list[EngineSteps], report: Reported
) -> None:
    """Add the step times of one backend to `measured`; on a GPU also without CUDA graphs, if that is asked for."""
    manifest = bundle.manifest
    length, needed = seq_len(manifest, None), options.context + max(*options.rows, _COMPLETION) + 1
    if needed > length:
        raise OptionFault(
            f"{max(options.rows)} rows and completions of {_COMPLETION} tokens after {options.context} tokens make {needed}, "
            f"the context length is {length}: lower --rows or --context"
        )
    if len(options.replay or ()) > (most := manifest.drafts.max_tokens):
        raise OptionFault(
            f"--replay has {len(options.replay or ())} depths: expected at most {most}, the mask slots or heads of the bundle"
        )
    engine_options = EngineOptions(capacity_for(manifest, length), 1, options.threads, options.trust_engines)
    name, notes = resolve(bundle, backend, engine_options)
    gpu = BACKENDS[name].gpu
    engine = open_engine(bundle, name, engine_options)
    costs, exactness = measured_here(bundle, name, engine, engine_options, "measured")
    with Runtime(bundle, engine, length, costs=costs, exactness=exactness) as runtime:
        found = EngineSteps(name, gpu, engine.device, (*notes, *runtime.notes), weight_bytes(manifest), str(exactness))
        measured.append(found)
        if (bandwidth := getattr(engine, "copy_bandwidth", None)) is not None:
            found.bandwidth = bandwidth()
        found.steps = step_costs(engine, options, budget)
        report()
        for slots in sorted({0, manifest.drafts.max_tokens}):
            if _has_time(found, budget, f"decoding with {slots} mask slots", 2 * _COMPLETION):
                found.loops.append(loop_cost(runtime, slots, options.context))
                report()
        if options.replay is not None and _has_time(found, budget, "replay", 6 * _REPLAY_PROMPTS * _COMPLETION):
            found.replay = replay_costs(runtime, options, options.replay)
            report()
    if gpu and options.without_graphs and _has_time(found, budget, "steps without CUDA graphs", 4 * options.rounds):
        engine = open_engine(bundle, name, replace(engine_options, graphs=False))
        try:
            plain = EngineSteps(name, False, engine.device, engine.notes, found.weight_bytes, bandwidth=found.bandwidth)
            measured.append(plain)
            plain.steps = step_costs(engine, options, budget)
        finally:
            engine.close()
        report()


def _has_time(found: EngineSteps, budget: Budget, what: str, steps: int) -> bool:
    """Whether as many steps of one row fit into the budget; notes the figure that is left out otherwise."""
    if fits := steps * found.steps[0].milliseconds / 1e3 < budget.left:
        return fits
    found.left_out.append(what)
    return False


def step_costs(engine: Engine, options: StepOptions, budget: Budget) -> list[StepCost]:
    """Median step times, as decoding runs them: with tokens selected on the device where the engine does that.

    The numbers of rows alternate within each round, so other load affects all of them.
    """
    if max(options.rows) > engine.rows:
        raise OptionFault(f"--rows has {max(options.rows)}: expected at most {engine.rows}, the rows of this engine")
    random = np.random.default_rng(0)
    run: Callable[[Batch], Any] = engine.select if engine.selects else engine.run
    batches = [chain_batch(engine, count, options.context, random) for count in options.rows]
    times: list[list[float]] = [[] for _ in batches]
    for number in range(-WARM_UP, options.rounds):
        if number >= _FEWEST and budget.left < 0:
            break
        for batch, taken in zip(batches, times, strict=True):
            started = perf_counter()
            run(batch)
            if number >= 0:
                taken.append(perf_counter() - started)
    medians = [statistics.median(taken) * 1e3 for taken in times]
    return [StepCost(count, median, median / medians[0]) for count, median in zip(options.rows, medians, strict=True)]


def replay_costs(base: Runtime, options: StepOptions, acceptance: tuple[float, ...]) -> list[ReplayCost]:
    """Plain decoding, drafts as the runtime plans them, and chains of all mask slots, on the engine of a runtime.

    The runtime cannot be used afterwards: closing that of the replay closes its engine.
    """
    manifest = base.bundle.manifest
    slots = (manifest.drafts.max_tokens,) if manifest.drafts.max_tokens else ()
    asked = DecodeOptions(_COMPLETION, rounds=2)
    texts = SyntheticTexts(manifest, acceptance, _REPLAY_PROMPTS, options.context, _COMPLETION)
    modes = modes_for(manifest, asked.max_tokens, ("masks",) if slots else (), slots)
    with replay_runtime(base, texts) as runtime:
        measured = measure_modes(modes, runtime, texts.prompts, asked, lambda line: None)
    summaries = mode_summaries(measured, modes, texts.prompts, asked)
    plain = summaries[0].tokens_per_second
    return [
        ReplayCost(one.mode, one.tokens_per_second, one.tokens_per_step, one.tokens_per_second / plain)
        for one in summaries
    ]


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


def steps_report(
    measured: Sequence[EngineSteps], options: StepOptions, transformers: Mapping[str, float] | None = None
) -> Report:
    """Step times, the time outside the engine and replays as tables: a row per backend, with or without CUDA graphs."""
    steps = [
        (one.name, *(f"{step.milliseconds:.2f} ({step.ratio:.2f})" for step in one.steps), one.device)
        for one in measured
    ]
    loops = [
        (one.name, loop.mask_slots, loop.steps, loop.engine_milliseconds, f"{loop.outside_milliseconds:.3f}")
        for one in measured
        for loop in one.loops
    ]
    replays = [
        (one.name, mode.mode, mode.tokens_per_second, f"{mode.tokens_per_step:.2f}", f"{mode.speedup:.2f}")
        for one in measured
        for mode in one.replay
    ]
    title = f"Milliseconds of a step after {options.context} tokens, by number of rows (ratio to the first)"
    replayed = f"Replay, accepted by depth: {', '.join(f'{rate:g}' for rate in options.replay or ())}"
    tables = (
        Table(title, ("backend", *map(str, options.rows), "device"), steps),
        Table("Decoding, per step", ("backend", "mask slots", "steps", "ms in the engine", "ms outside"), loops),
        Table(replayed, ("backend", "mode", "tokens/s", "tokens per step", "times plain"), replays),
        Table("Plain decoding with transformers", ("", "ms per token"), list((transformers or {}).items())),
    )
    lines = [
        f"{one.name}: a step of {options.rows[0]} rows reads the weights with {one.share:.2f} of the device's bandwidth"
        for one in measured
        if one.share is not None
    ]
    lines += [f"{one.name}: drafted text is {one.guarantee}" for one in measured if one.guarantee]
    lines += [f"{one.name}: no time for {', '.join(one.left_out)}" for one in measured if one.left_out]
    backends = [asdict(one) | {"share": one.share} for one in measured]
    data = {"options": asdict(options), "backends": backends, "transformers": transformers}
    return Report((), tables, lines, data)
