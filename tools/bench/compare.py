"""Compare: one checkpoint in Spaceport and in other runtimes: the same calls with the same prompts, one at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import numpy as np

from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.bench.machine import Machine, ProcessFailed, busy_seconds, this_machine
from spaceport.tools.bench.plots import Chart, Panel, plot_of
from spaceport.tools.bench.report import Report, Spread, Table, spread
from spaceport.tools.bench.rivals import (
    BUNDLES,
    ComparedRuntime,
    OnProgress,
    Peer,
    Skipped,
    UnsupportedCall,
    WorkerProcess,
    WorkFolder,
    bundle_subjects,
    export_bundles,
    files_of,
    open_model,
    peer_subject,
    set_up,
    start_worker,
)

Unit = Literal["ms", "tokens/s"]
_IDS = (3, 200)  # range of prompt token ids: in every vocabulary, after the usual special tokens
_TRIES = 3  # attempts at a measurement that other workers disturb
_TICK = 0.011  # seconds; the resolution of CPU times in /proc
_SHARE = 0.01  # CPU time that other workers may use, relative to the duration of a measurement
_WARM_UP = -1  # number of the round that is not recorded
_MB = 1e6


@dataclass(frozen=True)
class CompareWorkload:
    """Lengths and counts of the measured calls."""

    context: int = 256  # cached tokens before each measured step
    tokens: int = 32  # decode steps per round
    rows: tuple[int, ...] = (1, 4, 9, 16, 36)
    repeats: int = 3  # steps of each width per round
    prefill: int = 1024  # prompt tokens
    requests: int = 8  # concurrent requests
    request_context: int = 64  # prompt tokens per request
    request_tokens: int = 32  # new tokens per request
    seed: int = 0

    def __post_init__(self) -> None:
        least = min(self.context, self.tokens, *self.rows, self.repeats, self.prefill, self.requests)
        if min(least, self.request_context, self.request_tokens) < 1 or self.tokens < 2:
            raise OptionFault("a length or a count is too small: expected at least 1 of each, and 2 of --tokens")
        if max(self.rows) >= self.context:
            raise OptionFault(f"{max(self.rows)} rows after {self.context} tokens: expected a longer --context")

    @property
    def length(self) -> int:
        """Maximum context length of all metrics, in tokens."""
        steps = self.context + max(self.tokens, 2 * max(self.rows))
        return max(steps, self.prefill + 1, self.request_context + self.request_tokens)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics in table order."""
        return (
            Metric("decode", "decode", "ms"),
            *(Metric(f"{rows} rows" if rows > 1 else "1 row", "rows", "ms", rows) for rows in self.rows),
            Metric("prefill", "prefill", "tokens/s", self.prefill),
            Metric(f"{self.requests} requests", "requests", "tokens/s"),
        )


@dataclass(frozen=True)
class Metric:
    """One column of the comparison."""

    name: str  # table heading
    call: str  # call of a runner
    unit: Unit
    size: int = 0  # rows per step, or tokens of a prefill

    def arguments(self, workload: CompareWorkload, round_: int) -> dict[str, Any]:
        """The arguments of the call; prompts differ by round and metric, as some runtimes cache prefixes."""
        random = np.random.default_rng((workload.seed, round_ + 1, *self.name.encode()))

        def prompt(length: int) -> list[int]:
            return [int(token) for token in random.integers(*_IDS, length)]

        if self.call == "decode":
            return {"prompt": prompt(workload.context), "tokens": workload.tokens}
        if self.call == "rows":
            return {"prompt": prompt(workload.context), "rows": prompt(self.size), "repeats": workload.repeats}
        if self.call == "prefill":
            return {"prompt": prompt(self.size)}
        prompts = [prompt(workload.request_context) for _ in range(workload.requests)]
        return {"prompts": prompts, "tokens": workload.request_tokens}

    def value(self, result: Any) -> float:
        """The value of the metric in the result of a call: ms per step, or tokens/s."""
        if self.call == "prefill":
            return self.size / float(result)
        if self.call == "requests":
            tokens, seconds = result
            return float(tokens) / float(seconds)
        times: Sequence[float] = result
        return median(times) * 1e3


@dataclass(frozen=True)
class Measurement:
    """One measurement of one subject."""

    value: float  # in the unit of its metric
    cores: float  # CPU time of the worker per second
    other_cores: float  # CPU time of all other processes per second


@dataclass
class RuntimeRecord:
    """All measurements of one subject."""

    subject: ComparedRuntime
    opened: dict[str, Any]  # versions, import_seconds, open_seconds
    resident_bytes_open: int  # resident memory after opening the model
    resident_bytes_decode: int = 0  # resident memory after the decode steps of the warm-up
    measurements: dict[str, dict[int, Measurement]] = field(default_factory=dict)  # by metric and round
    skipped: dict[str, str] = field(default_factory=dict)  # metric -> why it is not measured


