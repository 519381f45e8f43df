"""Service load: services and an embedded runtime under the same load, measured in turns."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.runtime.text.messages import Message
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.http_load import address_of
from spaceport.tools.bench.load_services import (
    EmbeddedRuntime,
    LoadSubject,
    running_service,
    start_embedded,
    start_llama_cpp,
    start_spaceport,
)
from spaceport.tools.bench.machine import Machine, ProcessFailed, Resources, this_machine
from spaceport.tools.bench.report import Report, Table, optional
from spaceport.tools.bench.rivals import Environments, create_environment
from spaceport.tools.bench.workload import LoadExchange, LoadRun, Workload
from spaceport.tools.verify.prompts import read_prompts

Expected = Sequence[tuple[list[int], str]]  # tokens and text of the answer to each prompt
_SHOWN = 10  # differences; JSON has all
OnProgress = Callable[[str], None]
ENVIRONMENT = "llama.cpp-server"
_STRIDE = 41  # prompts between the first ones of two rounds
_IDLE = 60.0  # seconds until a service has ended the requests whose clients left
_SHOWN_TEXT = 80  # characters of a text that differs


@dataclass(frozen=True)
class ServiceLoadOptions:
    """What is measured, and how the services are started."""

    workload: Workload  # of each run; `clients` is replaced by each of the next
    clients: tuple[int, ...] = (1, 8)
    rounds: int = 3
    sample: int | None = 40  # prompts that are used, in the order of the file; None: all
    bundle: Path | None = None  # served, embedded, and the source of the expected answers
    embedded: bool = True  # also measure the runtime without HTTP
    urls: tuple[tuple[str, str], ...] = ()  # services that run already: name and URL
    key: str = ""  # that these services ask for
    gguf: Path | None = None  # model of llama.cpp's server
    work: Path | None = None  # folder of its environment, and of logs
    setup: bool = False  # create that environment first
    threads: int = 1
    max_requests: int = 8
    queue_limit: int | None = None
    max_seq_len: int = 1024
    first_token_limit: float | None = None  # seconds; later answers do not count as goodput

    def __post_init__(self) -> None:
        if self.bundle is None and not self.urls:
            raise OptionFault("nothing to measure: expected --bundle BUNDLE, --url URL or both")
        for name in ("rounds", "sample", "threads", "max_requests", "max_seq_len"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise OptionFault(f"--{name.replace('_', '-')} is {count}: expected at least 1")
        if not self.clients or min(self.clients) < 1:
            raise OptionFault("--clients: expected numbers of at least 1, such as 1,8")
        if self.gguf is not None and not self.gguf.is_file():
            raise InputFault(f"--gguf {self.gguf}: expected a GGUF file")
        if self.gguf is not None and self.work is None:
            raise OptionFault(
                "--gguf without --work: expected the folder of llama.cpp's environment: add --work FOLDER"
            )
        if self.setup and self.gguf is None:
            raise OptionFault("--setup creates the environment of llama.cpp: add --gguf FILE, or leave it out")
        for _, url in self.urls:
            address_of(url)

    @property
    def runtime(self) -> dict[str, Any]:
        """Options of `Runtime.open` and flags of `spaceport serve`, the same for both."""
        return {
            "threads": self.threads,
            "max_requests": self.max_requests,
            "queue_limit": self.queue_limit,
            "max_seq_len": self.max_seq_len,
            "prefix_cache": True,
        }


@dataclass(frozen=True)
class Quantiles:
    """Mean and quantiles in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    highest: float

    def __str__(self) -> str:
        return f"{self.p50:.1f} / {self.p95:.1f} / {self.p99:.1f}"


@dataclass(frozen=True)
class ReportedDrafts:
    """Acceptance as the service reports it."""

    mean_acceptance_length: float  # 1 + accepted / steps
    acceptance_rate: float  # accepted / drafted


@dataclass(frozen=True)
class RunFigures:
    """One run of one subject, or the medians of several."""

    answered: float  # complete answers
    left: float  # requests whose client left
    refused: float
    failed: float
    compared: float  # answers compared with those of the bundle
    different: float
    seconds: float
    tokens_per_second: float  # that clients read; of streams that were left, events count as tokens
    goodput: float  # tokens per second of complete and right answers whose first token came in time
    requests_per_second: float  # complete answers
    first_token: Quantiles | None  # of streams
    per_token: Quantiles | None  # mean time between the tokens of a stream, over streams
    gap: Quantiles | None  # time between events with text, over all events
    refusal: Quantiles | None  # time until a refusal came
    drafts: ReportedDrafts | None
    cpu_per_token: float | None  # milliseconds of the process
    main_thread_per_token: float | None  # milliseconds of its first thread: the event loop of a service


def run_figures(
    run: LoadRun, expected: Expected | None, used: tuple[Resources, Resources] | None, first_token_limit: float | None
) -> RunFigures:
    """The figures of a run; `used` is what its process had used before and after it."""
    by_outcome: dict[str, list[LoadExchange]] = {name: [] for name in ("answered", "left", "refused", "failed")}
    for one in run.exchanges:
        by_outcome[one.outcome].append(one)
    answered = by_outcome["answered"]
    wrong = [one for one in answered if expected is not None and is_different(one, expected)]
    good = [one for one in answered if one not in wrong and _in_time(one, first_token_limit)]
    tokens = sum(one.token_count for one in run.exchanges)
    return RunFigures(
        answered=len(answered),
        left=len(by_outcome["left"]),
        refused=len(by_outcome["refused"]),
        failed=len(by_outcome["failed"]),
        compared=0 if expected is None else len(answered),
        different=len(wrong),
        seconds=run.seconds,
        tokens_per_second=tokens / run.seconds,
        goodput=sum(one.token_count for one in good) / run.seconds,
        requests_per_second=len(answered) / run.seconds,
        first_token=quantiles(one.first_token_seconds for one in run.exchanges),
        per_token=quantiles(one.seconds_per_token for one in answered),
        gap=quantiles(gap for one in run.exchanges if one.behaviour != "slow" for gap in one.gaps),
        refusal=quantiles(one.ended - one.started for one in by_outcome["refused"]),
        drafts=reported_drafts(answered),
        cpu_per_token=_per_token(used, "cpu_seconds", tokens),
        main_thread_per_token=_per_token(used, "main_thread_seconds", tokens),
    )


def is_different(exchange: LoadExchange, expected: Expected) -> bool:
    """Whether a complete answer is not the expected one: its tokens, if the service reports them, and its text."""
    tokens, text = expected[exchange.prompt]
    return exchange.text != text or exchange.token_ids not in (None, tokens)


def statuses(exchanges: Iterable[LoadExchange]) -> dict[str, int]:
    """Number of exchanges by HTTP status."""
    return {str(status): count for status, count in sorted(Counter(one.status for one in exchanges).items())}


def quantiles(seconds: Iterable[float | None]) -> Quantiles | None:
    """Quantiles of these times; None without any."""
    found = [each * 1e3 for each in seconds if each is not None]
    return Quantiles(float(np.mean(found)), *np.quantile(found, (0.5, 0.95, 0.99, 1.0)).tolist()) if found else None


def reported_drafts(exchanges: Iterable[LoadExchange]) -> ReportedDrafts | None:
    """Acceptance over the exchanges for which the service reports it; None without any."""
    found = [one.drafts for one in exchanges if one.drafts is not None]
    steps, drafted, accepted = (
        sum(one[name] for one in found) for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    return ReportedDrafts(1 + accepted / steps, accepted / drafted if drafted else 0.0) if steps else None


def medians(found: Sequence[Any]) -> Any:
    """The medians of figures over rounds, field by field."""
    present = [one for one in found if one is not None]
    if not present:
        return None
    if isinstance(present[0], int | float):
        return float(median(present))
    return type(present[0])(
        **{field.name: medians([getattr(one, field.name) for one in present]) for field in fields(present[0])}
    )


def _per_token(used: tuple[Resources, Resources] | None, name: str, tokens: int) -> float | None:
    """Milliseconds of CPU time per token; None if they are unknown."""
    if used is None or not tokens:
        return None
    before, after = (getattr(one, name) for one in used)
    return float(after - before) * 1e3 / tokens


def _in_time(exchange: LoadExchange, limit: float | None) -> bool:
    first = exchange.first_token_seconds
    return limit is None or first is None or first <= limit


@dataclass(frozen=True)
class LoadFigures:
    """One subject with one number of clients."""

    subject: str
    clients: int
    figures: RunFigures  # medians of the rounds
    rounds: tuple[RunFigures, ...]
    statuses: dict[str, int]  # requests of all rounds by HTTP status; 0: no response


@dataclass(frozen=True)
class HeldResources:
    """What a process held when it had no request: after the warm-up, and after each run."""

    subject: str
    samples: tuple[Resources, ...]


@dataclass(frozen=True)
class WrongAnswer:
    """An answer that is not the expected one."""

    subject: str
    clients: int
    prompt: int
    text: str  # its beginning
    expected: str


@dataclass(frozen=True)
class LoadRatio:
    """The first subject relative to the second, in runs of the same round."""

    subject: str
    reference: str
    clients: int
    tokens_per_second: float  # ratio
    first_token: float | None  # difference of the medians in milliseconds
    first_token_mean: float | None  # difference of the means
    per_token_p95: float | None  # ratio of the 95th percentiles of the time between tokens
    gap_p95: float | None  # ratio of the 95th percentiles of the time between events


@dataclass(frozen=True)
class ServiceLoadResults:
    """The results of a benchmark."""

    bundle: str
    machine: Machine
    options: ServiceLoadOptions
    prompts: int
    loads: tuple[LoadFigures, ...]
    resources: tuple[HeldResources, ...]
    differences: tuple[WrongAnswer, ...]
    errors: dict[str, str]  # subject -> the first error

    @property
    def identical(self) -> bool:
        """Whether all compared answers are those of the bundle."""
        return not self.differences

    def load(self, subject: str, clients: int) -> LoadFigures | None:
        """The figures of a subject with a number of clients."""
        return next((one for one in self.loads if (one.subject, one.clients) == (subject, clients)), None)

    @property
    def ratios(self) -> tuple[LoadRatio, ...]:
        """The service of the bundle relative to everything else, with each number of clients."""
        names = dict.fromkeys(one.subject for one in self.loads if one.subject != "spaceport")
        pairs = [
            (self.load("spaceport", clients), self.load(name, clients))
            for clients in self.options.clients
            for name in names
        ]
        return tuple(_ratio(own, other) for own, other in pairs if own is not None and other is not None)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        options = {name: str(one) if hasattr(one, "parts") else one for name, one in asdict(self.options).items()}
        ratios = [asdict(one) for one in self.ratios]
        return {"identical": self.identical, **asdict(self), "options": options, "ratios": ratios}


def _ratio(own: LoadFigures, other: LoadFigures) -> LoadRatio:
    pairs = list(zip(own.rounds, other.rounds, strict=True))
    return LoadRatio(
        own.subject,
        other.subject,
        own.clients,
        median(one.tokens_per_second / two.tokens_per_second for one, two in pairs),
        _median(
            [one.first_token.p50 - two.first_token.p50 for one, two in pairs if one.first_token and two.first_token]
        ),
        _median(
            [one.first_token.mean - two.first_token.mean for one, two in pairs if one.first_token and two.first_token]
        ),
        _median([one.per_token.p95 / two.per_token.p95 for one, two in pairs if one.per_token and two.per_token]),
        _median([one.gap.p95 / two.gap.p95 for one, two in pairs if one.gap and two.gap]),
    )


def _median(found: list[float]) -> float | None:
    return median(found) if found else None


def service_report(results: ServiceLoadResults) -> Report:
    """The results as tables."""
    tables = (_throughput(results), _latency(results), _ratios(results), _requests(results), _held(results))
    return Report(_settings(results), tables, list(_conclusions(results)), results.as_dict(), results.identical)


def _settings(results: ServiceLoadResults) -> list[str]:
    options, work = results.options, results.options.workload
    amount = f"{work.requests} requests" if work.requests is not None else f"{work.seconds:g} s"
    arrival = "one after the other per client" if work.rate is None else f"arriving at random, {work.rate:g} per second"
    return [
        f"{results.bundle or 'No bundle'}, {options.threads} thread(s), at most {options.max_requests} requests at a time; "
        f"{results.machine}.",
        f"{results.prompts} prompts, greedy{'' if work.drafts else ', no drafts'}, at most {work.max_tokens} tokens per answer; "
        f"{amount} per run, {arrival}; medians of {options.rounds} round(s) after a warm-up, all in turns.",
        f"Of the requests, {work.cancelled:.0%} are cancelled, {work.dropped:.0%} lose their connection, {work.slow:.0%} are "
        f"read slowly, {work.unstreamed:.0%} ask for the whole answer; seed {work.seed}.",
    ]


def _throughput(results: ServiceLoadResults) -> Table:
    columns = (
        *("service", "clients", "tokens/s", "goodput, tokens/s", "answers/s", "mean acceptance length"),
        *("acceptance rate", "CPU ms per token", "of it, main thread"),
    )
    rows = []
    for one in results.loads:
        found, drafts = one.figures, one.figures.drafts
        rates = (found.tokens_per_second, found.goodput, found.requests_per_second)
        acceptance = (drafts.mean_acceptance_length, drafts.acceptance_rate) if drafts else (None, None)
        cpu = (found.cpu_per_token, optional(found.main_thread_per_token, 3))
        rows.append((one.subject, one.clients, *rates, *acceptance, *cpu))
    return Table("Throughput", columns, rows)


def _latency(results: ServiceLoadResults) -> Table:
    """Latencies: p50 / p95 / p99."""
    columns = (
        *("service", "clients", "first token mean; p50 / p95 / p99", "between tokens, mean of a stream"),
        *("between events", "refusal p50 / p95 / highest"),
    )
    rows = []
    for one in results.loads:
        found, refusal = one.figures, one.figures.refusal
        first = None if found.first_token is None else f"{found.first_token.mean:.1f}; {found.first_token}"
        refused = None if refusal is None else f"{refusal.p50:.1f} / {refusal.p95:.1f} / {refusal.highest:.1f}"
        rows.append((one.subject, one.clients, first, found.per_token, found.gap, refused))
    return Table("Latency, ms", columns, rows)


def _ratios(results: ServiceLoadResults) -> Table:
    """The service relative to other subjects."""
    columns = (
        *("relative to", "clients", "tokens/s", "first token, ms later: p50", "mean"),
        *("between tokens p95", "between events p95"),
    )
    rows = []
    for one in results.ratios:
        later = [None if each is None else f"{each:+.1f}" for each in (one.first_token, one.first_token_mean)]
        ratio = f"{one.tokens_per_second:.3f}"
        rows.append((one.reference, one.clients, ratio, *later, one.per_token_p95, one.gap_p95))
    return Table("The service of the bundle relative to others", columns, rows)


def _requests(results: ServiceLoadResults) -> Table:
    """What became of the requests, over all rounds."""
    names = ("answered", "left", "refused", "failed", "compared", "different")
    columns = ("service", "clients", "answered", "left by the client", *names[2:], "by status")
    rows = []
    for one in results.loads:
        counts = [round(sum(getattr(each, name) for each in one.rounds)) for name in names]
        by_status = ", ".join(f"{status}: {count}" for status, count in one.statuses.items())
        rows.append((one.subject, one.clients, *counts, by_status))
    return Table("Requests", columns, rows)


def _held(results: ServiceLoadResults) -> Table:
    """Memory, file descriptors and threads, after the warm-up and after each run."""
    rows = []
    for held in results.resources:
        megabytes = [round(one.resident_bytes / 1e6) for one in held.samples]
        counts = [one.file_descriptors for one in held.samples], [one.threads for one in held.samples]
        rows.append((held.subject, *(", ".join(map(str, each)) for each in (megabytes, *counts))))
    columns = ("process", "resident MB", "file descriptors", "threads")
    return Table("What the processes held without requests", columns, rows)


def _conclusions(results: ServiceLoadResults) -> Iterator[str]:
    """Whether all answers are right, and the first errors."""
    compared = sum(each.compared for one in results.loads for each in one.rounds)
    if compared:
        yield f"- {compared - len(results.differences):.0f} of {compared:.0f} answers equal those of `Runtime.generate`."
    for one in results.differences[:_SHOWN]:
        yield f"- {one.subject}, {one.clients} clients, prompt {one.prompt + 1}: {one.text!r}, expected {one.expected!r}"
    if (rest := len(results.differences) - _SHOWN) > 0:
        yield f"- {rest} more differences"
    for name, error in results.errors.items():
        yield f"- {name}, first error: {error}"


@dataclass
class _ServiceRuns:
    """All runs of a benchmark."""

    figures: dict[tuple[str, int], list[RunFigures]] = field(default_factory=dict)  # by subject and clients
    statuses: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # subject -> the first error
    differences: list[WrongAnswer] = field(default_factory=list)
    resources: dict[str, list[Resources]] = field(default_factory=dict)  # by subject


def benchmark_services(file: Path, options: ServiceLoadOptions, on_progress: OnProgress) -> Report:
    """Throughput and latency of every subject with each number of clients."""
    if not sys.platform.startswith("linux"):
        raise MissingDependency(f"bench load reads CPU time from /proc: expected Linux, this is {sys.platform}")
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
    results = ServiceLoadResults(
        "" if options.bundle is None else options.bundle.absolute().name,
        this_machine(),
        options,
        len(prompts),
        tuple(loads),
        tuple(HeldResources(name, tuple(samples)) for name, samples in measured.resources.items()),
        tuple(measured.differences),
        measured.errors,
    )
    return service_report(results)


def _sendable(prompt: str | tuple[Message, ...]) -> Prompt:
    """A prompt as the body of a request can have it."""
    return prompt if isinstance(prompt, str) else list(prompt)


@contextmanager
def _subjects(
    options: ServiceLoadOptions, prompts: Sequence[Prompt], logs: Path, on_progress: OnProgress
) -> Iterator[list[LoadSubject]]:
    """Everything that is measured, started and ready; the embedded runtime is always the first if there is a bundle."""
    found: list[LoadSubject] = []
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
        create_environment(environments, ENVIRONMENT, on_progress)
    except ProcessFailed as failure:
        raise ProcessFailed(f"the environment of llama.cpp's server cannot be created: {failure}") from failure


def _expected(subjects: Sequence[LoadSubject], options: ServiceLoadOptions, on_progress: OnProgress) -> Expected | None:
    """The answers of the bundle, generated one at a time; None without a bundle."""
    embedded = subjects[0]
    if not isinstance(embedded, EmbeddedRuntime):
        return None
    on_progress("generating the expected answers")
    return embedded.expected(options.workload)


def _measure(
    subjects: list[LoadSubject], expected: Expected | None, options: ServiceLoadOptions, on_progress: OnProgress
) -> _ServiceRuns:
    """All runs: the subjects take turns in an order that rotates, after a run that is not measured."""
    found = _ServiceRuns()
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
    found: _ServiceRuns,
    subject: LoadSubject,
    clients: int,
    run: LoadRun,
    expected: Expected | None,
    used: tuple[Resources, Resources] | None,
    options: ServiceLoadOptions,
) -> None:
    key, own = (subject.name, clients), expected if subject.compared else None
    found.figures.setdefault(key, []).append(run_figures(run, own, used, options.first_token_limit))
    counts = found.statuses.setdefault(key, {})
    for status, count in statuses(run.exchanges).items():
        counts[status] = counts.get(status, 0) + count
    for one in run.exchanges:
        if one.error is not None:
            found.errors.setdefault(subject.name, f"{one.behaviour}: {one.error}")
        if own is not None and one.outcome == "answered" and is_different(one, own):
            texts = one.text[:_SHOWN_TEXT], own[one.prompt][1][:_SHOWN_TEXT]
            found.differences.append(WrongAnswer(subject.name, clients, one.prompt, *texts))


def _hold(found: _ServiceRuns, subject: LoadSubject) -> None:
    """Record what the process of a subject holds once it has no request."""
    limit = time.monotonic() + _IDLE
    while not subject.idle():
        if time.monotonic() > limit:
            raise ProcessFailed(f"{subject.name} still has requests {_IDLE:g} s after its clients left")
        time.sleep(0.1)
    if (resources := subject.resources()) is not None:
        found.resources.setdefault(subject.name, []).append(resources)
