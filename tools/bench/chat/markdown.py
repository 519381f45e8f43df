"""Markdown: a chat benchmark as tables, which are also printed to the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spaceport.tools.bench.chat.report import ChatReport
from spaceport.tools.bench.chat.summary import ALL, LOSS, Figures
from spaceport.tools.bench.compare.markdown import header, number, row, titled
from spaceport.tools.bench.decode.modes import DEFAULT, PLAIN
from spaceport.tools.bench.decode.report import described
from spaceport.tools.bench.decode.speedup import Speedup

_SHOWN = 10  # differences; JSON has all
_FIXED = "fixed "  # start of the names of modes with a fixed draft
_DEPTHS = 8  # columns; JSON has all
_NONE = "-"


def markdown_of(report: ChatReport) -> str:
    """The whole report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: ChatReport) -> Iterator[str]:
    yield from setting(report)
    sections = (
        ("Speed by mode", speeds(report)),
        ("Answer speedup by kind of prompt (95 % interval)", speedups_by_kind(report)),
        *(
            (f"Acceptance of {name[len(_FIXED) :]} mask slots in every step", fixed_drafts(report, name))
            for name in _fixed(report)
        ),
        ("Mean acceptance length of planned drafts", planned_drafts(report)),
        ("Other runtimes", peers(report)),
        (f"Speed of `{DEFAULT}` relative to other runtimes by kind of prompt (95 % interval)", peers_by_kind(report)),
        (f"Forked threads: {', '.join(report.options.fork_kinds)}", forks(report)),
    )
    yield from titled(sections)
    yield ""
    yield from conclusions(report)


def setting(report: ChatReport) -> Iterator[str]:
    """What was measured on which machine."""
    machine, options = report.machine, report.options
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield (
        f"{report.bundle} on {report.engine}, {options.threads} thread(s); {machine.cpu} ({machine.model}; "
        f"{machine.cores} cores; {', '.join(machine.flags) or 'no vector extensions found'}), {machine.system}; {versions}."
    )
    yield (
        f"{report.prompts} prompts of {len(report.kinds)} kinds, greedy, at most {options.max_tokens} tokens per answer, "
        f"{options.rounds} round(s) after a warm-up; intervals are bootstraps over prompts, seed {options.seed}."
    )


def speeds(report: ChatReport) -> Iterator[str]:
    """The table of speed over all prompts: a row per mode."""
    cpu = ["the same in CPU time"] if report.options.threads == 1 else []  # several threads spin while they wait
    yield from header(
        [
            *("mode", "decode tokens/s", "tokens/s", "first token p50, ms", "tokens per step"),
            *("decode speedup (95 % interval)", "answer speedup (95 % interval)", *cpu, "worst prompt"),
            *(f"below {LOSS}", "output"),
        ]
    )
    for name in report.modes:
        if (one := report.figure(name)) is not None:
            steps = "1.00" if one.drafts is None else f"{one.drafts.tokens_per_step:.2f}"
            speed = [*_speed(one), steps, _interval(one.decode_speedup), _interval(one.speedup)]
            speed += [_interval(one.cpu_speedup) for _ in cpu]
            losses = _NONE if one.speedup is None else str(one.losses)
            yield row([name, *speed, _worst(one.speedup), losses, _output(report, name)])


def speedups_by_kind(report: ChatReport) -> Iterator[str]:
    """The table of speedups over plain decoding, prefill included: a row per kind, a column per mode."""
    drafted = [name for name in report.modes if name != PLAIN]
    yield from header(
        [
            *("kind", "prompts", "complete answers", "plain decode tokens/s", *drafted),
            *(f"{DEFAULT}, decode", f"{DEFAULT}, worst prompt", f"{DEFAULT}, below {LOSS}"),
        ]
    )
    for kind in (*report.kinds, ALL):
        plain, default = report.figure(PLAIN, kind), report.figure(DEFAULT, kind)
        if plain is None:
            continue
        cells = [str(plain.prompts), f"{plain.complete} of {plain.answers}", _rate(plain.decode_tokens_per_second)]
        cells += [_interval(one.speedup) if (one := report.figure(name, kind)) else _NONE for name in drafted]
        last = [_NONE] * 3
        if default is not None:
            last = [_interval(default.decode_speedup), _worst(default.speedup), str(default.losses)]
        yield row([kind, *cells, *last])


def fixed_drafts(report: ChatReport, name: str) -> Iterator[str]:
    """The table of acceptance with a fixed number of mask slots: a row per kind."""
    overall = report.figure(name)
    if overall is None or overall.drafts is None:
        return
    depths = range(min(_DEPTHS, len(overall.drafts.by_depth)))
    yield from header(["kind", "mean acceptance length", *(f"depth {depth + 1}" for depth in depths)])
    for kind in (*report.kinds, ALL):
        if (one := report.figure(name, kind)) is None or (drafts := one.drafts) is None:
            continue
        rates = [f"{drafts.by_depth[depth].rate:.2f}" if depth < len(drafts.by_depth) else _NONE for depth in depths]
        yield row([kind, f"{drafts.mean_acceptance_length:.2f}", *rates])
    given = ", ".join(f"{rate:.2f}" for rate in overall.drafts.given_previous)
    yield ""
    yield f"Over all prompts, if the draft token before was accepted: {given}."