@dataclass
class WorkerPool:
    """The running workers of a comparison and their records."""

    workload: CompareWorkload
    threads: int
    logs: Path
    on_progress: OnProgress
    timeout: float = 600.0  # seconds to wait for an answer
    idle_limit: float = 10.0  # seconds to wait until a worker is idle after a measurement
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    records: dict[str, RuntimeRecord] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    repeated: int = 0  # measurements repeated because another worker was computing

    def measure(self, subjects: Sequence[ComparedRuntime], rounds: int) -> None:
        """Record all subjects in a warm-up and all rounds; the workers have ended afterwards."""
        try:
            for subject in subjects:
                self.on_progress(f"open {subject.name}")
                self._add(subject)
            for round_ in range(_WARM_UP, rounds):
                self.on_progress("warm up" if round_ == _WARM_UP else f"round {round_ + 1} of {rounds}")
                self._run_round(round_)
        finally:
            for name in list(self.workers):
                self._remove(name)

    def _add(self, subject: ComparedRuntime) -> None:
        """Start a subject's worker and open its model; a subject that fails is skipped."""
        try:
            worker = self._open(subject)
        except ProcessFailed as failure:
            self.skipped.append(Skipped(subject.name, str(failure)))
            return
        self.records[subject.name] = RuntimeRecord(subject, worker.opened, worker.resources().resident_bytes)

    def _run_round(self, round_: int) -> None:
        """Take every metric of every subject once; the order of the subjects rotates from round to round."""
        records = list(self.records.values())
        for metric in self.workload.metrics:
            for index in range(len(records)):
                record = records[(index + round_) % len(records)]
                if metric.name not in record.skipped:
                    self._take(record, metric, round_)

    def _take(self, record: RuntimeRecord, metric: Metric, round_: int) -> None:
        name = record.subject.name
        try:
            worker = self.workers.get(name) or self._open(record.subject)
            measurement = self._measure(worker, metric, round_)
            if round_ > _WARM_UP:
                record.measurements.setdefault(metric.name, {})[round_] = measurement
            elif metric.call == "decode":
                record.resident_bytes_decode = worker.resources().resident_bytes
        except UnsupportedCall as reason:
            record.skipped[metric.name] = str(reason)
        except ProcessFailed as failure:
            record.skipped[metric.name] = str(failure)
            self.on_progress(f"{name}, {metric.name}: {failure}")
            self._remove(name)

    def _measure(self, worker: WorkerProcess, metric: Metric, round_: int) -> Measurement:
        arguments = metric.arguments(self.workload, round_)
        for _ in range(_TRIES):
            others = {name: other.cpu_seconds() for name, other in self.workers.items() if other is not worker}
            started, own, machine = perf_counter(), worker.cpu_seconds(), busy_seconds()
            answer = worker.call(metric.call, arguments)
            worker.wait_until_idle(self.idle_limit)
            if not (busy := self._busy(others, answer["seconds"])):
                spent = worker.cpu_seconds() - own
                other_cores = max(0.0, busy_seconds() - machine - spent) / (perf_counter() - started)
                return Measurement(
                    metric.value(answer["value"]), answer["cpu_seconds"] / answer["seconds"], other_cores
                )
            self.repeated += 1
            for name in busy:
                self._wait_until_idle(name)
        raise ProcessFailed(
            f"another worker was computing in {_TRIES} attempts at a measurement: expected idle workers"
        )

    def _busy(self, before: Mapping[str, float], seconds: float) -> list[str]:
        """The other workers that used CPU time since these CPU times were read."""
        allowed = max(_TICK, _SHARE * seconds)
        return [name for name, spent in before.items() if self.workers[name].cpu_seconds() - spent > allowed]

    def _wait_until_idle(self, name: str) -> None:
        """Wait until a worker is idle; one that stays busy is ended, and all its metrics are skipped."""
        try:
            self.workers[name].wait_until_idle(self.idle_limit)
        except ProcessFailed as failure:
            self.on_progress(f"{name}: {failure}")
            self.records[name].skipped |= {metric.name: str(failure) for metric in self.workload.metrics}
            self._remove(name)

    def _open(self, subject: ComparedRuntime) -> WorkerProcess:
        worker = start_worker(subject, self.threads, self.logs, self.timeout)
        open_model(worker, self.workload.length, self.threads, self.idle_limit)
        self.workers[subject.name] = worker
        return worker

    def _remove(self, name: str) -> None:
        if worker := self.workers.pop(name, None):
            worker.close()


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


def paired(unit: Unit, measurements: Mapping[int, Measurement], reference: Mapping[int, Measurement]) -> Spread | None:
    """Time ratios of a subject to a reference, over the rounds that both have; None without a common round."""
    ratios = [measurements[number].value / reference[number].value for number in measurements.keys() & reference.keys()]
    return spread([1 / ratio for ratio in ratios] if unit == "tokens/s" else ratios) if ratios else None


