"""Decode benchmark: the speedup of drafts over plain decoding on given prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from spaceport.runtime.backends.machine import cpu_class, cpu_name, usable_cpus
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decode.sources import named_source
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode_measuring import (
    DEFAULT,
    PLAIN,
    DecodeMeasurements,
    DecodeMode,
    DecodeOptions,
    MeasuredCompletion,
    OutputDifference,
    measure_modes,
    modes_for,
)
from spaceport.tools.bench.report import Report, Table
from spaceport.verify.prompts import TokenizedPrompt, read_prompts, tokenize_prompts

_RESAMPLES = 2000
_INTERVAL = (0.025, 0.975)
_SHOWN = 10  # differences; JSON has all
_DEPTHS = 8  # columns; JSON has all


@dataclass(frozen=True)
class Spread:
    """The median over the rounds, with the lowest and the highest value."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class Speedup:
    """The geometric mean over prompts of each prompt's median over rounds."""

    mean: float
    low: float  # lower end of the 95 % bootstrap interval over prompts and rounds
    high: float
    worst: float
    worst_line: int  # line number in the prompt file
    best: float
    best_line: int
    prompts: int  # number of prompts with a non-empty completion

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f}-{self.high:.2f})"


def speedup_of(ratios: Mapping[int, Sequence[float]], seed: int) -> Speedup | None:
    """The speedup from the ratios of each prompt's rounds, by line number; None without prompts."""
    if not ratios:
        return None
    lines = list(ratios)
    logs = np.log([ratios[line] for line in lines])  # prompts x rounds
    medians = np.median(logs, axis=1)
    random = np.random.default_rng(seed)
    means = []  # of resampled prompts, and resampled rounds of each
    for _ in range(_RESAMPLES):
        sample = random.integers(0, len(logs), (len(logs), 1)), random.integers(0, logs.shape[1], logs.shape)
        means.append(np.median(logs[sample], axis=1).mean())
    low, high = np.exp(np.quantile(means, _INTERVAL)).tolist()
    worst, best = int(medians.argmin()), int(medians.argmax())
    values = np.exp(medians).tolist()
    return Speedup(
        float(np.exp(medians.mean())), low, high, values[worst], lines[worst], values[best], lines[best], len(lines)
    )


@dataclass(frozen=True)
class Rate:
    """The draft tokens of one depth or source."""

    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def __str__(self) -> str:
        return f"{self.rate:.2f} of {self.drafted}"


@dataclass(frozen=True)
class PromptSummary:
    """One prompt in one mode: medians over the rounds."""

    line: int  # line number in the prompt file
    prompt_tokens: int
    tokens: int
    tokens_per_second: float  # generated tokens, prefill time included
    first_token_seconds: float
    tokens_per_step: float
    speedup: float | None  # over plain decoding; None for plain decoding and for empty completions


@dataclass(frozen=True)
class ModeSummary:
    """One mode at one temperature."""

    mode: str
    temperature: float
    tokens_per_second: float  # median of the rounds, of all requests together, prefill time included
    throughput_ratio: Spread | None  # to plain decoding's tokens/s in the same round; None for plain decoding
    speedup: Speedup | None  # per prompt over plain decoding; None for plain decoding and for empty completions
    first_token_p50: float  # seconds
    first_token_p95: float
    tokens_per_step: float
    mean_acceptance_length: float  # 1 + accepted / steps
    by_depth: tuple[Rate, ...]
    by_source: dict[str, Rate]
    outside_share: float  # share of the time outside the engine
    reference: str | None  # mode with the same output; None for a reference mode
    compared: int  # completions compared with the reference, warm-up included
    different: int  # those that differ
    prompts: tuple[PromptSummary, ...]


