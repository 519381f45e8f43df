"""Markdown: a comparison as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from spaceport.tools.bench.compare.summary import Comparison, Spread, SubjectSummary

_MB = 1e6


def markdown_of(comparison: Comparison) -> str:
    """The whole comparison; skipped runtimes are listed with the reason."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: Comparison) -> Iterator[str]:
    machine, workload = comparison.machine, comparison.workload
    yield (
        f"{machine.cpu} ({machine.model}; {machine.cores} cores; {', '.join(machine.flags) or 'no vector extensions found'}), "
        f"{machine.system}. Checkpoint {comparison.checkpoint}, {comparison.threads} thread(s), "
        f"{comparison.rounds} rounds; prompts from seed {workload.seed}."
    )
    yield (
        f"Steps after {workload.context} cached tokens (decode: {workload.tokens} tokens, greedy, no drafts), "
        f"prefill of {workload.prefill} tokens, {workload.requests} requests of {workload.request_context} + "
        f"{workload.request_tokens} tokens."
    )
    yield ""
    yield from figures(comparison)
    for reference in comparison.references:
        yield ""
        yield f"Time relative to {reference} in the same round, median (range); above 1: slower than it."
        yield ""
        yield from ratios(comparison, reference)
    yield ""
    yield from resources(comparison)
    yield ""
    yield from notes(comparison)


def figures(comparison: Comparison) -> Iterator[str]:
    """The table of medians: a row per subject, a column per metric."""
    columns = [f"{metric.name}, {metric.unit}" for metric in comparison.metrics]
    yield from header(["runtime", *columns])
    for subject in comparison.subjects:
        found = [subject.results.get(metric.name) for metric in comparison.metrics]
        yield row([subject.name, *("-" if one is None else number(one.spread.median) for one in found)])


def ratios(comparison: Comparison, reference: str) -> Iterator[str]:
    """The table of time ratios to one bundle in the same round."""
    yield from header(["runtime", *(metric.name for metric in comparison.metrics)])
    for subject in comparison.subjects:
        if subject.name != reference:
            found = [subject.results.get(metric.name) for metric in comparison.metrics]
            yield row([subject.name, *(_ratio(one.ratios.get(reference)) if one else "-" for one in found)])


def resources(comparison: Comparison) -> Iterator[str]:
    """The table of memory, file sizes, opening times and versions."""
    yield from header(
        [
            "runtime",
            "RSS after open, MB",
            "RSS after decode, MB",
            "files, MB",
            "import, s",
            "open, s",
            "versions; settings",
        ]
    )
    for subject in comparison.subjects:
        sizes = (subject.resident_bytes_open, subject.resident_bytes_decode, subject.file_bytes)
        versions = ", ".join(f"{name} {version}" for name, version in subject.versions.items() if name != "numpy")
        seconds = (f"{subject.import_seconds:.2f}", f"{subject.open_seconds:.2f}")
        yield row([subject.name, *(f"{size / _MB:.0f}" for size in sizes), *seconds, f"{versions}; {subject.settings}"])


def notes(comparison: Comparison) -> Iterator[str]:
    """Skipped runtimes and metrics with their reasons, and the load of other processes."""
    for skipped in comparison.skipped:
        yield f"- {skipped.name}: not measured: {skipped.reason}"
    for subject in comparison.subjects:
        for reason in dict.fromkeys(subject.skipped.values()):
            names = ", ".join(name for name, why in subject.skipped.items() if why == reason)
            yield f"- {subject.name}, {names}: {reason}"
    yield f"- Other processes of the machine used {_other_cores(comparison.subjects):.2f} cores in the median measurement."
    for subject in comparison.subjects:
        most = max((result.cores for result in subject.results.values()), default=0.0)
        if most > comparison.threads + 0.1:
            yield f"- {subject.name} used {most:.1f} cores with {comparison.threads} thread(s)."
    if comparison.repeated_measurements:
        yield f"- {comparison.repeated_measurements} measurements were repeated because another worker was computing meanwhile."


def titled(tables: Iterable[tuple[str, Iterable[str]]]) -> Iterator[str]:
    """Tables below their titles; a table without lines is left out."""
    for title, lines in tables:
        if table := list(lines):
            yield from ("", f"### {title}", "", *table)


def header(columns: Sequence[str]) -> Iterator[str]:
    """The two header lines of a table; all columns but the first are right-aligned."""
    yield row(columns)
    yield "|---|" + "---:|" * (len(columns) - 1)


def row(cells: Sequence[str]) -> str:
    """One row of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float) -> str:
    """A number with three significant digits, or as a whole number from 100 on."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(found: Spread | None) -> str:
    return "-" if found is None else f"{found.median:.2f} ({found.low:.2f}-{found.high:.2f})"


def _other_cores(subjects: Sequence[SubjectSummary]) -> float:
    shares = sorted(result.other_cores for subject in subjects for result in subject.results.values())
    return shares[len(shares) // 2] if shares else 0.0
