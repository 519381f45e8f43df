"""Report: a benchmark as Markdown tables, which are also printed to the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from spaceport.runtime.decode.sources import named_source
from spaceport.tools.bench.compare.markdown import header, number, row
from spaceport.tools.bench.compare.summary import Spread
from spaceport.tools.bench.decode.measuring import Difference
from spaceport.tools.bench.decode.modes import DEFAULT, PLAIN
from spaceport.tools.bench.decode.replay import implied_tokens_per_step
from spaceport.tools.bench.decode.speedup import Speedup
from spaceport.tools.bench.decode.summary import REPLAY_LABEL, DecodeReport, ModeSummary, Rate

_SHOWN = 10  # differences; JSON has all
_DEPTHS = 8  # columns; JSON has all


def markdown_of(report: DecodeReport) -> str:
    """The whole report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: DecodeReport) -> Iterator[str]:
    options = report.options
    if options.replay is not None:
        rates = ", ".join(f"{rate:g}" for rate in options.replay)
        yield f"**{REPLAY_LABEL}** ({rates} by depth)."
    machine = report.machine
    yield (
        f"{report.bundle} on {report.engine}; {machine.cpu} ({machine.cores} cores), "
        f"{options.threads or 'all'} thread(s). {report.prompts} prompts, {options.max_tokens} tokens each, "
        f"{options.requests} concurrent request(s), {options.rounds} rounds after a warm-up."
    )
    yield ""
    yield from speeds(report)
    yield ""
    yield from rates_of(report)
    yield ""
    yield from conclusions(report)


def speeds(report: DecodeReport) -> Iterator[str]:
    """The table of speed and latency: a row per mode and temperature."""
    yield from header(
        [
            *("mode", "temperature", "tokens/s", "ratio to plain (range)"),
            *("speedup per prompt (95 % interval)", "worst prompt", "best prompt"),
            *("first token p50, ms", "p95, ms", "tokens per step", "outside the engine", "output"),
        ]
    )
    for mode in report.modes:
        rates = [number(mode.tokens_per_second), _ratio(mode.throughput_ratio)]
        latency = [number(seconds * 1e3) for seconds in (mode.first_token_p50, mode.first_token_p95)]
        rest = [f"{mode.tokens_per_step:.2f}", f"{mode.outside_share:.0%}", _output(mode)]
        yield row([mode.mode, f"{mode.temperature:g}", *rates, *_speedup(mode.speedup), *latency, *rest])


def rates_of(report: DecodeReport) -> Iterator[str]:
    """The table of acceptance rates: a row per mode and temperature with drafts."""
    depths = min(_DEPTHS, max(len(mode.by_depth) for mode in report.modes))
    columns = ["mode", "temperature", "mean acceptance length", *(f"depth {depth + 1}" for depth in range(depths))]
    names = {source for mode in report.modes for source in mode.by_source}
    sources = sorted(names, key=lambda source: (source.count("+"), source))
    yield from header([*columns, *map(named_source, sources)])
    for mode in report.modes:
        if mode.by_depth:
            by_depth = [_rate(mode.by_depth[depth] if depth < len(mode.by_depth) else None) for depth in range(depths)]
            by_source = [_rate(mode.by_source.get(source)) for source in sources]
            yield row([mode.mode, f"{mode.temperature:g}", f"{mode.mean_acceptance_length:.2f}", *by_depth, *by_source])


def conclusions(report: DecodeReport) -> Iterator[str]:
    """Whether the default drafts pay, and the completions that differ from their reference."""
    if (table := report.options.replay) is not None:
        implied = f"{implied_tokens_per_step(table):.2f} tokens per step"
        yield f"- The table implies {implied} for a chain of {len(table)} mask slots; the first step of a completion has no drafts."
    yield from (f"- {_verdict(mode, report.options.requests)}" for mode in report.modes if mode.mode == DEFAULT)
    compared = sum(mode.compared for mode in report.modes)
    if report.identical:
        yield f"- All {compared} compared completions are identical."
    else:
        yield f"- {len(report.differences)} of {compared} compared completions DIFFER; `spaceport audit` separates rounding from faults:"
        yield from (f"  - {described(difference)}" for difference in report.differences[:_SHOWN])
        if (more := len(report.differences) - _SHOWN) > 0:
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


def described(difference: Difference) -> str:
    """A difference in one line: where it is, and both tokens."""
    thread = f", thread {'.'.join(map(str, difference.thread))}" if difference.thread else ""
    expected, found = (
        "the end" if token is None else f"token id {token}" for token in (difference.expected, difference.found)
    )
    when = f"round {difference.round}" if difference.round else "warm-up"
    return (
        f"line {difference.line}, temperature {difference.temperature:g}, {when}{thread}, token {difference.token}: "
        f"{difference.mode} has {found}, {difference.reference} has {expected}"
    )


def _ratio(ratio: Spread | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _speedup(speedup: Speedup | None) -> list[str]:
    if speedup is None:
        return ["-"] * 3
    ends = ((speedup.worst, speedup.worst_line), (speedup.best, speedup.best_line))
    mean = f"{speedup.mean:.2f} ({speedup.low:.2f}-{speedup.high:.2f})"
    return [mean, *(f"{ratio:.2f} (line {line})" for ratio, line in ends)]


def _output(mode: ModeSummary) -> str:
    if mode.reference is None:
        return "reference"
    return f"{mode.different} of {mode.compared} DIFFER" if mode.different else f"same as {mode.reference}"


def _rate(rate: Rate | None) -> str:
    return "-" if rate is None or not rate.drafted else f"{rate.rate:.2f} of {rate.drafted}"
