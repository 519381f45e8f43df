"""Soak: full load with cancellations, and what grows meanwhile: memory, file descriptors, OS threads, KV slots."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np

from attack.outcome import Budget, Outcome
from spaceport.runtime import Decoding, Runtime, Sampling

_REQUESTS = 4
_CLIENTS = 6  # two more than decode at the same time
_WARM_UP = 0.25  # share of the time
_SAMPLES = 720  # of a long soak; the lists of more samples would themselves be growth that is measured


def _usage() -> tuple[float, int, int]:
    """MiB of memory, open files and OS threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  (open files, not a folder)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, threading.active_count()


def _slope(seconds: list[float], mebibytes: list[float]) -> float:
    """Growth of the memory after the warm-up, MiB per hour: the line through the samples."""
    kept = [pair for pair in zip(seconds, mebibytes, strict=True) if pair[0] >= _WARM_UP * seconds[-1]]
    return float(np.polyfit(*zip(*kept, strict=True), 1)[0]) * 3600 if len(kept) > 2 else 0.0


def soak(bundle: Path, seed: int, budget: Budget) -> Outcome:
    """Clients that generate, stream, sample and score; three in ten of their requests are cancelled."""
    outcome, stop, lock = Outcome("soak", seed), threading.Event(), threading.Lock()
    started, seconds, usage = time.monotonic(), list[float](), list[tuple[float, int, int]]()
    with Runtime.open(bundle, threads=1, max_seq_len=256, max_requests=_REQUESTS, step_costs="standard") as runtime:
        expected = runtime.generate("import json\n", Decoding(max_tokens=24, fork=False)).text

        def client(number: int) -> None:
            random = Random(seed * 100 + number)
            while not stop.is_set():
                result = _one(runtime, random, expected)
                with lock:
                    outcome.note("request", result, result != "wrong text")

        with ThreadPoolExecutor(_CLIENTS) as pool:
            clients = [pool.submit(client, number) for number in range(_CLIENTS)]
            while time.monotonic() - started < budget.seconds and outcome.cases < budget.cases:
                time.sleep(max(1.0, budget.seconds / _SAMPLES))
                seconds.append(time.monotonic() - started)
                usage.append(_usage())
            stop.set()
        for one in clients:
            one.result()
        end = time.monotonic() + 10
        while (status := runtime.status()).active_requests and time.monotonic() < end:
            time.sleep(0.02)
    if status.active_requests or status.kv_slots_used or status.queued_requests:
        outcome.failures.append(f"at the end: {status}")
    (_, files, threads), (memory, last_files, last_threads) = usage[len(usage) // 2], usage[-1]
    if last_files > files + 2:
        outcome.failures.append("file descriptors grow")
    slope = _slope(seconds, [each for each, _, _ in usage])
    outcome.figures |= {
        "memory": f"{memory:.1f} MiB, slope {slope:+.1f} MiB/h after warm-up",
        "file descriptors": f"{files} to {last_files}",
        "OS threads": f"{threads} to {last_threads}",
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
