"""Measuring of a comparison: the same calls with the same prompts for every runtime, one at a time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.environments import ComparedRuntime, Skipped
from spaceport.tools.bench.machine import busy_seconds
from spaceport.tools.bench.workers import UnsupportedCall, WorkerFailed, WorkerProcess, open_model, start_worker

Unit = Literal["ms", "tokens/s"]
_IDS = (3, 200)  # range of prompt token ids: in every vocabulary, after the usual special tokens
OnProgress = Callable[[str], None]
_TRIES = 3  # attempts at a measurement that other workers disturb
_TICK = 0.011  # seconds; the resolution of CPU times in /proc
_SHARE = 0.01  # CPU time that other workers may use, relative to the duration of a measurement
_WARM_UP = -1  # number of the round that is not recorded


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


@dataclass(frozen=True)
class Metric:
    """One column of the comparison."""

    name: str  # table heading
    call: str  # call of the worker protocol
    unit: Unit
    size: int = 0  # rows per step, or tokens of a prefill


def compared_metrics(workload: CompareWorkload) -> tuple[Metric, ...]:
    """The metrics in table order."""
    return (
        Metric("decode", "decode", "ms"),
        *(Metric(f"{rows} rows" if rows > 1 else "1 row", "rows", "ms", rows) for rows in workload.rows),
        Metric("prefill", "prefill", "tokens/s", workload.prefill),
        Metric(f"{workload.requests} requests", "requests", "tokens/s"),
    )


def call_arguments(metric: Metric, workload: CompareWorkload, round_: int) -> dict[str, Any]:
    """The arguments of a worker call; prompts differ by round and metric, as some runtimes cache prefixes."""
    random = np.random.default_rng((workload.seed, round_ + 1, *metric.name.encode()))

    def prompt(length: int) -> list[int]:
        return [int(token) for token in random.integers(*_IDS, length)]

    if metric.call == "decode":
        return {"prompt": prompt(workload.context), "tokens": workload.tokens}
    if metric.call == "rows":
        return {"prompt": prompt(workload.context), "rows": prompt(metric.size), "repeats": workload.repeats}
    if metric.call == "prefill":
        return {"prompt": prompt(metric.size)}
    prompts = [prompt(workload.request_context) for _ in range(workload.requests)]
    return {"prompts": prompts, "tokens": workload.request_tokens}


def value_of(metric: Metric, value: Any) -> float:
    """The value of a metric from a worker's result: ms per step, or tokens/s."""
    if metric.call == "prefill":
        return metric.size / float(value)
    if metric.call == "requests":
        tokens, seconds = value
        return float(tokens) / float(seconds)
    times: Sequence[float] = value
    return statistics.median(times) * 1e3


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


@dataclass(frozen=True)
class RunOptions:
    """How a comparison is run."""

    workload: CompareWorkload
    metrics: tuple[Metric, ...]
    rounds: int
    threads: int
    logs: Path
    timeout: float = 600.0  # seconds to wait for an answer
    idle_limit: float = 10.0  # seconds to wait until a worker is idle after a measurement


