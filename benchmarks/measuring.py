"""Measuring: the same calls for every runtime, which takes its turns in a process of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, process_time, sleep
from typing import Any

import numpy as np

from benchmarks.runtimes import OnProgress, OtherRuntime, ProcessFailed, WorkFolder, without_own
from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.decode_measuring import WARM_UP, rotated

ROOT = Path(__file__).resolve().parents[1]
WORKLOADS = ("decode", "rows", "prefill", "concurrent")
NO_KIND = "(none)"  # kind of a prompt whose line names none
_IDS = (3, 200)  # range of random token ids: in every vocabulary, after the usual special tokens
_REPEATS = 8  # steps of each width per round
_REQUEST = 64, 32  # prompt tokens and new tokens of a concurrent request
_TIMEOUT = 600.0  # seconds to wait for an answer
_IDLE_LIMIT, _PAUSE = 10.0, 0.05  # seconds; a process that neither uses nor wants CPU time during a pause is idle
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_REPORTS = 10  # progress lines
_TICKS = os.sysconf("SC_CLK_TCK")  # units per second of CPU times in /proc


@dataclass(frozen=True)
class Subject:
    """A mode of a bundle or another runtime, ready to start."""

    name: str
    command: tuple[str, ...]  # of its worker
    settings: Mapping[str, Any]  # of its runner, with `model`
    workloads: tuple[str, ...] = WORKLOADS  # those in which it is measured
    ours: bool = False
    reference: str | None = None  # subject whose outputs are the same; None: nothing is compared


def own_subject(name: str, bundle: Path, mode: str, backend: str, reference: str | None) -> Subject:
    """A decoding mode of a bundle, in this interpreter."""
    command = _worker_command(sys.executable, "on_spaceport.py", "Spaceport")
    workloads = WORKLOADS if reference is None else ("decode", "concurrent")  # others are those of plain decoding
    settings = {"model": str(bundle), "mode": mode, "backend": backend}
    return Subject(name, command, settings, workloads, True, reference)


def other_subject(name: str, runtime: OtherRuntime, work: WorkFolder) -> Subject:
    """Another runtime, in its environment; raises if that is missing."""
    work.check(name, runtime)
    settings: dict[str, Any] = {"model": str(work.model(runtime.model)), "lookup": runtime.lookup}
    if runtime.rows_model:
        settings["rows_model"] = str(work.model(runtime.rows_model))
    command = _worker_command(str(work.python(runtime.environment)), "runners.py", runtime.runner)
    return Subject(name, command, settings, ("decode",) if runtime.lookup else WORKLOADS)


def _worker_command(python: str, file: str, runner: str) -> tuple[str, ...]:
    return python, str(ROOT / "benchmarks" / "runners.py"), str(ROOT / "benchmarks" / file), runner


@dataclass(frozen=True)
class Prompt:
    """A prompt of the decode workload."""

    line: int  # line number in its file
    kind: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """What is measured."""

    names: tuple[str, ...] = ("decode",)
    prompts: tuple[Prompt, ...] = ()
    ends: tuple[int, ...] = ()  # end tokens
    max_tokens: int = 64  # per answer
    rows: tuple[int, ...] = (1, 2, 4, 9, 16, 36)
    context: int = 256  # cached tokens before the rows
    prefill: tuple[int, ...] = (128, 1024)  # prompt tokens
    requests: int = 8
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.names if name not in WORKLOADS]:
            raise OptionFault(f"--workloads names {unknown[0]!r}: expected names among {', '.join(WORKLOADS)}")
        for name in ("max_tokens", "context", "requests", "rounds"):
            if getattr(self, name) < 1:
                raise OptionFault(f"--{name.replace('_', '-')} is {getattr(self, name)}: expected at least 1")
        if "rows" in self.names and max(self.rows) >= self.context:
            raise OptionFault(f"{max(self.rows)} rows after {self.context} tokens: expected a longer --context")

    @property
    def length(self) -> int:
        """Context length that is needed, in tokens."""
        decode = max((len(prompt.tokens) for prompt in self.prompts), default=0) + self.max_tokens
        needed = {"decode": decode, "rows": self.context + 2 * max(self.rows), "prefill": max(self.prefill) + 1}
        return max({**needed, "concurrent": sum(_REQUEST)}[name] for name in self.names)

    def turns(self, round_: int) -> Iterator[Turn]:
        """The turns of a round; the warm-up decodes the last prompt only: some runtimes cache the prompt before."""
        for prompt in (self.prompts if round_ != WARM_UP else self.prompts[-1:]) if "decode" in self.names else ():
            arguments = {"prompt": prompt.tokens, "tokens": self.max_tokens, "ends": self.ends}
            yield Turn("decode", prompt.kind, prompt.line, arguments)
        random = np.random.default_rng((self.seed, round_))  # other prompts in each round

        def tokens(count: int) -> list[int]:
            return [int(token) for token in random.integers(*_IDS, count)]

        for count in self.rows if "rows" in self.names else ():
            arguments = {"prompt": tokens(self.context), "rows": tokens(count), "repeats": _REPEATS}
            yield Turn("rows", f"{count} row{'s' * (count > 1)}", round_, arguments)
        for count in self.prefill if "prefill" in self.names else ():
            yield Turn("prefill", f"{count} tokens", round_, {"prompt": tokens(count)})
        if "concurrent" in self.names:
            prompts = [tokens(_REQUEST[0]) for _ in range(self.requests)]
            yield Turn("concurrent", f"{self.requests} requests", round_, {"prompts": prompts, "tokens": _REQUEST[1]})


@dataclass(frozen=True)
class Turn:
    """A call that every subject answers before the next one."""

    workload: str  # also the name of the call
    case: str  # kind of the prompt, or what else the workload varies
    sample: int  # line of the prompt; of other workloads the round
    arguments: Mapping[str, Any]

    def value(self, result: Any) -> float:
        """The measured value: milliseconds of a step with rows, tokens/s of all others."""
        if self.workload == "rows":
            return float(median(result)) * 1e3
        if self.workload == "prefill":
            return len(self.arguments["prompt"]) / float(result)
        tokens, seconds = (result["tokens"], result["seconds"]) if self.workload == "decode" else result
        return float(tokens) / float(seconds)


@dataclass(frozen=True)
class Measurement:
    """The value of one subject in one turn."""

    subject: str
    workload: str
    case: str
    sample: int
    value: float
    tokens: int = 0  # of an answer
    steps: int = 0  # decode steps of an answer; 0: not known
    first: float = 0.0  # seconds to the first token of an answer
    identical: bool | None = None  # whether the answer is that of the reference; None: not compared


def cpu_seconds(stat: Path) -> float:
    """CPU time in a file such as /proc/PID/stat, with a resolution of 10 ms."""
    fields = stat.read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def is_running(process: int) -> bool:
    """Whether an OS thread of a process runs or waits for a CPU."""
    for stat in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError):  # the OS thread has ended
            if stat.read_text("utf-8").rpartition(")")[2].split()[0] == "R":
                return True
    return False


@dataclass
class Worker:
    """The running process of a subject."""

    subject: Subject
    log: Path
    process: subprocess.Popen[str]
    versions: dict[str, str] = field(default_factory=dict)

    def call(self, name: str, **arguments: Any) -> Any:
        """The answer to one call, after which the process is idle; threads of some libraries spin for a while."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise self._ended() from None
        if not select.select([self.process.stdout], [], [], _TIMEOUT)[0]:
            raise ProcessFailed(f"{self.subject.name}: no answer within {_TIMEOUT:g} s: look at {self.log}")
        if not (line := self.process.stdout.readline()):
            raise self._ended()
        self._wait_until_idle()
        return json.loads(line)

    def _wait_until_idle(self) -> None:
        end, before, stat = monotonic() + _IDLE_LIMIT, -1.0, Path(f"/proc/{self.process.pid}/stat")
        while (now := cpu_seconds(stat)) != before or is_running(self.process.pid):
            if monotonic() > end:
                raise ProcessFailed(f"still busy {_IDLE_LIMIT:g} s after its answer: expected an idle process")
            before = now
            sleep(_PAUSE)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    def _ended(self) -> ProcessFailed:
        code = self.process.wait()
        lines = self.log.read_text("utf-8", "replace").strip().splitlines() or ["nothing"]
        return ProcessFailed(
            f"the process of {self.subject.name} ended with exit code {code} and printed last: {lines[-1]} (log: {self.log})"
        )


