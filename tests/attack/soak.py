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


def soak(bundle: Path, seed: int, budget: Budget) -> Outcome:
    """Clients that generate, stream, sample and score; three in ten of their requests are cancelled."""
    outcome, usage, stop, lock = Outcome("soak", seed), Usage(), threading.Event(), threading.Lock()
    started = time.monotonic()
    with Runtime.open(bundle, threads=1, max_seq_len=256, max_requests=_REQUESTS, step_costs="standard") as runtime:
        expected = runtime.generate("import json\n", Decoding(max_tokens=24, fork=False)).text

        def client(number: int) -> None:
            random = Random(seed * 100 + number)
            while not stop.is_set():
                result = _one(runtime, random, expected)
                with lock:
                    outcome.note("request", result, result != "wrong text")

        clients = [threading.Thread(target=client, args=(number,)) for number in range(_CLIENTS)]
        for thread in clients:
            thread.start()
        while time.monotonic() - started < budget.seconds and outcome.cases < budget.cases:
            time.sleep(max(1.0, budget.seconds / _SAMPLES))
            usage.sample(time.monotonic() - started)
        stop.set()
        for thread in clients:
            thread.join()
        end = time.monotonic() + 10
        while (status := runtime.status()).active_requests and time.monotonic() < end:
            time.sleep(0.02)
    if status.active_requests or status.kv_slots_used or status.queued_requests:
        outcome.failures.append(f"at the end: {status}")
    half = len(usage.files) // 2
    if usage.files[-1] > usage.files[half] + 2:
        outcome.failures.append("file descriptors grow")
    outcome.figures |= {
        "memory": f"{usage.mebibytes[-1]:.1f} MiB, slope {usage.slope():+.1f} MiB/h after warm-up",
        "file descriptors": f"{usage.files[half]} to {usage.files[-1]}",
        "OS threads": f"{usage.threads[half]} to {usage.threads[-1]}",
        "CPU time per request": f"{time.process_time() / max(1, outcome.cases) * 1e3:.1f} ms",
    }
    return outcome


def _one(runtime: Runtime, random: Random, expected: str) -> str:
    """The result of one request."""
    kind = random.random()
    if kind < 0.3:
        with runtime.stream("def f(a, b):\n", Decoding(max_tokens=96)) as stream:
            for _ in range(random.randrange(20)):
                next(stream, None)
        return "cancelled"
    if kind < 0.7:
        text = runtime.generate("import json\n", Decoding(max_tokens=24, fork=False)).text
        return "generated" if text == expected else "wrong text"
    if kind < 0.8:
        runtime.score("import json\nimport os\n", top=2)
        return "scored"
    sampling = Sampling(temperature=1.0, seed=random.randrange(10**6))
    prompt = "".join(random.choices("abcdefgh (),:\n", k=random.randrange(1, 150)))
    runtime.generate(prompt, Decoding(max_tokens=16, sampling=sampling, stop="\n\n", logprobs=3, max_total_tokens=40))
    return "sampled"
