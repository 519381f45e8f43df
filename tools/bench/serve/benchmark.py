"""Benchmark: services and an embedded runtime under the same load, measured in turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from spaceport.graphs.contract.faults import MissingDependency
from spaceport.runtime.text.messages import Message
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.compare.machine import this_machine
from spaceport.tools.bench.compare.setup import CommandFailed, create
from spaceport.tools.bench.compare.work_folder import Environments
from spaceport.tools.bench.serve.figures import Expected, Figures, figures_of, is_different, medians, statuses
from spaceport.tools.bench.serve.load_run import LoadRun
from spaceport.tools.bench.serve.options import ServeOptions
from spaceport.tools.bench.serve.processes import ProcessFailed, Resources
from spaceport.tools.bench.serve.report import Difference, HeldResources, LoadFigures, ServeReport
from spaceport.tools.bench.serve.subjects import (
    EmbeddedRuntime,
    Subject,
    running_service,
    start_embedded,
    start_llama_cpp,
    start_spaceport,
)
from spaceport.tools.verify.audit.prompts import read_prompts

OnProgress = Callable[[str], None]
ENVIRONMENT = "llama.cpp-server"
_STRIDE = 41  # prompts between the first ones of two rounds
_IDLE = 60.0  # seconds until a service has ended the requests whose clients left
_SHOWN = 80  # characters of a text that differs


@dataclass
class _Measured:
    """All runs of a benchmark."""

    figures: dict[tuple[str, int], list[Figures]] = field(default_factory=dict)  # by subject and clients
    statuses: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # subject -> the first error
    differences: list[Difference] = field(default_factory=list)
    resources: dict[str, list[Resources]] = field(default_factory=dict)  # by subject


def benchmark(file: Path, options: ServeOptions, on_progress: OnProgress) -> ServeReport:
    """Throughput and latency of every subject with each number of clients."""
    if not sys.platform.startswith("linux"):
        raise MissingDependency(f"bench serve reads CPU time from /proc: expected Linux, this is {sys.platform}")
    prompts: list[Prompt] = [_sendable(one.prompt) for one in read_prompts(file)[: options.sample]]
    with TemporaryDirectory(prefix="spaceport-bench-") as folder:
        logs = Path(folder) if options.work is None else options.work.absolute() / "logs"
        with _subjects(options, prompts, logs, on_progress) as subjects:
            expected = _expected(subjects, options, on_progress)
            measured = _measure(subjects, expected, options, on_progress)
    loads = [
        LoadFigures(name, clients, medians(rounds), tuple(rounds), measured.statuses[name, clients])
        for (name, clients), rounds in measured.figures.items()
    ]
    return ServeReport(
        "" if options.bundle is None else options.bundle.absolute().name,
        this_machine(),
        options,
        len(prompts),
        tuple(loads),
        tuple(HeldResources(name, tuple(samples)) for name, samples in measured.resources.items()),
        tuple(measured.differences),
        measured.errors,
    )


def _sendable(prompt: str | tuple[Message, ...]) -> Prompt:
    """A prompt as the body of a request can have it."""
    return prompt if isinstance(prompt, str) else list(prompt)


@contextmanager
def _subjects(
    options: ServeOptions, prompts: Sequence[Prompt], logs: Path, on_progress: OnProgress
) -> Iterator[list[Subject]]:
    """Everything that is measured, started and ready; the embedded runtime is always the first if there is a bundle."""
    found: list[Subject] = []
    try:
        if options.bundle is not None:
            on_progress("opening the bundle in an embedded runtime and in a service")
            found.append(start_embedded(options.bundle, options.runtime, prompts, logs))
            found.append(start_spaceport(options.bundle, options.runtime, prompts, logs))
        if options.gguf is not None:
            assert options.work is not None
            environments = Environments(options.work)
            if options.setup:
                _create(environments, on_progress)
            on_progress("opening the model in llama.cpp's server")
            python = environments.python(ENVIRONMENT)
            if not python.exists():
                raise ProcessFailed(f"{python.parent.parent}: no environment of llama.cpp's server: add --setup")
            length, threads = options.max_seq_len, options.threads
            found.append(start_llama_cpp(python, options.gguf, threads, length, prompts, logs))
        for name, url in options.urls:
            found.append(running_service(url, name, options.key, prompts, options.bundle is not None))
        yield found
    finally:
        for one in found:
            one.close()


def _create(environments: Environments, on_progress: OnProgress) -> None:
    try:
        create(environments, ENVIRONMENT, on_progress)
    except CommandFailed as failure:
        raise ProcessFailed(f"the environment of llama.cpp's server cannot be created: {failure}") from failure


def _expected(subjects: Sequence[Subject], options: ServeOptions, on_progress: OnProgress) -> Expected | None:
    """The answers of the bundle, generated one at a time; None without a bundle."""
    embedded = subjects[0]
    if not isinstance(embedded, EmbeddedRuntime):
        return None
    on_progress("generating the expected answers")
    return embedded.expected(options.workload)


def _measure(
    subjects: list[Subject], expected: Expected | None, options: ServeOptions, on_progress: OnProgress
) -> _Measured:
    """All runs: the subjects take turns in an order that rotates, after a run that is not measured."""
    found = _Measured()
    loaded = [one for one in subjects if options.embedded or not isinstance(one, EmbeddedRuntime)]
    warm_up = replace(options.workload, clients=options.max_requests, requests=options.max_requests, seconds=None)
    for subject in loaded:
        on_progress(f"warming up {subject.name}")
        subject.run(replace(warm_up, rate=None, ramp=0.0), 0)
        _hold(found, subject)
    for clients in options.clients:
        workload = replace(options.workload, clients=clients)
        for number in range(options.rounds):
            for index in range(len(loaded)):
                subject = loaded[(index + number) % len(loaded)]
                on_progress(f"{subject.name}, {clients} clients, round {number + 1} of {options.rounds}")
                used = subject.resources()
                run = subject.run(workload, number * _STRIDE)
                then = subject.resources()
                spent = None if used is None or then is None else (used, then)
                _record(found, subject, clients, run, expected, spent, options)
                _hold(found, subject)
    return found


def _record(
    found: _Measured,
    subject: Subject,
    clients: int,
    run: LoadRun,
    expected: Expected | None,
    used: tuple[Resources, Resources] | None,
    options: ServeOptions,
) -> None:
    key, own = (subject.name, clients), expected if subject.compared else None
    found.figures.setdefault(key, []).append(figures_of(run, own, used, options.first_token_limit))
    counts = found.statuses.setdefault(key, {})
    for status, count in statuses(run.exchanges).items():
        counts[status] = counts.get(status, 0) + count
    for one in run.exchanges:
        if one.error is not None:
            found.errors.setdefault(subject.name, f"{one.behaviour}: {one.error}")
        if own is not None and one.outcome == "answered" and is_different(one, own):
            texts = one.text[:_SHOWN], own[one.prompt][1][:_SHOWN]
            found.differences.append(Difference(subject.name, clients, one.prompt, *texts))


def _hold(found: _Measured, subject: Subject) -> None:
    """Record what the process of a subject holds once it has no request."""
    limit = time.monotonic() + _IDLE
    while not subject.idle():
        if time.monotonic() > limit:
            raise ProcessFailed(f"{subject.name} still has requests {_IDLE:g} s after its clients left")
        time.sleep(0.1)
    if (resources := subject.resources()) is not None:
        found.resources.setdefault(subject.name, []).append(resources)
