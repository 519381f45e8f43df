"""Summary: medians, ranges and paired ratios of what was recorded, as data for JSON, tables and the plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from spaceport.tools.bench.compare.machine import Machine
from spaceport.tools.bench.compare.measures import Measure, Unit, Workload
from spaceport.tools.bench.compare.subjects import Absent
from spaceport.tools.bench.compare.turns import Record, Turn


@dataclass(frozen=True)
class Spread:
    """A median with the lowest and the highest value over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """One measure of one subject."""

    unit: Unit
    values: tuple[float, ...]  # one for each round
    spread: Spread
    # By bundle: how many times the bundle's time this subject takes, in the same round; above 1 the bundle is faster.
    ratios: dict[str, Spread]
    cores: float  # CPU time of the process by wall time, in the median
    elsewhere: float  # the same of everything else on the machine


@dataclass(frozen=True)
class SubjectSummary:
    """Everything there is to tell of one subject."""

    name: str
    is_bundle: bool
    settings: str
    versions: dict[str, str]
    import_seconds: float
    open_seconds: float
    file_bytes: int
    opened_bytes: int  # resident memory once open
    used_bytes: int  # resident memory after decode steps
    results: dict[str, Result]
    absent: dict[str, str]  # measure -> why it is not measured


@dataclass(frozen=True)
class Comparison:
    """A whole comparison."""

    checkpoint: str
    machine: Machine
    threads: int
    rounds: int
    workload: Workload
    measures: tuple[Measure, ...]
    subjects: tuple[SubjectSummary, ...]
    absent: tuple[Absent, ...]
    repeated_turns: int  # taken again because another process of the comparison worked

    @property
    def references(self) -> tuple[str, ...]:
        """The bundles, which the others' ratios are to."""
        return tuple(subject.name for subject in self.subjects if subject.is_bundle)


def summarized(records: Mapping[str, Record], measures: Sequence[Measure]) -> tuple[SubjectSummary, ...]:
    """The summaries of all subjects, with their ratios to each bundle."""
    bundles = [record for record in records.values() if record.subject.is_bundle]
    return tuple(_subject(record, measures, bundles) for record in records.values())


def spread(values: Sequence[float]) -> Spread:
    """Median and range."""
    return Spread(statistics.median(values), min(values), max(values))


def paired(unit: Unit, turns: Mapping[int, Turn], reference: Mapping[int, Turn]) -> Spread | None:
    """Times of the subject by times of the reference in the rounds that both have."""
    shared = sorted(turns.keys() & reference.keys())
    if not shared:
        return None
    ratios = [turns[number].value / reference[number].value for number in shared]
    return spread([1 / ratio for ratio in ratios] if unit == "tokens/s" else ratios)


def file_bytes(path: Path) -> int:
    """Size of a model's files."""
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    return sum(file.stat().st_size for file in files)


def as_json(comparison: Comparison) -> dict[str, object]:
    """The comparison as data; an absent figure is null beside its reason."""
    data = asdict(comparison)
    for subject in data["subjects"]:
        subject["results"] = {measure.name: subject["results"].get(measure.name) for measure in comparison.measures}
    data["measures"] = [measure.name for measure in comparison.measures]
    return data


def _subject(record: Record, measures: Sequence[Measure], bundles: Sequence[Record]) -> SubjectSummary:
    results = {
        measure.name: _result(measure, record.turns[measure.name], bundles)
        for measure in measures
        if measure.name in record.turns
    }
    subject, opened = record.subject, record.opened
    return SubjectSummary(
        subject.name,
        subject.is_bundle,
        subject.settings,
        opened["versions"],
        opened["import_seconds"],
        opened["open_seconds"],
        file_bytes(subject.model),
        record.opened_bytes,
        record.used_bytes,
        results,
        dict(record.absent),
    )


def _result(measure: Measure, turns: Mapping[int, Turn], bundles: Sequence[Record]) -> Result:
    ratios = {}
    for bundle in bundles:
        if found := paired(measure.unit, turns, bundle.turns.get(measure.name, {})):
            ratios[bundle.subject.name] = found
    values = tuple(turn.value for turn in turns.values())
    return Result(
        measure.unit,
        values,
        spread(values),
        ratios,
        statistics.median(turn.cores for turn in turns.values()),
        statistics.median(turn.elsewhere for turn in turns.values()),
    )
