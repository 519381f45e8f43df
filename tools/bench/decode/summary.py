"""Summary: the results of each mode and temperature, as data for JSON, tables and the plot."""

from __future__ import annotations

import statistics as numbers
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spaceport.runtime.decode.statistics import Statistics
from spaceport.tools.bench.compare.machine import Machine
from spaceport.tools.bench.compare.summary import Spread, spread
from spaceport.tools.bench.decode.measuring import Difference, Measured, MeasuredCompletion
from spaceport.tools.bench.decode.modes import PLAIN, DecodeMode
from spaceport.tools.bench.decode.options import DecodeOptions
from spaceport.tools.bench.decode.speedup import Speedup, speedup_of
from spaceport.tools.verify.audit.prompts import TokenizedPrompt

REPLAY_LABEL = "REPLAY: real engine steps, synthetic text; acceptance rates from the given table, not from the model"


@dataclass(frozen=True)
class Rate:
    """The draft tokens of one depth or source."""

    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


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
class DecodeReport:
    """The results of a benchmark."""

    bundle: str
    engine: str
    machine: Machine
    options: DecodeOptions
    prompts: int
    modes: tuple[ModeSummary, ...]
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Whether every completion equals that of its reference mode."""
        return not self.differences

    @property
    def replay(self) -> bool:
        return self.options.replay is not None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        data = asdict(self)
        for mode, summary in zip(data["modes"], self.modes, strict=True):
            mode["by_depth"] = [{**asdict(rate), "rate": rate.rate} for rate in summary.by_depth]
            mode["by_source"] = {s: {**asdict(rate), "rate": rate.rate} for s, rate in summary.by_source.items()}
        kind = {"kind": "replay", "label": REPLAY_LABEL} if self.replay else {"kind": "measured"}
        return {**kind, "identical": self.identical, **data}


def summarized(
    measured: Measured, modes: Sequence[DecodeMode], prompts: Sequence[TokenizedPrompt], options: DecodeOptions
) -> tuple[ModeSummary, ...]:
    """The summaries of all modes, temperature by temperature."""
    return tuple(
        _mode(measured, mode, temperature, prompts, options) for temperature in options.temperatures for mode in modes
    )


def _mode(
    measured: Measured, mode: DecodeMode, temperature: float, prompts: Sequence[TokenizedPrompt], options: DecodeOptions
) -> ModeSummary:
    own = [one for one in measured.completions if (one.mode, one.temperature) == (mode.name, temperature)]
    plain = [one for one in measured.completions if (one.mode, one.temperature) == (PLAIN, temperature)]
    rates, plain_rates = ([_rate(measured, each, number) for number in _rounds(options)] for each in (own, plain))
    found = [one.statistics for one in own]
    ratios = {} if mode.name == PLAIN else _ratios(own, plain, prompts)
    steps, accepted = sum(s.steps for s in found), sum(sum(s.accepted_by_depth) for s in found)
    outside, engine = sum(s.outside_seconds for s in found), sum(s.engine_seconds for s in found)
    p50, p95 = np.quantile([s.first_token_seconds for s in found], (0.5, 0.95)).tolist()
    return ModeSummary(
        mode=mode.name,
        temperature=temperature,
        tokens_per_second=numbers.median(rates),
        throughput_ratio=_ratio(rates, plain_rates) if mode.name != PLAIN else None,
        speedup=speedup_of(ratios, options.seed),
        first_token_p50=p50,
        first_token_p95=p95,
        tokens_per_step=sum(s.tokens for s in found) / max(1, steps),
        mean_acceptance_length=1 + accepted / max(1, steps),
        by_depth=rates_by_depth(found),
        by_source=rates_by_source(found),
        outside_share=outside / (outside + engine),
        reference=None if mode.name == mode.reference else mode.reference,
        compared=measured.compared[mode.name, temperature],
        different=measured.different[mode.name, temperature],
        prompts=tuple(_prompts(own, ratios, prompts)),
    )


def _rounds(options: DecodeOptions) -> range:
    return range(1, options.rounds + 1)


def _rate(measured: Measured, completions: Sequence[MeasuredCompletion], number: int) -> float:
    """Tokens per second over all completions of a round."""
    seconds = measured.seconds[completions[0].mode, completions[0].temperature, number]
    return sum(one.statistics.tokens for one in completions if one.round == number) / seconds


def _ratio(rates: Sequence[float], plain_rates: Sequence[float]) -> Spread | None:
    if not all(plain_rates):
        return None
    return spread([rate / plain for rate, plain in zip(rates, plain_rates, strict=True)])


def _ratios(
    own: Iterable[MeasuredCompletion], plain: Iterable[MeasuredCompletion], prompts: Sequence[TokenizedPrompt]
) -> dict[int, list[float]]:
    """Speed ratios to plain decoding in the same round, by line number; empty completions are left out."""
    ratios: dict[int, list[float]] = {}
    for one, other in zip(own, plain, strict=True):
        assert (one.round, one.prompt) == (other.round, other.prompt)
        rate, plain_rate = one.statistics.tokens_per_second, other.statistics.tokens_per_second
        if rate and plain_rate:
            ratios.setdefault(prompts[one.prompt].line, []).append(rate / plain_rate)
    return ratios


def _prompts(
    own: Sequence[MeasuredCompletion], ratios: dict[int, list[float]], prompts: Sequence[TokenizedPrompt]
) -> Iterable[PromptSummary]:
    for index, prompt in enumerate(prompts):
        found = [one.statistics for one in own if one.prompt == index]
        yield PromptSummary(
            prompt.line,
            len(prompt.tokens),
            found[0].tokens,
            numbers.median(s.tokens_per_second for s in found),
            numbers.median(s.first_token_seconds for s in found),
            numbers.median(s.tokens_per_step for s in found),
            numbers.median(ratios[prompt.line]) if prompt.line in ratios else None,
        )


def rates_by_depth(completions: Iterable[Statistics]) -> tuple[Rate, ...]:
    """The draft tokens of these completions by depth in the draft."""
    drafted: list[int] = []
    accepted: list[int] = []
    for one in completions:
        for totals, counts in ((drafted, one.drafted_by_depth), (accepted, one.accepted_by_depth)):
            totals += [0] * (len(counts) - len(totals))
            for depth, count in enumerate(counts):
                totals[depth] += count
    return tuple(Rate(*pair) for pair in zip(drafted, accepted, strict=True))


def rates_by_source(completions: Iterable[Statistics]) -> dict[str, Rate]:
    """The draft tokens of these completions by source."""
    found: dict[str, Rate] = {}
    for one in completions:
        for source, count in one.drafted_by_source.items():
            before = found.get(source, Rate(0, 0))
            accepted = one.accepted_by_source.get(source, 0)
            found[source] = Rate(before.drafted + count, before.accepted + accepted)
    return dict(sorted(found.items()))
