"""Batching: throughput and latency of concurrent requests, by the maximum number of requests that the engine batches.

All requests are sent at the same time. With `max_requests=1` they are decoded one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import click
import numpy as np

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.report import Report, Table
from spaceport.tools.cli.bench import parse_counts
from spaceport.tools.cli.options import PATH, bundle_argument, json_option
from spaceport.tools.demo.prompts import prompts_of

_RATES = ("tokens_per_second", "tokens_per_cpu_second")


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
    tokens_per_second: float
    tokens_per_cpu_second: float  # of this process only, so other load on the machine is not included


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


def random_prompts(count: int, context: int) -> list[Prompt]:
    """Random prompts of `context` tokens on average, from half to one and a half times as many."""
    random = np.random.default_rng(0)
    lengths = random.integers(max(1, context // 2), context * 3 // 2 + 1, count)
    return [random.integers(0, 200, length).tolist() for length in lengths]


def run_batch(runtime: Runtime, max_requests: int, prompts: Sequence[Prompt], decoding: Decoding) -> BatchRun:
    """Send all requests at the same time to a new runtime, after a warm-up."""

    def served(prompt: Prompt) -> ServedRequest:
        started, first = perf_counter(), 0.0
        with runtime.stream(prompt, decoding) as stream:
            for _ in stream:
                first = first or perf_counter() - started
            tokens = len(stream.completion().tokens)
        seconds = perf_counter() - started
        return ServedRequest(tokens, first or seconds, seconds)

    with runtime, ThreadPoolExecutor(len(prompts)) as clients:
        list(clients.map(served, prompts[:max_requests]))  # warm-up
        started, cpu_started = perf_counter(), process_time()
        requests = list(clients.map(served, prompts))
        seconds, cpu_seconds = perf_counter() - started, process_time() - cpu_started
    tokens = sum(request.tokens for request in requests)
    return BatchRun(requests, tokens / seconds, tokens / cpu_seconds)


def compare_max_requests(
    open_runtime: Callable[[int], Runtime],
    counts: Sequence[int],
    prompts: Sequence[Prompt],
    decoding: Decoding,
    rounds: int,
) -> list[LoadResult]:
    """The results for each value of max_requests; the values alternate within each round, so other load affects all."""
    runs: dict[int, list[BatchRun]] = {max_requests: [] for max_requests in counts}
    for _ in range(rounds):
        for max_requests in counts:
            runs[max_requests].append(run_batch(open_runtime(max_requests), max_requests, prompts, decoding))
    return [load_result(max_requests, own, runs[counts[0]]) for max_requests, own in runs.items()]


def load_result(max_requests: int, runs: Sequence[BatchRun], baseline: Sequence[BatchRun]) -> LoadResult:
    """Median throughput of the rounds, and latency quantiles over the requests of all rounds."""
    rate, cpu_rate = (median(getattr(run, name) for run in runs) for name in _RATES)
    base, cpu_base = (median(getattr(run, name) for run in baseline) for name in _RATES)
    first = [request.first_token_seconds for run in runs for request in run.served]
    latency = [request.seconds for run in runs for request in run.served]
    quantiles = [*np.quantile(first, (0.5, 0.95)).tolist(), *np.quantile(latency, (0.5, 0.95)).tolist()]
    return LoadResult(max_requests, rate, rate / base, cpu_rate, cpu_rate / cpu_base, *quantiles)


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
    sent = random_prompts(requests, context)
    if prompts is not None:  # those of the checkpoint, repeated in order
        sent = list(islice(cycle(prompts_of(prompts).values()), requests))

    def open_runtime(max_requests: int) -> Runtime:
        length = context * 2 + tokens
        return Runtime.open(
            bundle, max_requests=max_requests, max_seq_len=length, queue_limit=requests, threads=threads
        )

    results = compare_max_requests(open_runtime, counts, sent, decoding, rounds)
    load_report(results, requests, tokens, threads).show(as_json)
