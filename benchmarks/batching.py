"""Batching: throughput and latency of concurrent requests, by the maximum number of requests that the engine batches.

All requests are sent at the same time. With `max_requests=1` they are decoded one after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from time import perf_counter, process_time

import click
import numpy as np

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.report import Report, Table
from spaceport.tools.cli.bench import parse_counts
from spaceport.tools.cli.options import PATH, Renamed, bundle_argument, json_option
from spaceport.tools.demo.prompts import prompts_of


@dataclass(frozen=True)
class LoadRequest:
    """A request to send."""

    prompt: Prompt
    decoding: Decoding


@dataclass(frozen=True)
class ServedRequest:
    """The tokens and latency of one request."""

    tokens: int
    first_token_seconds: float  # time to the first piece of text
    seconds: float  # time to the last token


@dataclass(frozen=True)
class BatchRun:
    """All requests of one round, sent at the same time."""

    served: list[ServedRequest]
    seconds: float
    cpu_seconds: float  # of this process only, so other load on the machine is not included

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.served)


@dataclass(frozen=True)
class LoadResult:
    """Throughput and latency with one value of max_requests: medians of the rounds, latencies in seconds."""

    max_requests: int
    tokens_per_second: float
    ratio: float  # throughput relative to the first value of max_requests
    tokens_per_cpu_second: float
    cpu_ratio: float
    first_token_p50: float
    first_token_p95: float
    latency_p50: float
    latency_p95: float


def random_requests(count: int, context: int, decoding: Decoding) -> list[LoadRequest]:
    """Requests with random prompts of `context` tokens on average, from half to one and a half times as many."""
    random = np.random.default_rng(0)
    lengths = random.integers(max(1, context // 2), context * 3 // 2 + 1, count)
    return [LoadRequest(random.integers(0, 200, length).tolist(), decoding) for length in lengths]


def prompt_requests(prompts: Sequence[Prompt], count: int, decoding: Decoding) -> list[LoadRequest]:
    """`count` requests that repeat these prompts in order."""
    return [LoadRequest(prompts[number % len(prompts)], decoding) for number in range(count)]


def served_request(runtime: Runtime, request: LoadRequest) -> ServedRequest:
    """Send a request and read its completion to the end."""
    started = perf_counter()
    first = None
    with runtime.stream(request.prompt, request.decoding) as stream:
        for _ in stream:
            first = first or perf_counter() - started
        completion = stream.completion()
    seconds = perf_counter() - started
    return ServedRequest(len(completion.tokens), first or seconds, seconds)


def run_batch(
    bundle: Path, max_requests: int, load_requests: Sequence[LoadRequest], threads: int, max_seq_len: int
) -> BatchRun:
    """Send all requests at the same time to a new runtime, after a warm-up."""
    opened = Runtime.open(
        bundle, max_requests=max_requests, max_seq_len=max_seq_len, queue_limit=len(load_requests), threads=threads
    )
    with opened as runtime, ThreadPoolExecutor(len(load_requests)) as clients:
        list(clients.map(lambda request: served_request(runtime, request), load_requests[:max_requests]))  # warm-up
        started, cpu_started = perf_counter(), process_time()
        served = list(clients.map(lambda request: served_request(runtime, request), load_requests))
        return BatchRun(served, perf_counter() - started, process_time() - cpu_started)


def compare_max_requests(
    bundle: Path,
    counts: Sequence[int],
    load_requests: Sequence[LoadRequest],
    threads: int,
    max_seq_len: int,
    rounds: int,
) -> list[LoadResult]:
    """The results for each value of max_requests; the values alternate within each round, so other load affects all."""
    runs: dict[int, list[BatchRun]] = {max_requests: [] for max_requests in counts}
    for _ in range(rounds):
        for max_requests in counts:
            runs[max_requests].append(run_batch(bundle, max_requests, load_requests, threads, max_seq_len))
    return [load_result(max_requests, found, runs[counts[0]]) for max_requests, found in runs.items()]


def load_result(max_requests: int, runs: Sequence[BatchRun], baseline: Sequence[BatchRun]) -> LoadResult:
    """Median throughput of the rounds, and latency quantiles over the requests of all rounds."""
    rate, cpu_rate = rates(runs)
    baseline_rate, baseline_cpu_rate = rates(baseline)
    first = [one.first_token_seconds for run in runs for one in run.served]
    latency = [one.seconds for run in runs for one in run.served]
    return LoadResult(
        max_requests,
        rate,
        rate / baseline_rate,
        cpu_rate,
        cpu_rate / baseline_cpu_rate,
        *np.quantile(first, (0.5, 0.95)).tolist(),
        *np.quantile(latency, (0.5, 0.95)).tolist(),
    )


def rates(runs: Sequence[BatchRun]) -> tuple[float, float]:
    """Median tokens per second and tokens per CPU second."""
    return (
        statistics.median(run.tokens / run.seconds for run in runs),
        statistics.median(run.tokens / run.cpu_seconds for run in runs),
    )


def load_report(results: Sequence[LoadResult], requests: int, tokens: int, threads: int) -> Report:
    """The results as a table."""
    columns = (
        *("max requests", "tokens/s", "ratio", "tokens/CPU s", "ratio"),
        *("first token p50, s", "p95, s", "latency p50, s", "p95, s"),
    )
    table = Table("", columns, [astuple(result) for result in results])
    data = {"requests": requests, "tokens": tokens, "threads": threads, "results": [asdict(one) for one in results]}
    return Report((f"{requests} concurrent requests, {tokens} tokens each",), (table,), (), data)


@click.command("batching")
@bundle_argument
@click.option("--requests", default=16, show_default=True, help="Requests that are sent at the same time.")
@click.option(
    "--max-requests",
    cls=Renamed,
    former=("--places",),
    default="1,2,4,8",
    show_default=True,
    metavar="N,N,…",
    help="Values of max_requests, the number of requests that the engine batches.",
)
@click.option("--context", default=64, show_default=True, help="Mean number of prompt tokens.")
@click.option("--prompts", type=PATH, help="Checkpoint whose prompts.json is used instead of random prompts.")
@click.option("--tokens", default=48, show_default=True, help="Maximum tokens per completion.")
@click.option("--mask-slots", type=int, default=None, metavar="K", help="Maximum mask slots; 0 = no drafts from them.")
@click.option("--rounds", default=3, show_default=True, help="Measured rounds; medians are reported.")
@click.option("--threads", default=1, show_default=True, metavar="N", help="CPU threads.")
@json_option("the results")
def command(
    bundle: Path,
    requests: int,
    max_requests: str,
    context: int,
    prompts: Path | None,
    tokens: int,
    mask_slots: int | None,
    rounds: int,
    threads: int,
    as_json: bool,
) -> None:
    """Throughput and latency of concurrent requests to BUNDLE."""
    counts = parse_counts("--max-requests", max_requests)
    if min(requests, context, tokens, rounds) < 1:
        raise OptionFault("expected at least 1 of --requests, --context, --tokens and --rounds")
    decoding = Decoding(max_tokens=tokens, mask_slots=mask_slots)
    if prompts is None:
        load_requests = random_requests(requests, context, decoding)
    else:
        load_requests = prompt_requests(list(prompts_of(prompts).values()), requests, decoding)
    results = compare_max_requests(bundle, counts, load_requests, threads, context * 2 + tokens, rounds)
    load_report(results, requests, tokens, threads).show(as_json)