@dataclass(frozen=True)
class DecodeResults:
    """The results of a benchmark."""

    bundle: str
    engine: str
    machine: str  # name and class of the CPU
    cores: int  # that this process may use
    options: DecodeOptions
    prompts: int
    modes: tuple[ModeSummary, ...]
    differences: tuple[OutputDifference, ...]

    @property
    def identical(self) -> bool:
        """Whether every completion equals that of its reference mode."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        data = asdict(self)
        for mode in data["modes"]:
            for rate in (*mode["by_depth"], *mode["by_source"].values()):
                rate["rate"] = Rate(**rate).rate
        data["differences"] = [one.as_dict() for one in self.differences]
        return {"identical": self.identical, **data}


def mode_summaries(
    measured: DecodeMeasurements,
    modes: Sequence[DecodeMode],
    prompts: Sequence[TokenizedPrompt],
    options: DecodeOptions,
) -> tuple[ModeSummary, ...]:
    """The summaries of all modes, temperature by temperature."""
    return tuple(
        _mode(measured, mode, temperature, prompts, options) for temperature in options.temperatures for mode in modes
    )


def _mode(
    measured: DecodeMeasurements,
    mode: DecodeMode,
    temperature: float,
    prompts: Sequence[TokenizedPrompt],
    options: DecodeOptions,
) -> ModeSummary:
    own, plain = (
        [one for one in measured.completions if (one.mode, one.temperature) == (name, temperature)]
        for name in (mode.name, PLAIN)
    )
    rates, plain_rates = (_rates(measured, completions, options.rounds) for completions in (own, plain))
    statistics = [one.statistics for one in own]
    drafted = mode.name != PLAIN
    ratios = _ratios(own, plain, prompts) if drafted else {}
    paired = [rate / base for rate, base in zip(rates, plain_rates, strict=True)] if all(plain_rates) else []
    steps = max(1, sum(one.steps for one in statistics))
    outside, engine = sum(one.outside_seconds for one in statistics), sum(one.engine_seconds for one in statistics)
    p50, p95 = np.quantile([one.first_token_seconds for one in statistics], (0.5, 0.95)).tolist()
    by_depth = _by_depth(statistics)
    return ModeSummary(
        mode=mode.name,
        temperature=temperature,
        tokens_per_second=median(rates),
        throughput_ratio=Spread(median(paired), min(paired), max(paired)) if drafted and paired else None,
        speedup=speedup_of(ratios, options.seed),
        first_token_p50=p50,
        first_token_p95=p95,
        tokens_per_step=sum(one.tokens for one in statistics) / steps,
        mean_acceptance_length=1 + sum(rate.accepted for rate in by_depth) / steps,
        by_depth=by_depth,
        by_source=_by_source(statistics),
        outside_share=outside / (outside + engine),
        reference=None if mode.name == mode.reference else mode.reference,
        compared=measured.compared[mode.name, temperature],
        different=sum((one.mode, one.temperature) == (mode.name, temperature) for one in measured.differences),
        prompts=tuple(_prompts(own, ratios, prompts)),
    )


def _by_depth(statistics: Sequence[Statistics]) -> tuple[Rate, ...]:
    drafted, accepted = (
        [sum(counts) for counts in zip_longest(*by_depth, fillvalue=0)]
        for by_depth in ((one.drafted_by_depth for one in statistics), (one.accepted_by_depth for one in statistics))
    )
    return tuple(map(Rate, drafted, accepted))


def _by_source(statistics: Sequence[Statistics]) -> dict[str, Rate]:
    drafted, accepted = Counter[str](), Counter[str]()
    for one in statistics:
        drafted.update(one.drafted_by_source)
        accepted.update(one.accepted_by_source)
    return {source: Rate(drafted[source], accepted[source]) for source in sorted(drafted)}


def _rates(measured: DecodeMeasurements, completions: Sequence[MeasuredCompletion], rounds: int) -> list[float]:
    """Tokens per second over all completions of each round."""
    mode, temperature = completions[0].mode, completions[0].temperature
    tokens = Counter[int]()
    for one in completions:
        tokens[one.round] += one.statistics.tokens
    return [tokens[number] / measured.seconds[mode, temperature, number] for number in range(1, rounds + 1)]


def _ratios(
    own: Iterable[MeasuredCompletion], plain: Iterable[MeasuredCompletion], prompts: Sequence[TokenizedPrompt]
) -> dict[int, list[float]]:
    """Speed ratios to plain decoding in the same round, by line number; empty completions are left out."""
    ratios: dict[int, list[float]] = {}
    for one, other in zip(own, plain, strict=True):
        rate, plain_rate = one.statistics.tokens_per_second, other.statistics.tokens_per_second
        if rate and plain_rate:
            ratios.setdefault(prompts[one.prompt].line, []).append(rate / plain_rate)
    return ratios


def _prompts(
    own: Sequence[MeasuredCompletion], ratios: dict[int, list[float]], prompts: Sequence[TokenizedPrompt]
) -> Iterator[PromptSummary]:
    for index, prompt in enumerate(prompts):
        statistics = [one.statistics for one in own if one.prompt == index]
        yield PromptSummary(
            prompt.line,
            len(prompt.tokens),
            statistics[0].tokens,
            median(one.tokens_per_second for one in statistics),
            median(one.first_token_seconds for one in statistics),
            median(one.tokens_per_step for one in statistics),
            median(ratios[prompt.line]) if prompt.line in ratios else None,
        )


def decode_report(results: DecodeResults) -> Report:
    """The results as tables."""
    options = results.options
    setting = (
        f"{results.bundle} on {results.engine}; {results.machine}, {results.cores} cores, "
        f"{options.threads or 'all'} thread(s). {results.prompts} prompts, {options.max_tokens} tokens each, "
        f"{options.requests} concurrent request(s), {options.rounds} rounds after a warm-up."
    )
    tables, conclusions = (_speeds(results), _acceptance(results)), list(_conclusions(results))
    return Report((setting,), tables, conclusions, results.as_dict())


def _speeds(results: DecodeResults) -> Table:
    """Speed and latency: a row per mode and temperature."""
    columns = (
        *("mode", "temperature", "tokens/s", "ratio to plain (range)"),
        *("speedup per prompt (95 % interval)", "worst prompt", "best prompt"),
        *("first token p50, ms", "p95, ms", "tokens per step", "outside the engine", "output"),
    )
    rows = []
    for mode in results.modes:
        speedup = mode.speedup
        worst = None if speedup is None else f"{speedup.worst:.2f} (line {speedup.worst_line})"
        best = None if speedup is None else f"{speedup.best:.2f} (line {speedup.best_line})"
        latency = (mode.first_token_p50 * 1e3, mode.first_token_p95 * 1e3)
        speed = (mode.tokens_per_second, mode.throughput_ratio, speedup, worst, best, *latency, mode.tokens_per_step)
        rows.append((mode.mode, f"{mode.temperature:g}", *speed, f"{mode.outside_share:.0%}", _output(mode)))
    return Table("", columns, rows)


def _acceptance(results: DecodeResults) -> Table:
    """Acceptance rates: a row per mode and temperature with drafts."""
    depths = min(_DEPTHS, max(len(mode.by_depth) for mode in results.modes))
    names = {source for mode in results.modes for source in mode.by_source}
    sources = sorted(names, key=lambda source: (source.count("+"), source))
    rows = []
    for mode in results.modes:
        if mode.by_depth:
            rates = [mode.by_depth[depth] if depth < len(mode.by_depth) else None for depth in range(depths)]
            rates += [mode.by_source.get(source) for source in sources]
            cells = [rate if rate is not None and rate.drafted else None for rate in rates]
            rows.append((mode.mode, f"{mode.temperature:g}", mode.mean_acceptance_length, *cells))
    columns = ("mode", "temperature", "mean acceptance length", *(f"depth {depth + 1}" for depth in range(depths)))
    return Table("", (*columns, *map(named_source, sources)), rows)


def _conclusions(results: DecodeResults) -> Iterator[str]:
    """Whether the default drafts pay, and the completions that differ from their reference."""
    yield from (f"- {_verdict(mode, results.options.requests)}" for mode in results.modes if mode.mode == DEFAULT)
    compared = sum(mode.compared for mode in results.modes)
    if results.identical:
        yield f"- All {compared} compared completions are identical."
    else:
        found = f"{len(results.differences)} of {compared} compared completions DIFFER"
        yield f"- {found}; `spaceport audit` separates rounding from faults:"
        yield from (f"  - {one}" for one in results.differences[:_SHOWN])
        if (more := len(results.differences) - _SHOWN) > 0:
            yield f"  - {more} more: --json lists them"


def _verdict(mode: ModeSummary, requests: int) -> str:
    """The verdict on the default drafts: by prompt for single requests, by total tokens/s for concurrent ones."""
    speedup, ratio = mode.speedup, mode.throughput_ratio
    if speedup is None or ratio is None:
        return f"Temperature {mode.temperature:g}: all completions are empty."
    found, low, high = speedup.mean, speedup.low, speedup.high
    figure, interval = f"times the speed of {PLAIN} decoding", "95 % interval"
    if requests > 1:
        found, low, high = ratio.median, ratio.low, ratio.high
        figure, interval = f"times the tokens/s of {PLAIN} decoding with {requests} requests", "rounds from"
    what = "pay" if low > 1 else "do not pay" if high < 1 else "make no clear difference"
    return (
        f"Temperature {mode.temperature:g}: the default drafts {what}: {found:.2f} {figure} "
        f"({interval} {low:.2f} to {high:.2f})."
    )


def _output(mode: ModeSummary) -> str:
    if mode.reference is None:
        return "reference"
    return f"{mode.different} of {mode.compared} DIFFER" if mode.different else f"same as {mode.reference}"


def benchmark_decode(
    bundle: Path, file: Path, options: DecodeOptions, on_progress: Callable[[str], None]
) -> DecodeResults:
    """The speed of every mode on a prompt file."""
    read = read_prompts(file)[: options.limit]
    modes = modes_for(read_manifest(bundle), options.max_tokens, options.modes, options.fixed)
    on_progress("opening the bundle")
    with Runtime.open(
        bundle,
        backend=options.backend,
        max_seq_len=options.max_seq_len,
        max_requests=options.requests,
        threads=options.threads,
        trust_engines=options.trust_engines,
    ) as runtime:
        engine = f"{type(runtime.engine).__name__}, {runtime.engine.device}"
        for note in runtime.notes:
            on_progress(note)
        prompts = tokenize_prompts(runtime, read, options.max_tokens, file)
        on_progress(expected_work(runtime, len(modes), prompts, options))
        measured = measure_modes(modes, runtime, prompts, options, on_progress)
    return DecodeResults(
        bundle.absolute().name,
        engine,
        f"{cpu_name()} ({cpu_class()})",
        usable_cpus(),
        options,
        len(prompts),
        mode_summaries(measured, modes, prompts, options),
        tuple(measured.differences),
    )


def expected_work(runtime: Runtime, modes: int, prompts: Sequence[TokenizedPrompt], options: DecodeOptions) -> str:
    """How much is measured, and about how long it takes in plain steps if every completion has the maximum length."""
    rounds, temperatures = options.rounds + 1, len(options.temperatures)
    text = f"{len(prompts)} prompts, {modes} modes, {options.rounds} rounds after a warm-up"
    if runtime.costs.relative:  # the time of a step is not known
        return text
    visible = max(len(prompt.tokens) for prompt in prompts) + options.max_tokens
    step = runtime.costs.seconds(1, options.requests, visible) / options.requests
    seconds = step * options.max_tokens * len(prompts) * modes * temperatures * rounds
    duration = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(1.0, seconds):.0f} s"
    return f"{text}: about {duration} if every completion has {options.max_tokens} tokens"
