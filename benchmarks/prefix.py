"""Prefix: the time to the first token of a chat's next turn with and without a prefix cache, and of a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import process_time, thread_time

import click
import numpy as np

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.report import Report, Table
from spaceport.tools.cli.bench import parse_counts
from spaceport.tools.cli.options import backend_option, bundle_argument, json_option, threads_option

_VOCABULARY = 200  # different tokens of a prompt
_ANSWER = 16  # tokens of the first turn
_CACHED = Decoding(max_tokens=_ANSWER, fork=False)
_COLD = Decoding(max_tokens=1, fork=False, prefix_cache=False)
_WARM = Decoding(max_tokens=1, fork=False)


@dataclass(frozen=True)
class PrefixResult:
    """Times of the second turn: medians of the rounds, ratios of the same round."""

    history: int  # prompt tokens of the first turn
    message: int  # tokens of the second message
    reused: int  # tokens of the second turn that were reused
    cold_seconds: float  # to the first token, without cache
    warm_seconds: float  # with cache
    ratio: float  # warm / cold
    cpu_ratio: float  # the same of CPU time, which other load on the machine does not change
    copy_seconds: float  # CPU time of a copy of the reused rows to the buffers of another request
    copy_ratio: float  # copy / CPU time of the cold request


def measure_prefixes(
    bundle: Path, histories: Sequence[int], message: int, rounds: int, threads: int, backend: str
) -> list[PrefixResult]:
    """The results for each length of the history; requests with and without cache alternate."""
    longest = max(histories) + message + 2 * _ANSWER
    opened = Runtime.open(
        bundle, backend=backend, threads=threads, max_seq_len=longest, max_requests=2, prefix_cache=True
    )
    with opened as runtime:
        return [_measured(runtime, history, message, rounds) for history in histories]


def _measured(runtime: Runtime, history: int, message: int, rounds: int) -> PrefixResult:
    times = [_round(runtime, history, message, number) for number in range(rounds + 1)][1:]  # the first one warms up
    cold, warm, copy, (reused, *_) = zip(*times, strict=True)
    return PrefixResult(
        history,
        message,
        reused,
        median(seconds for seconds, _ in cold),
        median(seconds for seconds, _ in warm),
        median(own / other for (own, _), (other, _) in zip(warm, cold, strict=True)),
        median(own / other for (_, own), (_, other) in zip(warm, cold, strict=True)),
        median(copy),
        median(seconds / other for seconds, (_, other) in zip(copy, cold, strict=True)),
    )


_Times = tuple[float, float]  # seconds and CPU seconds of a request


def _round(runtime: Runtime, history: int, message: int, number: int) -> tuple[_Times, _Times, float, int]:
    """The times of a cold and of a warm request, the CPU seconds of a copy, and the number of reused tokens."""
    random = np.random.default_rng((history, number))
    first = random.integers(0, _VOCABULARY, history).tolist()
    answer = runtime.generate(first, _CACHED).tokens
    second = [*first, *answer, *random.integers(0, _VOCABULARY, message).tolist()]
    cold = _timed(runtime, second, _COLD) if number % 2 else None
    warm, reused = _timed(runtime, second, _WARM)
    cold = cold or _timed(runtime, second, _COLD)
    if not reused:
        raise OptionFault(f"a history of {history} tokens was not reused: expected a longer one")
    slots = np.arange(reused)
    started = thread_time()
    runtime.engine.copy(0, 1, slots)  # nothing is generated from it: every round has a prompt of its own
    return cold[0], warm, thread_time() - started, reused


def _timed(runtime: Runtime, prompt: list[int], decoding: Decoding) -> tuple[_Times, int]:
    """Seconds and CPU seconds until the first token, and the number of reused tokens."""
    started = process_time()
    statistics = runtime.generate(prompt, decoding).statistics
    return (statistics.first_token_seconds, process_time() - started), statistics.cached_tokens


def prefix_report(results: Sequence[PrefixResult], message: int, threads: int) -> Report:
    """The results as a table."""
    columns = (
        *("history", "reused", "first token, ms", "with cache, ms", "ratio", "ratio of CPU time"),
        *("copy, ms", "ratio of the copy"),
    )
    rows = [
        (
            *(one.history, one.reused, one.cold_seconds * 1e3, one.warm_seconds * 1e3, f"{one.ratio:.3f}"),
            *(f"{one.cpu_ratio:.3f}", one.copy_seconds * 1e3, f"{one.copy_ratio:.4f}"),
        )
        for one in results
    ]
    settings = (f"Next turn of a chat with a message of {message} tokens",)
    data = {"threads": threads, "results": [asdict(one) for one in results]}
    return Report(settings, (Table("", columns, rows),), (), data)


@click.command("prefix")
@bundle_argument
@click.option(
    "--history", default="250,500,1000,1500", show_default=True, metavar="N,N,…", help="Tokens before the new message."
)
@click.option("--message", default=32, show_default=True, help="Tokens of the new message.")
@click.option("--rounds", default=5, show_default=True, help="Measurements of each length; medians are reported.")
@threads_option
@backend_option
@json_option("the results")
def command(bundle: Path, history: str, message: int, rounds: int, threads: int, backend: str, as_json: bool) -> None:
    """Time to the first token of a chat's next turn in BUNDLE, with and without a prefix cache."""
    lengths = parse_counts("--history", history)
    if min(message, rounds) < 1:
        raise OptionFault(f"--message is {message} and --rounds {rounds}: expected at least 1 of each")
    results = measure_prefixes(bundle, lengths, message, rounds, threads, backend)
    prefix_report(results, message, threads).show(as_json)