def _summary(record: RuntimeRecord, metrics: Sequence[Metric], bundles: Sequence[RuntimeRecord]) -> SubjectSummary:
    subject = record.subject
    return SubjectSummary(
        subject.name,
        subject.is_bundle,
        subject.settings,
        **record.opened,
        file_bytes=sum(file.stat().st_size for file in files_of(subject.model)),
        resident_bytes_open=record.resident_bytes_open,
        resident_bytes_decode=record.resident_bytes_decode,
        results={m.name: _result(m, record, bundles) for m in metrics if m.name in record.measurements},
        skipped=record.skipped,
    )


def _result(metric: Metric, record: RuntimeRecord, bundles: Sequence[RuntimeRecord]) -> MetricResult:
    measurements, ratios = record.measurements[metric.name], {}
    for bundle in bundles:
        if ratio := paired(metric.unit, measurements, bundle.measurements.get(metric.name, {})):
            ratios[bundle.subject.name] = ratio
    values = tuple(measurement.value for measurement in measurements.values())
    cores = median(measurement.cores for measurement in measurements.values())
    others = median(measurement.other_cores for measurement in measurements.values())
    return MetricResult(metric.unit, values, spread(values), ratios, cores, others)


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
    work, machine = WorkFolder(options.work, options.checkpoint), this_machine()
    failed = set_up(work, options.peers, on_progress) if options.setup else []
    if options.setup and not options.bundles:
        failed += export_bundles(work, on_progress)
    bundles = bundle_subjects(options.bundles or _exported_bundles(work))
    _check_bundles(bundles, options)
    unusable = {skipped.name for skipped in failed}
    peers = [
        peer_subject(peer, work, work.checkpoint, options.gguf, machine.flags)
        for peer in options.peers
        if peer.name not in unusable
    ]
    subjects = [*bundles, *(peer for peer in peers if isinstance(peer, ComparedRuntime))]
    pool = WorkerPool(options.workload, options.threads, work.logs, on_progress)
    pool.measure(subjects, options.rounds)
    metrics, references = options.workload.metrics, [r for r in pool.records.values() if r.subject.is_bundle]
    return Comparison(
        options.checkpoint.name,
        machine,
        options.threads,
        options.rounds,
        options.workload,
        metrics,
        tuple(_summary(record, metrics, references) for record in pool.records.values()),
        (*failed, *(peer for peer in peers if isinstance(peer, Skipped)), *pool.skipped),
        pool.repeated,
    )


def _exported_bundles(work: WorkFolder) -> list[Path]:
    """The bundles that the setup has exported."""
    bundles = [path for name in BUNDLES if (path := work.model(f"spaceport-{name}")).is_dir()]
    if not bundles:
        raise InputFault(f"{work.models}: has no bundle of {work.checkpoint.name}: give --bundle, or add --setup")
    return bundles


def _check_bundles(bundles: Sequence[ComparedRuntime], options: CompareOptions) -> None:
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
    data = asdict(comparison)
    for subject in data["subjects"]:  # a metric that was not measured is null
        subject["results"] = {metric.name: subject["results"].get(metric.name) for metric in comparison.metrics}
    data["metrics"] = [metric.name for metric in comparison.metrics]
    ratios = [_ratios(comparison, reference) for reference in comparison.references]
    tables = (_figures(comparison), *ratios, _resources(comparison))
    return Report(settings, tables, list(_notes(comparison)), data)


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
    shares = sorted(result.other_cores for subject in comparison.subjects for result in subject.results.values())
    others = shares[len(shares) // 2] if shares else 0.0
    yield f"- Other processes of the machine used {others:.2f} cores in the median measurement."
    for subject in comparison.subjects:
        most = max((result.cores for result in subject.results.values()), default=0.0)
        if most > comparison.threads + 0.1:
            yield f"- {subject.name} used {most:.1f} cores with {comparison.threads} thread(s)."
    if comparison.repeated_measurements:
        yield f"- {comparison.repeated_measurements} measurements were repeated because another worker was computing meanwhile."


def comparison_plot(comparison: Comparison) -> str:
    """The comparison as an SVG picture."""
    subjects = comparison.subjects
    parts: list[Panel | Chart] = []
    for metric in comparison.metrics:
        if metric.call != "rows":
            better = "lower" if metric.unit == "ms" else "higher"
            bars = [(s.name, s.results[metric.name].spread) for s in subjects if metric.name in s.results]
            parts.append(Panel(f"{metric.name}, {metric.unit} ({better} is better)", bars))
    memory = [(subject.name, Spread(*[subject.resident_bytes_decode / _MB] * 3)) for subject in subjects]
    parts.append(Panel("resident memory after decode, MB (lower is better)", memory))
    widths = [metric for metric in comparison.metrics if metric.call == "rows"]
    lines = [
        (s.name, [(m.size, s.results[m.name].spread.median) for m in widths if m.name in s.results]) for s in subjects
    ]
    if len(widths) > 1:
        title = "Time per step by number of rows, ms (lower is better)"
        parts.append(Chart(title, [(name, points) for name, points in lines if points]))
    label = f"Comparison of runtimes on {comparison.checkpoint}"
    title = f"{comparison.checkpoint}, {comparison.threads} thread(s), {comparison.machine.cpu}"
    return plot_of(label, title, [subject.name for subject in subjects], parts)