def start_worker(subject: Subject, threads: int, length: int, logs: Path) -> Worker:
    """The worker of a subject with its model open, for contexts of this length."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"worker-{subject.name.replace(' ', '-').replace('/', '-')}.log"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment = environment if subject.ours else without_own(os.environ)
    environment |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment |= dict.fromkeys(_THREADS, str(threads))
    pipe = subprocess.PIPE
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(subject.command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, text=True)
    worker = Worker(subject, log, process)
    try:
        worker.versions = worker.call("open", **{**subject.settings, "threads": threads, "length": length})
    except BaseException:
        worker.close()
        raise
    return worker


def other_seconds(workers: Sequence[Worker]) -> float:
    """CPU time so far of all processes on the machine but this one and the workers."""
    line = Path("/proc/stat").read_text("utf-8").split("\n", 1)[0]
    user, nice, system, _, _, irq, softirq, *_ = map(int, line.split()[1:])
    running = [worker.process.pid for worker in workers if worker.process.poll() is None]
    own = process_time() + sum(cpu_seconds(Path(f"/proc/{pid}/stat")) for pid in running)
    return (user + nice + system + irq + softirq) / _TICKS - own


@dataclass
class Measurements:
    """Everything that was measured."""

    found: list[Measurement] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # subject -> why it has no further figures
    versions: str = ""  # of the packages of all subjects
    other_cores: float = 0.0  # CPU time of other processes per second

    def take_turns(self, workers: Sequence[Worker], workload: Workload, on_progress: OnProgress) -> None:
        """Record a warm-up, which is left out, and all rounds; the order of the subjects rotates from turn to turn."""
        turns = [(number, turn) for number in range(WARM_UP, workload.rounds + 1) for turn in workload.turns(number)]
        every = max(1, len(turns) // _REPORTS)
        for index, (number, turn) in enumerate(turns):
            if index % every == 0:
                on_progress(f"{turn.workload}, {turn.case}: turn {index + 1} of {len(turns)}")
            found = self._take(list(rotated(workers, index)), turn)
            if number != WARM_UP:
                self.found += found

    def _take(self, workers: Sequence[Worker], turn: Turn) -> list[Measurement]:
        """One turn of all subjects; one whose process fails is left out from here on, one of ours ends the benchmark."""
        results: dict[str, Any] = {}
        for worker in workers:
            subject = worker.subject
            if turn.workload not in subject.workloads or subject.name in self.failed:
                continue
            try:
                results[subject.name] = worker.call(turn.workload, **turn.arguments)
            except ProcessFailed as failure:
                if subject.ours:
                    raise
                self.failed[subject.name] = f"{turn.workload}, {turn.case}: {failure}"
        found = []
        for subject in (worker.subject for worker in workers if worker.subject.name in results):
            result = results[subject.name]
            answer, identical = result if turn.workload == "decode" else {}, None
            if answer and subject.reference is not None:
                identical = answer["output"] == results[subject.reference]["output"]
            counts = answer.get("tokens", 0), answer.get("steps", 0), answer.get("first", 0.0)
            what = subject.name, turn.workload, turn.case, turn.sample
            found.append(Measurement(*what, turn.value(result), *counts, identical))
        return found


def measure(
    subjects: Sequence[Subject], workload: Workload, threads: int, logs: Path, on_progress: OnProgress
) -> Measurements:
    """The measurements of all subjects, which compute in turns."""
    measured, versions = Measurements(), dict[str, str]()
    with ExitStack() as stack:
        workers = []
        for subject in subjects:
            on_progress(f"opening {subject.name}")
            workers.append(worker := start_worker(subject, threads, workload.length, logs))
            stack.callback(worker.close)
            versions |= worker.versions
        started, before = perf_counter(), other_seconds(workers)
        measured.take_turns(workers, workload, on_progress)
        measured.other_cores = max(0.0, other_seconds(workers) - before) / (perf_counter() - started)
    measured.versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    return measured
