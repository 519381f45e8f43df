"""Report: a benchmark as Markdown tables, which a terminal shows too."""

from __future__ import annotations

from collections.abc import Iterator

from spaceport.tools.bench.compare.markdown import header, number, row
from spaceport.tools.bench.decode.measuring import Difference
from spaceport.tools.bench.decode.modes import DEFAULT, PLAIN
from spaceport.tools.bench.decode.replay import implied_tokens_per_step
from spaceport.tools.bench.decode.summary import REPLAY_LABEL, DecodeReport, ModeSummary, Rate

_SHOWN = 10  # differences; JSON has all
_DEPTHS = 8  # columns; JSON has all
_SOURCES = {"mask": "mask slots", "lookup": "prompt lookup", "both": "both"}


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
        f"{options.threads or 'all'} thread(s). {report.prompts} prompts, {options.max_tokens} tokens, "
        f"{options.requests} request(s) at a time, {options.rounds} rounds behind a warm-up."
    )
    yield ""
    yield from speeds(report)
    yield ""
    yield from rates_of(report)
    yield ""
    yield from conclusions(report)


def speeds(report: DecodeReport) -> Iterator[str]:
    """Speed and latency, a row for each mode and temperature."""
    yield from header(
        [
            *("mode", "temperature", "tokens/s", "speed-up (95 % interval)", "worst prompt", "best prompt"),
            *("first token p50, ms", "p95, ms", "tokens per step", "outside the engine", "texts"),
        ]
    )
    for mode in report.modes:
        speedup = mode.speedup
        ratios = ["-", "-", "-"]
        if speedup is not None:
            interval = f"{speedup.mean:.2f} ({speedup.low:.2f}-{speedup.high:.2f})"
            ratios = [
                interval,
                *(
                    f"{ratio:.2f} (line {line})"
                    for ratio, line in (
                        (speedup.worst, speedup.worst_line),
                        (speedup.best, speedup.best_line),
                    )
                ),
            ]
        latency = [number(seconds * 1e3) for seconds in (mode.first_token_p50, mode.first_token_p95)]
        rest = [f"{mode.tokens_per_step:.2f}", f"{mode.outside_share:.0%}", _same(mode)]
        yield row([mode.mode, f"{mode.temperature:g}", number(mode.tokens_per_second), *ratios, *latency, *rest])


def rates_of(report: DecodeReport) -> Iterator[str]:
    """Acceptance, a row for each mode and temperature that drafts."""
    depths = min(_DEPTHS, max(len(mode.by_depth) for mode in report.modes))
    columns = ["mode", "temperature", "mean acceptance length", *(f"depth {depth + 1}" for depth in range(depths))]
    yield from header([*columns, *_SOURCES.values()])
    for mode in report.modes:
        if mode.by_depth:
            by_depth = [_rate(mode.by_depth[depth] if depth < len(mode.by_depth) else None) for depth in range(depths)]
            by_source = [_rate(mode.by_source.get(source)) for source in _SOURCES]
            yield row([mode.mode, f"{mode.temperature:g}", f"{mode.acceptance_length:.2f}", *by_depth, *by_source])


def conclusions(report: DecodeReport) -> Iterator[str]:
    """Whether the default drafts pay, and every text that is not what it has to be."""
    if (table := report.options.replay) is not None:
        implied = f"{implied_tokens_per_step(table):.2f} tokens per step"
        yield f"- By the table a chain of {len(table)} mask slots writes {implied}; each text's first step has no drafts."
    for mode in report.modes:
        if mode.mode == DEFAULT and (speedup := mode.speedup) is not None:
            verdict = "make no clear difference"
            if speedup.low > 1:
                verdict = "pay"
            elif speedup.high < 1:
                verdict = "do not pay"
            yield (
                f"- Temperature {mode.temperature:g}: the default drafts {verdict}: {speedup.mean:.2f} times the speed of "
                f"{PLAIN} decoding (95 % interval {speedup.low:.2f} to {speedup.high:.2f})."
            )
    compared = sum(mode.compared for mode in report.modes)
    if report.identical:
        yield f"- All {compared} compared texts are identical."
    else:
        yield f"- {len(report.differences)} of {compared} compared texts DIFFER; `spaceport audit` tells rounding from faults:"
        yield from (f"  - {_told(difference)}" for difference in report.differences[:_SHOWN])
        if (more := len(report.differences) - _SHOWN) > 0:
            yield f"  - {more} more: --json lists them"


def _told(difference: Difference) -> str:
    thread = f", thread {'.'.join(map(str, difference.thread))}" if difference.thread else ""
    expected, found = (
        "its end" if token is None else f"token id {token}" for token in (difference.expected, difference.found)
    )
    when = f"round {difference.round}" if difference.round else "warm-up"
    return (
        f"line {difference.line}, temperature {difference.temperature:g}, {when}{thread}, token {difference.token}: "
        f"{difference.mode} has {found}, {difference.reference} has {expected}"
    )


def _same(mode: ModeSummary) -> str:
    if mode.reference is None:
        return "reference"
    return f"{mode.different} of {mode.compared} DIFFER" if mode.different else f"same as {mode.reference}"


def _rate(rate: Rate | None) -> str:
    return "-" if rate is None or not rate.drafted else f"{rate.rate:.2f} of {rate.drafted}"
