"""Markdown: a load benchmark as tables, which are also printed to the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from spaceport.tools.bench.compare.markdown import header, row, titled
from spaceport.tools.bench.serve.figures import Quantiles
from spaceport.tools.bench.serve.report import LoadFigures, ServeReport

_SHOWN = 10  # differences; JSON has all
_NONE = "-"


def markdown_of(report: ServeReport) -> str:
    """The whole report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: ServeReport) -> Iterator[str]:
    yield from setting(report)
    sections = (
        ("Throughput", throughput(report)),
        ("Latency, ms", latency(report)),
        ("The service of the bundle relative to others", ratios(report)),
        ("Requests", requests(report)),
        ("What the processes held without requests", resources(report)),
    )
    yield from titled(sections)
    yield ""
    yield from conclusions(report)


def setting(report: ServeReport) -> Iterator[str]:
    """What was measured on which machine."""
    machine, options = report.machine, report.options
    work = options.workload
    amount = f"{work.requests} requests" if work.requests is not None else f"{work.seconds:g} s"
    arrival = "one after the other per client" if work.rate is None else f"arriving at random, {work.rate:g} per second"
    yield (
        f"{report.bundle or 'No bundle'}, {options.threads} thread(s), at most {options.max_requests} requests at a time; "
        f"{machine.cpu} ({machine.model}; {machine.cores} cores; {', '.join(machine.flags) or 'no vector extensions found'})"
        f", {machine.system}."
    )
    yield (
        f"{report.prompts} prompts, greedy{'' if work.drafts else ', no drafts'}, at most {work.max_tokens} tokens per answer; {amount} per run, {arrival}; "
        f"medians of {options.rounds} round(s) after a warm-up, all in turns."
    )
    yield (
        f"Of the requests, {work.cancelled:.0%} are cancelled, {work.dropped:.0%} lose their connection, {work.slow:.0%} are "
        f"read slowly, {work.unstreamed:.0%} ask for the whole answer; seed {work.seed}."
    )


def throughput(report: ServeReport) -> Iterator[str]:
    """The table of throughput, acceptance and CPU time."""
    yield from header(
        [
            *("service", "clients", "tokens/s", "goodput, tokens/s", "answers/s", "mean acceptance length"),
            *("acceptance rate", "CPU ms per token", "of it, main thread"),
        ]
    )
    for one in report.loads:
        found, drafts = one.figures, one.figures.drafts
        cells = [f"{found.tokens_per_second:.1f}", f"{found.goodput:.1f}", f"{found.requests_per_second:.2f}"]
        cells += [f"{drafts.mean_acceptance_length:.2f}", f"{drafts.acceptance_rate:.2f}"] if drafts else [_NONE] * 2
        cells += [_number(found.cpu_per_token, 2), _number(found.main_thread_per_token, 3)]
        yield row([one.subject, str(one.clients), *cells])


def latency(report: ServeReport) -> Iterator[str]:
    """The table of latencies: p50 / p95 / p99."""
    yield from header(
        [
            *("service", "clients", "first token mean; p50 / p95 / p99", "between tokens, mean of a stream"),
            *("between events", "refusal p50 / p95 / highest"),
        ]
    )
    for one in report.loads:
        found = one.figures
        first = _NONE if found.first_token is None else f"{found.first_token.mean:.1f}; {_quantiles(found.first_token)}"
        cells = [first, _quantiles(found.per_token), _quantiles(found.gap)]
        refusal = found.refusal
        cells.append(_NONE if refusal is None else f"{refusal.p50:.1f} / {refusal.p95:.1f} / {refusal.highest:.1f}")
        yield row([one.subject, str(one.clients), *cells])


def ratios(report: ServeReport) -> Iterator[str]:
    """The table of the service relative to other subjects, and of its goodput relative to the first number of clients."""
    if not report.ratios:
        return
    yield from header(
        [
            *("relative to", "clients", "tokens/s", "first token, ms later: p50", "mean"),
            *("between tokens p95", "between events p95"),
        ]
    )
    for one in report.ratios:
        later = [_NONE if each is None else f"{each:+.1f}" for each in (one.first_token, one.first_token_mean)]
        cells = [f"{one.tokens_per_second:.3f}", *later, _number(one.per_token_p95, 2), _number(one.gap_p95, 2)]
        yield row([one.reference, str(one.clients), *cells])


def requests(report: ServeReport) -> Iterator[str]:
    """The table of what became of the requests, over all rounds."""
    yield from header(
        [
            "service",
            "clients",
            "answered",
            "left by the client",
            "refused",
            "failed",
            "compared",
            "different",
            "by status",
        ]
    )
    for one in report.loads:
        names = ("answered", "left", "refused", "failed", "compared", "different")
        counts = [f"{sum(getattr(each, name) for each in one.rounds):.0f}" for name in names]
        yield row([one.subject, str(one.clients), *counts, _statuses(one)])


def resources(report: ServeReport) -> Iterator[str]:
    """The table of memory, file descriptors and threads, after the warm-up and after each run."""
    if not report.resources:
        return
    yield from header(["process", "resident MB", "file descriptors", "threads"])
    for held in report.resources:
        megabytes = [round(one.resident_bytes / 1e6) for one in held.samples]
        counts = [one.file_descriptors for one in held.samples], [one.threads for one in held.samples]
        yield row([held.subject, *(", ".join(map(str, each)) for each in (megabytes, *counts))])


def conclusions(report: ServeReport) -> Iterator[str]:
    """Whether all answers are right, and the first errors."""
    compared = sum(each.compared for one in report.loads for each in one.rounds)
    if compared:
        yield f"- {compared - len(report.differences):.0f} of {compared:.0f} answers equal those of `Runtime.generate`."
    for one in report.differences[:_SHOWN]:
        yield f"- {one.subject}, {one.clients} clients, prompt {one.prompt + 1}: {one.text!r}, expected {one.expected!r}"
    if (rest := len(report.differences) - _SHOWN) > 0:
        yield f"- {rest} more differences"
    for name, error in report.errors.items():
        yield f"- {name}, first error: {error}"


def _quantiles(found: Quantiles | None) -> str:
    return _NONE if found is None else f"{found.p50:.1f} / {found.p95:.1f} / {found.p99:.1f}"


def _number(found: float | None, digits: int) -> str:
    return _NONE if found is None else f"{found:.{digits}f}"


def _statuses(one: LoadFigures) -> str:
    return ", ".join(f"{status}: {count}" for status, count in one.statuses.items())