def planned_drafts(report: ChatReport) -> Iterator[str]:
    """The table of mean acceptance lengths where step costs decide how much is drafted: a row per kind."""
    planned = [name for name in report.modes if name != PLAIN and not name.startswith(_FIXED)]
    if not any((one := report.figure(name)) is not None and one.drafts for name in planned):
        return
    yield from header(["kind", *planned])
    for kind in (*report.kinds, ALL):
        found = [report.figure(name, kind) for name in planned]
        if any(found):
            lengths = [f"{one.drafts.mean_acceptance_length:.2f}" if one and one.drafts else "1.00" for one in found]
            yield row([kind, *lengths])


def peers(report: ChatReport) -> Iterator[str]:
    """The table of other runtimes over all prompts that they answered."""
    names = list(dict.fromkeys(ratio.peer for ratio in report.peer_ratios))
    modes = [name for name in (PLAIN, DEFAULT) if any(ratio.mode == name for ratio in report.peer_ratios)]
    if not names:
        return
    yield from header(
        [
            *("runtime", "prompts", "decode tokens/s", "tokens/s", "first token p50, ms"),
            *(f"{mode} relative to it{what}" for mode in modes for what in (", decode", "")),
            f"worst prompt of {modes[-1]}",
        ]
    )
    for name in names:
        one = report.figure(name)
        if one is not None:
            found = [report.ratio(name, mode) for mode in modes]
            cells = [_interval(part) for ratio in found if ratio for part in (ratio.decode_speedup, ratio.speedup)]
            yield row([name, str(one.prompts), *_speed(one), *cells, _worst(found[-1].speedup if found[-1] else None)])
    yield ""
    for peer in report.peers:
        versions = ", ".join(f"{name} {version}" for name, version in peer.versions.items())
        yield f"- {peer.name}: {peer.model}; {peer.settings}; {versions}."


def peers_by_kind(report: ChatReport) -> Iterator[str]:
    """The table of the default drafts' speed relative to other runtimes, prefill included: a row per kind."""
    names = list(dict.fromkeys(ratio.peer for ratio in report.peer_ratios if ratio.mode == DEFAULT))
    if not names:
        return
    yield from header(["kind", *names])
    for kind in (*report.kinds, ALL):
        found = [report.ratio(name, DEFAULT, kind) for name in names]
        yield row([kind, *(_interval(one.speedup if one else None) for one in found)])


def forks(report: ChatReport) -> Iterator[str]:
    """The table of forked threads: a row per mode."""
    if not report.forks:
        return
    yield from header(
        [
            *("mode", "answers", "complete", "threads (most)", "tokens per answer", "s per answer"),
            *(
                "answers/s relative to plain (95 % interval)",
                "the same, complete answers",
                "tokens/s",
                "tokens per step",
            ),
        ]
    )
    for one in report.forks:
        counts = [str(one.answers), str(one.complete), f"{one.threads:.1f} ({one.most_threads})", f"{one.tokens:.0f}"]
        speedups = [_interval(one.answer_speedup), _interval(one.complete_speedup)]
        if one.complete_speedup is not None:
            speedups[1] += f", {one.complete_speedup.prompts} prompts"
        rates = [number(one.tokens_per_second), f"{one.tokens_per_step:.2f}"]
        yield row([one.mode, *counts, number(one.seconds), *speedups, *rates])


def conclusions(report: ChatReport) -> Iterator[str]:
    """Identical answers, differences, runtimes that were not measured, and the load of the machine."""
    compared = sum(report.compared.values())
    if report.identical:
        yield f"- All {compared} compared answers are identical to those without drafts."
    else:
        yield f"- {len(report.differences)} of {compared} compared answers DIFFER; `spaceport audit` separates rounding from faults:"
        for one in report.differences[:_SHOWN]:
            yield f"  - {described(one.difference)} (answer {one.turn})"
        if (more := len(report.differences) - _SHOWN) > 0:
            yield f"  - {more} more: --json lists them"
    for skipped in report.skipped:
        yield f"- {skipped.name}: not measured: {skipped.reason}"
    for name, reason in report.failed.items():
        yield f"- {name}: failed: {reason}"
    if report.other_cores is not None:
        yield f"- Other processes of the machine used {report.other_cores:.2f} cores meanwhile."


def _fixed(report: ChatReport) -> Sequence[str]:
    return [name for name in report.modes if name.startswith(_FIXED)]


def _speed(one: Figures) -> list[str]:
    return [_rate(one.decode_tokens_per_second), number(one.tokens_per_second), number(one.first_token_p50 * 1e3)]


def _rate(rate: float | None) -> str:
    return _NONE if rate is None else number(rate)


def _interval(speedup: Speedup | None) -> str:
    if speedup is None:
        return _NONE
    interval = f" ({speedup.low:.2f}-{speedup.high:.2f})" if speedup.prompts > 1 else ""  # one prompt says nothing
    return f"{speedup.mean:.2f}{interval}"


def _worst(speedup: Speedup | None) -> str:
    return _NONE if speedup is None else f"{speedup.worst:.2f} (line {speedup.worst_line})"


def _output(report: ChatReport, name: str) -> str:
    if name not in report.compared:
        return "reference"
    different = sum(one.difference.mode == name for one in report.differences)
    return f"{different} of {report.compared[name]} DIFFER" if different else "same as plain"
