"""Fork bombs: a request with many threads and stop strings, and the gaps between the tokens of its neighbour."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from random import Random

from attack.outcome import Budget, Outcome
from attack.requests import percentile
from spaceport.runtime import Decoding, Limits, Runtime, Sampling

_STOPS = 100
_REPEATS = 8  # of the neighbour's request in a case, so that a fork bomb has time to fork
_LIMITS = Limits(threads=64, fork_depth=64, stop_strings=_STOPS, stop_chars=1000)  # the defaults refuse such requests
_PROMPT = "import json\n"
_NEIGHBOUR = Decoding(max_tokens=64, fork=False)
_QUESTION = [{"role": "user", "content": "Explain the parameters of move( source, target, copy, force )"}]


def fork_bombs(bundle: Path, seed: int, budget: Budget) -> Outcome:
    """Stream a neighbour alone and beside fork bombs; its text must stay the same."""
    outcome = Outcome("fork bombs", seed)
    quiet: list[float] = []
    beside: list[float] = []
    threads: list[int] = []
    with Runtime.open(bundle, threads=1, max_seq_len=1024, max_requests=2, limits=_LIMITS) as runtime:
        expected = runtime.generate(_PROMPT, _NEIGHBOUR).text
        for number in budget.numbers():
            for _ in range(_REPEATS):
                _gaps(runtime, quiet)
            stop = threading.Event()
            bomb = threading.Thread(target=_bomb, args=(runtime, Random(f"{seed} {number}"), stop, threads))
            bomb.start()
            try:
                right = {_gaps(runtime, beside) for _ in range(_REPEATS)} == {expected}
            finally:
                stop.set()
                bomb.join()
            outcome.note(str(number), "right text" if right else "wrong text", right)
    for name, gaps in (("alone", quiet), ("beside a fork bomb", beside)):
        outcome.figures[f"token gap {name}"] = f"p50 {percentile(gaps, 50)}, longest {percentile(gaps, 100)}"
    outcome.figures["fork bombs"] = f"{len(threads)} with up to {max(threads)} threads"
    return outcome


def _gaps(runtime: Runtime, gaps: list[float]) -> str:
    """Stream the neighbour; returns its text and adds the seconds between its tokens."""
    last, text = time.perf_counter(), ""
    for piece in runtime.stream(_PROMPT, _NEIGHBOUR):
        now = time.perf_counter()
        gaps.append(now - last)
        last, text = now, text + piece.reading
    return text


def _bomb(runtime: Runtime, random: Random, stop: threading.Event, threads: list[int]) -> None:
    """Requests that fork as much as they can, one after the other; adds the number of threads of each."""
    tokens = runtime.bundle.manifest.tokens
    while not stop.is_set():
        stops = [f"{number} " + "ab" * random.randrange(100, 490) for number in range(_STOPS)]
        bias = {tokens.fork or 0: random.choice((5.0, 6.0, 100.0))}
        sampling = Sampling(temperature=1.0, seed=random.randrange(10**6), logit_bias=bias, banned=tokens.end)
        decoding = Decoding(max_tokens=256, max_depth=64, max_threads=64, stop=stops, timeout=10, sampling=sampling)
        with runtime.stream(_QUESTION, decoding) as stream:
            for _ in stream:
                if stop.is_set():
                    break
            threads.append(stream.statistics.threads)
