"""Summary: medians, ranges and paired ratios of all measurements, as data for JSON, tables and the plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from spaceport.tools.bench.compare.machine import Machine
from spaceport.tools.bench.compare.metrics import Metric, Unit, Workload
from spaceport.tools.bench.compare.subjects import Skipped
from spaceport.tools.bench.compare.worker_pool import Measurement, Record


@dataclass(frozen=True)
class Spread:
    """A median with the lowest and the highest value over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """One metric of one subject."""

    unit: Unit
    values: tuple[float, ...]  # by round
    spread: Spread
    ratios: dict[str, Spread]  # by bundle: time relative to the bundle's in the same round; above 1: slower than it
    cores: float  # median CPU time of the process per second
    other_cores: float  # median CPU time of all other processes per second


@dataclass(frozen=True)
class SubjectSummary:
    """All results of one subject."""

    name: str
    is_bundle: bool
    settings: str
    versions: dict[str, str]
    import_seconds: float
    open_seconds: float
    file_bytes: int
    resident_bytes_open: int  # resident memory after opening the model
    resident_bytes_decode: int  # resident memory after decode steps
    results: dict[str, Result]
    skipped: dict[str, str]  # metric -> why it is not measured


@dataclass(frozen=True)
class Comparison:
    """A whole comparison."""

    checkpoint: str
    machine: Machine
    threads: int
    rounds: int
    workload: Workload
    metrics: tuple[Metric, ...]
    subjects: tuple[SubjectSummary, ...]
    skipped: tuple[Skipped, ...]
    repeated_measurements: int  # measurements repeated because another worker was computing

    @property
    def references(self) -> tuple[str, ...]:
        """The names of the bundles, which ratios refer to."""
        return tuple(subject.name for subject in self.subjects if subject.is_bundle)


def summarized(records: Mapping[str, Record], metrics: Sequence[Metric]) -> tuple[SubjectSummary, ...]:
    """The summaries of all subjects, with ratios to each bundle."""
    bundles = [record for record in records.values() if record.subject.is_bundle]
    return tuple(_subject(record, metrics, bundles) for record in records.values())


def spread(values: Sequence[float]) -> Spread:
    """Median and range."""
    return Spread(statistics.median(values), min(values), max(values))


def paired(unit: Unit, measurements: Mapping[int, Measurement], reference: Mapping[int, Measurement]) -> Spread | None:
    """Time ratios of a subject to a reference, over the rounds that both have; None without a common round."""
    shared = sorted(measurements.keys() & reference.keys())
    if not shared:
        return None
    ratios = [measurements[number].value / reference[number].value for number in shared]
    return spread([1 / ratio for ratio in ratios] if unit == "tokens/s" else ratios)


def file_bytes(path: Path) -> int:
    """Total size of a model's files."""
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    return sum(file.stat().st_size for file in files)


def as_json(comparison: Comparison) -> dict[str, object]:
    """The comparison as JSON data; a metric that was not measured is null."""
    data = asdict(comparison)
    for subject in data["subjects"]:
        subject["results"] = {metric.name: subject["results"].get(metric.name) for metric in comparison.metrics}
    data["metrics"] = [metric.name for metric in comparison.metrics]
    return data


def _subject(record: Record, metrics: Sequence[Metric], bundles: Sequence[Record]) -> SubjectSummary:
    results = {
        metric.name: _result(metric, record.measurements[metric.name], bundles)
        for metric in metrics
        if metric.name in record.measurements
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
        record.resident_bytes_open,
        record.resident_bytes_decode,
        results,
        dict(record.skipped),
    )


def _result(metric: Metric, measurements: Mapping[int, Measurement], bundles: Sequence[Record]) -> Result:
    ratios = {}
    for bundle in bundles:
        if found := paired(metric.unit, measurements, bundle.measurements.get(metric.name, {})):
            ratios[bundle.subject.name] = found
    values = tuple(measurement.value for measurement in measurements.values())
    return Result(
        metric.unit,
        values,
        spread(values),
        ratios,
        statistics.median(measurement.cores for measurement in measurements.values()),
        statistics.median(measurement.other_cores for measurement in measurements.values()),
    )
