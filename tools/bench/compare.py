"""Compare: one checkpoint in Spaceport and in other runtimes, each in its own environment and process."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault, MissingDependency
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.bench.compare_measuring import (
    CompareWorkload,
    Measurement,
    Metric,
    RunOptions,
    RuntimeRecord,
    Unit,
    compared_metrics,
    measure_all,
)
from spaceport.tools.bench.environments import (
    BUNDLES,
    ComparedRuntime,
    Peer,
    Skipped,
    WorkFolder,
    bundle_subjects,
    export_bundles,
    peer_subject,
    set_up,
)
from spaceport.tools.bench.machine import Machine, this_machine
from spaceport.tools.bench.report import Report, Table

OnProgress = Callable[[str], None]
_MB = 1e6


@dataclass(frozen=True)
class Spread:
    """A median with the lowest and the highest value over the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class MetricResult:
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
    results: dict[str, MetricResult]
    skipped: dict[str, str]  # metric -> why it is not measured


@dataclass(frozen=True)
class Comparison:
    """A whole comparison."""

    checkpoint: str
    machine: Machine
    threads: int
    rounds: int
    workload: CompareWorkload
    metrics: tuple[Metric, ...]
    subjects: tuple[SubjectSummary, ...]
    skipped: tuple[Skipped, ...]
    repeated_measurements: int  # measurements repeated because another worker was computing

    @property
    def references(self) -> tuple[str, ...]:
        """The names of the bundles, which ratios refer to."""
        return tuple(subject.name for subject in self.subjects if subject.is_bundle)


def runtime_summaries(records: Mapping[str, RuntimeRecord], metrics: Sequence[Metric]) -> tuple[SubjectSummary, ...]:
    """The summaries of all subjects, with ratios to each bundle."""
    bundles = [record for record in records.values() if record.subject.is_bundle]
    return tuple(_summary(record, metrics, bundles) for record in records.values())


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


def _summary(record: RuntimeRecord, metrics: Sequence[Metric], bundles: Sequence[RuntimeRecord]) -> SubjectSummary:
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


def _result(metric: Metric, measurements: Mapping[int, Measurement], bundles: Sequence[RuntimeRecord]) -> MetricResult:
    ratios = {}
    for bundle in bundles:
        if found := paired(metric.unit, measurements, bundle.measurements.get(metric.name, {})):
            ratios[bundle.subject.name] = found
    values = tuple(measurement.value for measurement in measurements.values())
    return MetricResult(
        metric.unit,
        values,
        spread(values),
        ratios,
        statistics.median(measurement.cores for measurement in measurements.values()),
        statistics.median(measurement.other_cores for measurement in measurements.values()),
    )


@dataclass(frozen=True)
class CompareOptions:
    """What is compared, and how."""

    checkpoint: Path
    work: Path
    bundles: tuple[Path, ...]  # empty: the bundles that the setup exported
    peers: tuple[Peer, ...]
    gguf: Path | None
    workload: CompareWorkload
    threads: int
    rounds: int
    setup: bool  # create missing environments and models first


def compare_runtimes(options: CompareOptions, on_progress: OnProgress) -> Comparison:
    """The measurements of every installed runtime, and the reasons why the others were skipped."""
    if not sys.platform.startswith("linux"):
        raise MissingDependency(
            f"bench compare reads CPU time and memory from /proc: expected Linux, this is {sys.platform}"
        )
    if options.gguf is not None and not options.gguf.is_file():
        raise InputFault(f"--gguf {options.gguf}: no such file: expected a GGUF file")
    work = WorkFolder(options.work, options.checkpoint)
    failed = set_up(work, options.peers, on_progress) if options.setup else []
    if options.setup and not options.bundles:
        failed += export_bundles(work, on_progress)
    bundles = bundle_subjects(options.bundles or exported_bundles(work))
    check_bundles(bundles, options)
    peers = [
        peer_subject(peer, work, options.gguf) for peer in options.peers if peer.name not in {f.name for f in failed}
    ]
    subjects = [*bundles, *(peer for peer in peers if isinstance(peer, ComparedRuntime))]
    metrics = compared_metrics(options.workload)
    run_options = RunOptions(options.workload, metrics, options.rounds, options.threads, work.logs)
    pool = measure_all(run_options, subjects, on_progress)
    return Comparison(
        options.checkpoint.name,
        this_machine(),
        options.threads,
        options.rounds,
        options.workload,
        metrics,
        runtime_summaries(pool.records, metrics),
        (*failed, *(peer for peer in peers if isinstance(peer, Skipped)), *pool.skipped),
        pool.repeated,
    )


