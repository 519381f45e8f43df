"""Load: services and an embedded runtime under the same load, measured in turns."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from spaceport.graphs.contract.faults import MissingDependency
from spaceport.runtime.text.messages import Message
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.decode_measuring import rotated
from spaceport.tools.bench.load_clients import LoadExchange, LoadRun
from spaceport.tools.bench.load_services import EmbeddedRuntime, LoadSubject, ServiceLoadOptions, open_subjects
from spaceport.tools.bench.machine import Machine, ProcessFailed, Resources, this_machine
from spaceport.tools.bench.report import Report, Table, optional
from spaceport.tools.bench.rivals import OnProgress
from spaceport.tools.verify.prompts import read_prompts

Expected = Sequence[tuple[list[int], str]]  # tokens and text of the answer to each prompt
_SHOWN = 10  # differences; JSON has all
_STRIDE = 41  # prompts between the first ones of two rounds
_IDLE = 60.0  # seconds until a service has ended the requests whose clients left
_SHOWN_TEXT = 80  # characters of a text that differs


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
    outcomes = Counter(exchange.outcome for exchange in run.exchanges)
    answered = [exchange for exchange in run.exchanges if exchange.outcome == "answered"]
    wrong = [exchange for exchange in answered if expected is not None and is_different(exchange, expected)]
    limit = float("inf") if first_token_limit is None else first_token_limit
    good = [
        exchange for exchange in answered if exchange not in wrong and (exchange.first_token_seconds or 0.0) <= limit
    ]
    tokens = sum(exchange.token_count for exchange in run.exchanges)
    cpu, main = ((after - before) * 1e3 / tokens if used and tokens else None for before, after in _cpu_times(used))
    return RunFigures(
        answered=outcomes["answered"],
        left=outcomes["left"],
        refused=outcomes["refused"],
        failed=outcomes["failed"],
        compared=0 if expected is None else len(answered),
        different=len(wrong),
        seconds=run.seconds,
        tokens_per_second=tokens / run.seconds,
        goodput=sum(exchange.token_count for exchange in good) / run.seconds,
        requests_per_second=len(answered) / run.seconds,
        first_token=quantiles(exchange.first_token_seconds for exchange in run.exchanges),
        per_token=quantiles(exchange.seconds_per_token for exchange in answered),
        gap=quantiles(gap for exchange in run.exchanges if exchange.behaviour != "slow" for gap in exchange.gaps),
        refusal=quantiles(one.ended - one.started for one in run.exchanges if one.outcome == "refused"),
        drafts=reported_drafts(answered),
        cpu_per_token=cpu,
        main_thread_per_token=main,
    )


def _cpu_times(used: tuple[Resources, Resources] | None) -> list[tuple[float, float]]:
    """CPU seconds of a process and of its first thread, before and after a run."""
    if used is None:
        return [(0.0, 0.0)] * 2
    before, after = used
    return [(before.cpu_seconds, after.cpu_seconds), (before.main_thread_seconds, after.main_thread_seconds)]


def is_different(exchange: LoadExchange, expected: Expected) -> bool:
    """Whether a complete answer is not the expected one: its tokens, if the service reports them, and its text."""
    tokens, text = expected[exchange.prompt]
    return exchange.text != text or exchange.token_ids not in (None, tokens)


def quantiles(seconds: Iterable[float | None]) -> Quantiles | None:
    """Quantiles of these times; None without any."""
    times = [value * 1e3 for value in seconds if value is not None]
    return Quantiles(float(np.mean(times)), *np.quantile(times, (0.5, 0.95, 0.99, 1.0)).tolist()) if times else None


def reported_drafts(exchanges: Iterable[LoadExchange]) -> ReportedDrafts | None:
    """Acceptance over the exchanges for which the service reports it; None without any."""
    total = Counter[str]()
    for exchange in exchanges:
        total.update(exchange.drafts or {})
    steps, drafted, accepted = (
        total[name] for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
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


@dataclass
class LoadFigures:
    """One subject with one number of clients."""

    subject: str
    clients: int
    rounds: list[RunFigures] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)  # requests of all rounds by HTTP status; 0: no response

    @property
    def figures(self) -> RunFigures:
        """The medians of the rounds."""
        found: RunFigures = medians(self.rounds)
        return found


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


@dataclass
class ServiceLoadResults:
    """The results of a benchmark."""

    bundle: str
    machine: Machine
    options: ServiceLoadOptions
    prompts: int
    loads: dict[tuple[str, int], LoadFigures] = field(default_factory=dict)  # by subject and clients
    # By subject: what its process held without a request, after the warm-up and after each run.
    resources: dict[str, list[Resources]] = field(default_factory=dict)
    differences: list[WrongAnswer] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)  # subject -> the first error

    @property
    def ratios(self) -> list[LoadRatio]:
        """The service of the bundle relative to everything else, with each number of clients."""
        pairs = [
            (self.loads.get(("spaceport", clients)), load)
            for clients in self.options.clients
            for load in self.loads.values()
            if load.subject != "spaceport" and load.clients == clients
        ]
        return [_ratio(own, other) for own, other in pairs if own is not None]

    def add(
        self,
        subject: LoadSubject,
        clients: int,
        run: LoadRun,
        expected: Expected | None,
        used: tuple[Resources, Resources] | None,
    ) -> None:
        """Record a run; `used` is what the process of the subject had used before and after it."""
        load = self.loads.setdefault((subject.name, clients), LoadFigures(subject.name, clients))
        load.rounds.append(run_figures(run, expected, used, self.options.first_token_limit))
        for exchange in run.exchanges:
            load.statuses[str(exchange.status)] = load.statuses.get(str(exchange.status), 0) + 1
            if exchange.error is not None:
                self.errors.setdefault(subject.name, f"{exchange.behaviour}: {exchange.error}")
            if expected is not None and exchange.outcome == "answered" and is_different(exchange, expected):
                texts = exchange.text[:_SHOWN_TEXT], expected[exchange.prompt][1][:_SHOWN_TEXT]
                self.differences.append(WrongAnswer(subject.name, clients, exchange.prompt, *texts))

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        options = {name: str(one) if hasattr(one, "parts") else one for name, one in asdict(self.options).items()}
        return {
            "identical": not self.differences,
            "bundle": self.bundle,
            "machine": asdict(self.machine),
            "options": options,
            "prompts": self.prompts,
            "loads": [{**asdict(load), "figures": asdict(load.figures)} for load in self.loads.values()],
            "resources": [
                {"subject": name, "samples": [asdict(sample) for sample in samples]}
                for name, samples in self.resources.items()
            ],
            "differences": [asdict(one) for one in self.differences],
            "errors": self.errors,
            "ratios": [asdict(one) for one in self.ratios],
        }


def _ratio(own: LoadFigures, other: LoadFigures) -> LoadRatio:
    pairs = list(zip(own.rounds, other.rounds, strict=True))

    def figure(name: str, quantile: str, relative: bool) -> float | None:
        """The median ratio or difference of a quantile, over the rounds in which both have it."""
        times = [(getattr(one, name), getattr(two, name)) for one, two in pairs]
        both = [(getattr(one, quantile), getattr(two, quantile)) for one, two in times if one and two]
        return median(one / two if relative else one - two for one, two in both) if both else None

    return LoadRatio(
        own.subject,
        other.subject,
        own.clients,
        median(one.tokens_per_second / two.tokens_per_second for one, two in pairs),
        figure("first_token", "p50", relative=False),
        figure("first_token", "mean", relative=False),
        figure("per_token", "p95", relative=True),
        figure("gap", "p95", relative=True),
    )


def service_report(results: ServiceLoadResults) -> Report:
    """The results as tables."""
    tables = (_throughput(results), _latency(results), _ratios(results), _requests(results), _held(results))
    return Report(_settings(results), tables, list(_conclusions(results)), results.as_dict(), not results.differences)


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
    for one in results.loads.values():
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
    for one in results.loads.values():
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
    for one in results.loads.values():
        counts = [round(sum(getattr(each, name) for each in one.rounds)) for name in names]
        by_status = ", ".join(f"{status}: {count}" for status, count in sorted(one.statuses.items()))
        rows.append((one.subject, one.clients, *counts, by_status))
    return Table("Requests", columns, rows)


def _held(results: ServiceLoadResults) -> Table:
    """Memory, file descriptors and threads, after the warm-up and after each run."""
    rows = []
    for name, samples in results.resources.items():
        megabytes = [round(one.resident_bytes / 1e6) for one in samples]
        counts = [one.file_descriptors for one in samples], [one.threads for one in samples]
        rows.append((name, *(", ".join(map(str, each)) for each in (megabytes, *counts))))
    columns = ("process", "resident MB", "file descriptors", "threads")
    return Table("What the processes held without requests", columns, rows)


def _conclusions(results: ServiceLoadResults) -> Iterator[str]:
    """Whether all answers are right, and the first errors."""
    compared = sum(each.compared for one in results.loads.values() for each in one.rounds)
    if compared:
        yield f"- {compared - len(results.differences):.0f} of {compared:.0f} answers equal those of `Runtime.generate`."
    for one in results.differences[:_SHOWN]:
        yield f"- {one.subject}, {one.clients} clients, prompt {one.prompt + 1}: {one.text!r}, expected {one.expected!r}"
    if (rest := len(results.differences) - _SHOWN) > 0:
        yield f"- {rest} more differences"
    for name, error in results.errors.items():
        yield f"- {name}, first error: {error}"


def benchmark_services(file: Path, options: ServiceLoadOptions, on_progress: OnProgress) -> Report:
    """Throughput and latency of every subject with each number of clients."""
    if not sys.platform.startswith("linux"):
        raise MissingDependency(f"bench load reads CPU time from /proc: expected Linux, this is {sys.platform}")
    prompts: list[Prompt] = [_sendable(one.prompt) for one in read_prompts(file)[: options.sample]]
    name = "" if options.bundle is None else options.bundle.absolute().name
    results = ServiceLoadResults(name, this_machine(), options, len(prompts))
    with TemporaryDirectory(prefix="spaceport-bench-") as folder:
        logs = Path(folder) if options.work is None else options.work.absolute() / "logs"
        with open_subjects(options, prompts, logs, on_progress) as subjects:
            _measure(results, subjects, on_progress)
    return service_report(results)


def _sendable(prompt: str | tuple[Message, ...]) -> Prompt:
    """A prompt as the body of a request can have it."""
    return prompt if isinstance(prompt, str) else list(prompt)


def _measure(results: ServiceLoadResults, subjects: list[LoadSubject], on_progress: OnProgress) -> None:
    """All runs: the subjects take turns in an order that rotates, after a run that is not measured."""
    options, expected = results.options, None
    if subjects and isinstance(embedded := subjects[0], EmbeddedRuntime):
        on_progress("generating the expected answers")
        expected = embedded.expected(options.workload)
    loaded = [one for one in subjects if options.embedded or not isinstance(one, EmbeddedRuntime)]
    warm_up = replace(options.workload, clients=options.max_requests, requests=options.max_requests, seconds=None)
    for subject in loaded:
        on_progress(f"warming up {subject.name}")
        subject.run(replace(warm_up, rate=None, ramp=0.0), 0)
        _hold(results, subject)
    for clients in options.clients:
        workload = replace(options.workload, clients=clients)
        for number in range(options.rounds):
            for subject in rotated(loaded, number):
                on_progress(f"{subject.name}, {clients} clients, round {number + 1} of {options.rounds}")
                before = subject.resources()
                run = subject.run(workload, number * _STRIDE)
                after = subject.resources()
                used = None if before is None or after is None else (before, after)
                results.add(subject, clients, run, expected if subject.compared else None, used)
                _hold(results, subject)


def _hold(results: ServiceLoadResults, subject: LoadSubject) -> None:
    """Record what the process of a subject holds once it has no request."""
    limit = time.monotonic() + _IDLE
    while not subject.idle():
        if time.monotonic() > limit:
            raise ProcessFailed(f"{subject.name} still has requests {_IDLE:g} s after its clients left")
        time.sleep(0.1)
    if (resources := subject.resources()) is not None:
        results.resources.setdefault(subject.name, []).append(resources)
