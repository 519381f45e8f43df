"""Soak: full load with cancellations, and what grows meanwhile: memory, file descriptors, OS threads, KV slots."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from attack.outcome import Budget, Outcome
from spaceport.runtime import Decoding, Runtime, Sampling

_REQUESTS = 4
_CLIENTS = 6  # two more than decode at the same time
_WARM_UP = 0.25  # share of the time
_SAMPLES = 720  # of a long soak; the lists of more samples would themselves be growth that is measured
_PARTS = 3  # of the time, whose latencies are compared
_BINS = np.geomspace(1e-4, 1e3, 701)  # seconds; 3 % between two edges


@dataclass
class Usage:
    """What the process uses, sampled over time."""

    seconds: list[float] = field(default_factory=list)
    mebibytes: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def sample(self, now: float) -> None:
        """Add a sample."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.seconds.append(now)
        self.mebibytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
        self.files.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208  (open files, not a folder)
        self.threads.append(threading.active_count())

    def slope(self) -> float:
        """Growth of the memory after the warm-up, MiB per hour: the line through the samples."""
        first = next(i for i, seconds in enumerate(self.seconds) if seconds >= _WARM_UP * self.seconds[-1])
        if len(self.seconds) - first < 3:
            return 0.0
        return float(np.polyfit(self.seconds[first:], self.mebibytes[first:], 1)[0]) * 3600


class Latencies:
    """Seconds of requests and CPU seconds of the process in each third of the time, in memory that does not grow."""

    def __init__(self, seconds: float) -> None:
        self._part = seconds / _PARTS  # seconds
        self._counts = np.zeros((_PARTS, len(_BINS) + 1), np.int64)
        self._began = time.monotonic()
        self.cpu = np.zeros(_PARTS)  # CPU seconds at the end of each part, of the whole process
        self.requests = np.zeros(_PARTS, np.int64)  # cancelled ones included

    def note(self, seconds: float | None) -> None:
        """Count a request, which has no latency if it was cancelled."""
        part = min(_PARTS - 1, int((time.monotonic() - self._began) / self._part))
        self.cpu[part] = time.process_time()
        self.requests[part] += 1
        if seconds is not None:
            self._counts[part, np.searchsorted(_BINS, seconds)] += 1

    def percentile(self, part: int, percent: float) -> float:
        """Seconds within which this share of a part's requests ended."""
        sums = np.cumsum(self._counts[part])
        return float(_BINS[min(len(_BINS) - 1, int(np.searchsorted(sums, sums[-1] * percent / 100)))])

    def figures(self) -> dict[str, str]:
        """Latency and CPU time per request in the first and in the last part."""
        if not self.requests.all():
            return {}
        first, last = ("p50 {:.1f}, p99 {:.1f} ms".format(*self._milliseconds(part)) for part in (0, _PARTS - 1))
        cpu = np.diff(self.cpu) / self.requests[1:] * 1e3
        return {
            "latency": f"{first} in the first third, {last} in the last",
            "CPU time per request": f"{cpu[0]:.1f} ms in the second third, {cpu[-1]:.1f} ms in the last",
        }

    def _milliseconds(self, part: int) -> tuple[float, float]:
        return self.percentile(part, 50) * 1e3, self.percentile(part, 99) * 1e3


def soak(bundle: Path, seed: int, budget: Budget) -> Outcome:
    """Clients that generate, stream, sample and score; three in ten of their requests are cancelled."""
    outcome, usage, stop = Outcome("soak", seed), Usage(), threading.Event()
    lock, latencies = threading.Lock(), Latencies(budget.seconds)
    started = time.monotonic()
    with Runtime.open(bundle, threads=1, max_seq_len=256, max_requests=_REQUESTS, step_costs="standard") as runtime:
        expected = runtime.generate("import json\n", Decoding(max_tokens=24, fork=False)).text

        def client(number: int) -> None:
            random = Random(seed * 100 + number)
            while not stop.is_set():
                result, seconds = _one(runtime, random, expected)
                with lock:
                    outcome.note("request", result, result != "wrong text")
                    latencies.note(seconds)

        clients = [threading.Thread(target=client, args=(number,)) for number in range(_CLIENTS)]
        for thread in clients:
            thread.start()
        while time.monotonic() - started < budget.seconds and outcome.cases < budget.cases:
            time.sleep(max(1.0, budget.seconds / _SAMPLES))
            usage.sample(time.monotonic() - started)
        stop.set()
        for thread in clients:
            thread.join()
        _wait_until_idle(runtime)
        status = runtime.status()
    if status.active_requests or status.kv_slots_used or status.queued_requests:
        outcome.failures.append(f"at the end: {status}")
    _report(outcome, usage, latencies)
    return outcome


def _one(runtime: Runtime, random: Random, expected: str) -> tuple[str, float | None]:
    """One request: its result, and its seconds if it was not cancelled."""
    kind, began = random.random(), time.monotonic()
    if kind < 0.3:
        with runtime.stream("def f(a, b):\n", Decoding(max_tokens=96)) as stream:
            for _ in range(random.randrange(20)):
                next(stream, None)
        return "cancelled", None
    if kind < 0.7:
        text = runtime.generate("import json\n", Decoding(max_tokens=24, fork=False)).text
        return ("generated" if text == expected else "wrong text"), time.monotonic() - began
    if kind < 0.8:
        runtime.score("import json\nimport os\n", top=2)
        return "scored", None
    length = random.randrange(1, 150)
    sampling = Sampling(temperature=1.0, seed=random.randrange(10**6))
    prompt = "".join(random.choices("abcdefgh (),:\n", k=length))
    runtime.generate(prompt, Decoding(max_tokens=16, sampling=sampling, stop="\n\n", logprobs=3, max_total_tokens=40))
    return "sampled", None


def _wait_until_idle(runtime: Runtime) -> None:
    for _ in range(500):
        if not runtime.status().active_requests:
            return
        time.sleep(0.02)


def _report(outcome: Outcome, usage: Usage, latencies: Latencies) -> None:
    half = len(usage.files) // 2
    outcome.figures |= {
        "memory": f"{usage.mebibytes[-1]:.1f} MiB, slope {usage.slope():+.1f} MiB/h after warm-up",
        "file descriptors": f"{usage.files[half]} to {usage.files[-1]}",
        "OS threads": f"{usage.threads[half]} to {usage.threads[-1]}",
    }
    outcome.figures |= latencies.figures()
    if usage.files[-1] > usage.files[half] + 2:
        outcome.failures.append("file descriptors grow")