def exported_bundles(work: WorkFolder) -> list[Path]:
    """The bundles that the setup has exported."""
    bundles = [path for name in BUNDLES if (path := work.model(f"spaceport-{name}")).is_dir()]
    if not bundles:
        raise InputFault(f"{work.models}: has no bundle of {work.checkpoint.name}: give --bundle, or add --setup")
    return bundles


def check_bundles(bundles: Sequence[ComparedRuntime], options: CompareOptions) -> None:
    """Raise for bundles of another checkpoint, and for lengths beyond a bundle's positions."""
    layers = json.loads((options.checkpoint / "config.json").read_text("utf-8")).get("num_hidden_layers")
    length = options.workload.length
    for path in (subject.model for subject in bundles):
        manifest = open_bundle(path).manifest
        if layers not in (None, manifest.signature.layers):
            raise InputFault(
                f"{path}: has {manifest.signature.layers} layers, {options.checkpoint} has {layers}: expected a bundle of it"
            )
        if manifest.max_positions < length:
            raise InputFault(
                f"{path}: has {manifest.max_positions} positions, {length} are needed: lower --prefill or --context"
            )


def comparison_report(comparison: Comparison) -> Report:
    """The comparison as tables; skipped runtimes are listed with the reason."""
    workload = comparison.workload
    settings = (
        f"{comparison.machine}. Checkpoint {comparison.checkpoint}, {comparison.threads} thread(s), "
        f"{comparison.rounds} rounds; prompts from seed {workload.seed}.",
        f"Steps after {workload.context} cached tokens (decode: {workload.tokens} tokens, greedy, no drafts), "
        f"prefill of {workload.prefill} tokens, {workload.requests} requests of {workload.request_context} + "
        f"{workload.request_tokens} tokens.",
    )
    ratios = [_ratios(comparison, reference) for reference in comparison.references]
    tables = (_figures(comparison), *ratios, _resources(comparison))
    return Report(settings, tables, list(_notes(comparison)), as_json(comparison))


def _figures(comparison: Comparison) -> Table:
    """Medians: a row per runtime, a column per metric."""
    rows = []
    for subject in comparison.subjects:
        results = [subject.results.get(metric.name) for metric in comparison.metrics]
        rows.append((subject.name, *(None if result is None else result.spread.median for result in results)))
    return Table("", ("runtime", *(f"{metric.name}, {metric.unit}" for metric in comparison.metrics)), rows)


def _ratios(comparison: Comparison, reference: str) -> Table:
    """Time ratios to one bundle in the same round."""
    rows = []
    for subject in comparison.subjects:
        if subject.name != reference:
            results = [subject.results.get(metric.name) for metric in comparison.metrics]
            rows.append((subject.name, *(result.ratios.get(reference) if result else None for result in results)))
    title = f"Time relative to {reference} in the same round, median (range); above 1: slower than it"
    return Table(title, ("runtime", *(metric.name for metric in comparison.metrics)), rows)


def _resources(comparison: Comparison) -> Table:
    """Memory, file sizes, opening times and versions."""
    columns = (
        *("runtime", "RSS after open, MB", "RSS after decode, MB", "files, MB", "import, s", "open, s"),
        "versions; settings",
    )
    rows = []
    for subject in comparison.subjects:
        sizes = (subject.resident_bytes_open, subject.resident_bytes_decode, subject.file_bytes)
        versions = ", ".join(f"{name} {version}" for name, version in subject.versions.items() if name != "numpy")
        seconds = (subject.import_seconds, subject.open_seconds)
        rows.append((subject.name, *(round(size / _MB) for size in sizes), *seconds, f"{versions}; {subject.settings}"))
    return Table("", columns, rows)


def _notes(comparison: Comparison) -> Iterator[str]:
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


def _other_cores(subjects: Sequence[SubjectSummary]) -> float:
    shares = sorted(result.other_cores for subject in subjects for result in subject.results.values())
    return shares[len(shares) // 2] if shares else 0.0