class WorkerPool:
    """The running workers of a comparison and their records."""

    def __init__(self, options: RunOptions, on_progress: OnProgress) -> None:
        self.options, self.on_progress = options, on_progress
        self.workers: dict[str, WorkerProcess] = {}
        self.records: dict[str, RuntimeRecord] = {}
        self.skipped: list[Skipped] = []
        self.repeated = 0  # measurements repeated because another worker was computing

    def add(self, subject: ComparedRuntime) -> None:
        """Start a subject's worker and open its model; a subject that fails is skipped."""
        try:
            worker = self._open(subject)
        except WorkerFailed as failure:
            self.skipped.append(Skipped(subject.name, str(failure)))
            return
        self.records[subject.name] = RuntimeRecord(subject, worker.opened, worker.resident_bytes())

    def run_round(self, round_: int) -> None:
        """Take every metric of every subject once; the order of the subjects rotates from round to round."""
        records = list(self.records.values())
        for metric in self.options.metrics:
            for index in range(len(records)):
                record = records[(index + round_) % len(records)]
                if metric.name not in record.skipped:
                    self._take(record, metric, round_)

    def _take(self, record: RuntimeRecord, metric: Metric, round_: int) -> None:
        name = record.subject.name
        try:
            worker = self.workers.get(name) or self._open(record.subject)
            measurement = self._measure(worker, metric, round_)
        except WorkerFailed as failure:
            record.skipped[metric.name] = str(failure)
            self.on_progress(f"{name}, {metric.name}: {failure}")
            self._remove(name)
            return
        if isinstance(measurement, UnsupportedCall):
            record.skipped[metric.name] = measurement.reason
            return
        if round_ > _WARM_UP:
            record.measurements.setdefault(metric.name, {})[round_] = measurement
        elif metric.call == "decode":
            record.resident_bytes_decode = worker.resident_bytes()

    def _measure(self, worker: WorkerProcess, metric: Metric, round_: int) -> Measurement | UnsupportedCall:
        arguments = call_arguments(metric, self.options.workload, round_)
        for _ in range(_TRIES):
            others = {name: other.cpu_seconds() for name, other in self.workers.items() if other is not worker}
            started, own, machine = perf_counter(), worker.cpu_seconds(), busy_seconds()
            answer = worker.call(metric.call, arguments)
            if isinstance(answer, UnsupportedCall):
                return answer
            worker.wait_until_idle(self.options.idle_limit)
            busy = self._busy(others, answer["seconds"])
            if not busy:
                spent = worker.cpu_seconds() - own
                other_cores = max(0.0, busy_seconds() - machine - spent) / (perf_counter() - started)
                return Measurement(
                    value_of(metric, answer["value"]), answer["cpu_seconds"] / answer["seconds"], other_cores
                )
            self.repeated += 1
            for name in busy:
                self._wait_until_idle(name)
        raise WorkerFailed(f"another worker was computing in {_TRIES} attempts at a measurement: expected idle workers")

    def _busy(self, before: Mapping[str, float], seconds: float) -> list[str]:
        """The other workers that used CPU time since these CPU times were read."""
        allowed = max(_TICK, _SHARE * seconds)
        return [name for name, spent in before.items() if self.workers[name].cpu_seconds() - spent > allowed]

    def _wait_until_idle(self, name: str) -> None:
        """Wait until a worker is idle; one that stays busy is ended, and all its metrics are skipped."""
        try:
            self.workers[name].wait_until_idle(self.options.idle_limit)
        except WorkerFailed as failure:
            self.on_progress(f"{name}: {failure}")
            self.records[name].skipped |= {metric.name: str(failure) for metric in self.options.metrics}
            self._remove(name)

    def _open(self, subject: ComparedRuntime) -> WorkerProcess:
        options = self.options
        worker = start_worker(subject, options.threads, options.logs, options.timeout)
        open_model(worker, options.workload.length, options.threads, options.idle_limit)
        self.workers[subject.name] = worker
        return worker

    def _remove(self, name: str) -> None:
        if worker := self.workers.pop(name, None):
            worker.close()

    def close(self) -> None:
        """End all workers."""
        for name in list(self.workers):
            self._remove(name)


@contextmanager
def worker_pool(options: RunOptions, on_progress: OnProgress) -> Iterator[WorkerPool]:
    """An empty pool, whose workers end when the block ends."""
    pool = WorkerPool(options, on_progress)
    try:
        yield pool
    finally:
        pool.close()


def measure_all(options: RunOptions, subjects: Sequence[ComparedRuntime], on_progress: OnProgress) -> WorkerPool:
    """A pool with the records of all subjects, after a warm-up and all rounds; its workers have ended."""
    with worker_pool(options, on_progress) as pool:
        for subject in subjects:
            on_progress(f"open {subject.name}")
            pool.add(subject)
        for round_ in range(_WARM_UP, options.rounds):
            on_progress("warm up" if round_ == _WARM_UP else f"round {round_ + 1} of {options.rounds}")
            pool.run_round(round_)
        return pool
