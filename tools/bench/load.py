"""Load: how many tokens a second several texts at once get, and how long each of them waits, by places on the engine.

All texts are asked for at the same moment. With one place they are written one by one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt


@dataclass(frozen=True)
class LoadRequest:
    """A text to ask for."""

    prompt: Prompt
    decoding: Decoding


@dataclass(frozen=True)
class Served:
    """What became of one."""

    tokens: int
    first_seconds: float  # until its first piece came
    seconds: float  # until it was done


@dataclass(frozen=True)
class Rush:
    """All of them, asked for at once."""

    served: list[Served]
    seconds: float
    processor_seconds: float  # of all of the process: what others do on the machine is not in it

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.served)


@dataclass(frozen=True)
class Load:
    """What became of them with so many places, in the median of the rounds."""

    places: int
    tokens_per_second: float
    ratio: float  # to the first number of places
    tokens_per_processor_second: float
    processor_ratio: float
    first_p50: float  # seconds until the first piece came
    first_p95: float
    whole_p50: float  # seconds until a text was done
    whole_p95: float


def random_requests(count: int, context: int, decoding: Decoding) -> list[LoadRequest]:
    """Prompts of half to one and a half times so many tokens, drawn from the first 200 of a vocabulary."""
    random = np.random.default_rng(0)
    lengths = random.integers(max(1, context // 2), context * 3 // 2 + 1, count)
    return [LoadRequest(random.integers(0, 200, length).tolist(), decoding) for length in lengths]


def given_requests(prompts: Sequence[Prompt], count: int, decoding: Decoding) -> list[LoadRequest]:
    """These prompts, again and again."""
    return [LoadRequest(prompts[number % len(prompts)], decoding) for number in range(count)]


def serve(runtime: Runtime, request: LoadRequest) -> Served:
    """Ask for a text and read it to its end."""
    started = perf_counter()
    first = None
    with runtime.stream(request.prompt, request.decoding) as stream:
        for _ in stream:
            first = first or perf_counter() - started
        found = stream.completion()
    seconds = perf_counter() - started
    return Served(len(found.tokens), first or seconds, seconds)


def rush(bundle: Path, places: int, load_requests: Sequence[LoadRequest], threads: int, max_seq_len: int) -> Rush:
    """All of them at once, on a runtime with so many places."""
    opened = Runtime.open(
        bundle, max_requests=places, max_seq_len=max_seq_len, queue_limit=len(load_requests), threads=threads
    )
    with opened as runtime, ThreadPoolExecutor(len(load_requests)) as clients:
        list(clients.map(lambda request: serve(runtime, request), load_requests[:places]))  # warms up
        started, computed = perf_counter(), process_time()
        served = list(clients.map(lambda request: serve(runtime, request), load_requests))
        return Rush(served, perf_counter() - started, process_time() - computed)


def compare(
    bundle: Path,
    counts: Sequence[int],
    load_requests: Sequence[LoadRequest],
    threads: int,
    max_seq_len: int,
    rounds: int,
) -> list[Load]:
    """The numbers of places taken in turn in every round, so that they share the machine's moods."""
    rushes: dict[int, list[Rush]] = {places: [] for places in counts}
    for _ in range(rounds):
        for places in counts:
            rushes[places].append(rush(bundle, places, load_requests, threads, max_seq_len))
    return [load_of(places, found, rushes[counts[0]]) for places, found in rushes.items()]


def load_of(places: int, rushes: Sequence[Rush], least: Sequence[Rush]) -> Load:
    """Medians over the rounds; latencies of the texts of all rounds together."""
    rate, processor_rate = rates(rushes)
    least_rate, least_processor_rate = rates(least)
    first = [one.first_seconds for found in rushes for one in found.served]
    whole = [one.seconds for found in rushes for one in found.served]
    return Load(
        places,
        rate,
        rate / least_rate,
        processor_rate,
        processor_rate / least_processor_rate,
        *np.quantile(first, (0.5, 0.95)).tolist(),
        *np.quantile(whole, (0.5, 0.95)).tolist(),
    )


def rates(rushes: Sequence[Rush]) -> tuple[float, float]:
    """Tokens a second and tokens a second of the processor."""
    return (
        statistics.median(found.tokens / found.seconds for found in rushes),
        statistics.median(found.tokens / found.processor_seconds for found in rushes),
    )
