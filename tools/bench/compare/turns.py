"""Turns: the processes measure one after the other, so that only one of them works at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from spaceport.tools.bench.compare.measures import Measure, Workload, arguments, figure
from spaceport.tools.bench.compare.subjects import Absent, Subject
from spaceport.tools.bench.compare.worker_process import NoSuchCall, Worker, WorkerFailed, busy_seconds, start

Say = Callable[[str], None]
_TRIES = 3  # of a turn during which another process worked
_TICK = 0.011  # seconds of CPU time that are not told from none
_SHARE = 0.01  # of a turn's time: what another process may use of it
_WARM_UP = -1  # the round that does not count


@dataclass(frozen=True)
class Turn:
    """One measurement of one subject."""

    value: float
    cores: float  # CPU time of its process by wall time
    elsewhere: float  # CPU time of everything else on the machine by wall time


@dataclass
class Record:
    """Everything measured of one subject."""

    subject: Subject
    opened: dict[str, Any]  # versions, import_seconds, open_seconds
    opened_bytes: int  # resident memory once open
    used_bytes: int = 0  # resident memory after the decode steps of the warm-up
    turns: dict[str, dict[int, Turn]] = field(default_factory=dict)  # by measure and round
    absent: dict[str, str] = field(default_factory=dict)  # measure -> why it is not measured


@dataclass(frozen=True)
class RunOptions:
    """How a comparison is run."""

    workload: Workload
    measures: tuple[Measure, ...]
    rounds: int
    threads: int
    logs: Path
    patience: float = 600.0  # seconds to wait for one answer
    idle_limit: float = 10.0  # seconds in which a process has to be idle after its turn


class WorkerPool:
    """The open processes of a comparison and what was recorded of them."""

    def __init__(self, options: RunOptions, say: Say) -> None:
        self.options, self.say = options, say
        self.workers: dict[str, Worker] = {}
        self.records: dict[str, Record] = {}
        self.absent: list[Absent] = []
        self.repeated = 0  # turns that were taken again because another process worked

    def add(self, subject: Subject) -> None:
        """Start a subject's process and open its model; one that fails is absent."""
        try:
            worker = self._open(subject)
        except WorkerFailed as failure:
            self.absent.append(Absent(subject.name, str(failure)))
            return
        self.records[subject.name] = Record(subject, worker.opened, worker.resident_bytes())

    def run_round(self, round_: int) -> None:
        """One round: every measure of every subject, each round begun by another subject."""
        records = list(self.records.values())
        for measure in self.options.measures:
            for place in range(len(records)):
                record = records[(place + round_) % len(records)]
                if measure.name not in record.absent:
                    self._take(record, measure, round_)

    def _take(self, record: Record, measure: Measure, round_: int) -> None:
        name = record.subject.name
        try:
            worker = self.workers.get(name) or self._open(record.subject)
            turn = self._turn(worker, measure, round_)
        except WorkerFailed as failure:
            record.absent[measure.name] = str(failure)
            self.say(f"{name}, {measure.name}: {failure}")
            self._remove(name)
            return
        if isinstance(turn, NoSuchCall):
            record.absent[measure.name] = turn.reason
            return
        if round_ > _WARM_UP:
            record.turns.setdefault(measure.name, {})[round_] = turn
        elif measure.ask == "decode":
            record.used_bytes = worker.resident_bytes()

    def _turn(self, worker: Worker, measure: Measure, round_: int) -> Turn | NoSuchCall:
        asked = arguments(measure, self.options.workload, round_)
        for _ in range(_TRIES):
            others = {name: other.cpu_seconds() for name, other in self.workers.items() if other is not worker}
            began, own, machine = perf_counter(), worker.cpu_seconds(), busy_seconds()
            answer = worker.ask(measure.ask, asked)
            if isinstance(answer, NoSuchCall):
                return answer
            worker.wait_until_idle(self.options.idle_limit)
            disturbing = self._disturbing(others, answer["seconds"])
            if not disturbing:
                spent = worker.cpu_seconds() - own
                elsewhere = max(0.0, busy_seconds() - machine - spent) / (perf_counter() - began)
                return Turn(figure(measure, answer["value"]), answer["cpu_seconds"] / answer["seconds"], elsewhere)
            self.repeated += 1
            for name in disturbing:
                self._calm(name)
        raise WorkerFailed(f"another process computed during {_TRIES} of its turns: expected idle processes")

    def _disturbing(self, before: Mapping[str, float], seconds: float) -> list[str]:
        """The other processes that have not been idle since their CPU times were taken."""
        allowed = max(_TICK, _SHARE * seconds)
        return [name for name, spent in before.items() if self.workers[name].cpu_seconds() - spent > allowed]

    def _calm(self, name: str) -> None:
        """Wait until a process is idle; one that never is ends, and none of its measures goes on."""
        try:
            self.workers[name].wait_until_idle(self.options.idle_limit)
        except WorkerFailed as failure:
            self.say(f"{name}: {failure}")
            self.records[name].absent |= {measure.name: str(failure) for measure in self.options.measures}
            self._remove(name)

    def _open(self, subject: Subject) -> Worker:
        worker = start(subject, self.options.threads, self.options.logs, self.options.patience)
        read(subject.model)
        settings = {
            "model": str(subject.model),
            "threads": self.options.threads,
            "length": self.options.workload.length,
        }
        try:
            answer = worker.ask("open", {**settings, **subject.options})
            if isinstance(answer, NoSuchCall):
                raise WorkerFailed(answer.reason)
            worker.opened = answer
            worker.wait_until_idle(self.options.idle_limit)
        except WorkerFailed:
            worker.close()
            raise
        self.workers[subject.name] = worker
        return worker

    def _remove(self, name: str) -> None:
        if worker := self.workers.pop(name, None):
            worker.close()

    def close(self) -> None:
        """End all processes."""
        for name in list(self.workers):
            self._remove(name)


@contextmanager
def worker_pool(options: RunOptions, say: Say) -> Iterator[WorkerPool]:
    """A pool without subjects, whose processes end with it."""
    made = WorkerPool(options, say)
    try:
        yield made
    finally:
        made.close()


def measure_all(options: RunOptions, subjects: Sequence[Subject], say: Say) -> WorkerPool:
    """The records of all subjects after a warm-up and all rounds."""
    with worker_pool(options, say) as made:
        for subject in subjects:
            say(f"open {subject.name}")
            made.add(subject)
        for round_ in range(_WARM_UP, options.rounds):
            say("warm up" if round_ == _WARM_UP else f"round {round_ + 1} of {options.rounds}")
            made.run_round(round_)
        return made


def read(path: Path) -> None:
    """Read the files of a model once, so that each is opened from the page cache."""
    for file in [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file()):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass
