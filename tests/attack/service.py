"""Service: what quiet clients notice of each kind of stranger, and what that costs in memory."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from attack.outcome import Budget, Outcome
from attack.strangers import QUIET_PROMPT, STRANGERS, Target

_COMMAND = [sys.executable, "-c", "import sys; from spaceport.tools.cli import run; sys.exit(run(sys.argv[1:]))"]
_DESCRIPTORS = 256  # of the service, so that its connections end soon
_LONG = 1800.0  # seconds of a campaign from which on eight normal clients ask
_MOST_RATIO = 3.0  # of the 99th percentile of a request beside an attack to that alone, with one step more
_MOST_PEAK = 512.0  # MiB more than before an attack
_MOST_GROWTH = 1.1  # of the memory from the first half of the attacks to the last one
_JUDGED = 5.0  # seconds of an attack from which the times of requests are held
_REST = 1.5  # seconds after an attack until its memory is measured
_ASK = {"max_tokens": 24, "temperature": 0, "seed": 1}
_PROMPTS = ("import json\n", "def close(self):\n", "class Reader:\n", "for name in names:\n", QUIET_PROMPT)


def strangers(bundle: Path, seed: int, budget: Budget) -> list[Outcome]:
    """Quiet clients alone and beside each attack."""
    outcomes: list[Outcome] = []
    for keys in ("", "sk-right-one,sk-other"):
        names = [name for name, (_, _, has_keys) in STRANGERS.items() if has_keys == bool(keys)]
        with served(bundle, keys) as (target, process):
            step, clients = _seconds_of_a_step(target), 8 if budget.seconds >= _LONG else 1
            expected = {prompt: _answer(target, prompt) for prompt in _PROMPTS}
            memories = [memory_of(process)]
            for name in names:
                outcome = Outcome(name, seed, seconds=budget.seconds / len(STRANGERS))
                _attack(outcome, target, process, expected, step, clients, memories)
                outcomes.append(outcome)
            if budget.seconds >= _LONG and memories[-1] > _MOST_GROWTH * max(memories[: len(memories) // 2 + 1]):
                outcomes[-1].failures.append(f"memory grows: {memories} MiB")
    return outcomes


def _attack(
    outcome: Outcome,
    target: Target,
    process: int,
    expected: dict[str, str],
    step: float,
    clients: int,
    memories: list[float],
) -> None:
    """Measure quiet clients a quarter of the time alone, then beside an attack, whose peak of memory counts."""
    times = []
    Path(f"/proc/{process}/clear_refs").write_text("5")  # the peak is that of this attack
    command = [sys.executable, "-m", "attack.strangers", outcome.attack, f"http://{target.host}:{target.port}"]
    for share, attacking in ((0.25, False), (0.75, True)):
        attacker = (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=give_way) if attacking else None
        )
        with attacker or nullcontext():
            time.sleep(0.5 if attacker else 0)  # until it attacks
            until = time.monotonic() + share * outcome.seconds
            with ThreadPoolExecutor(clients) as pool:
                asked = [pool.submit(_ask_until, until, target, expected, outcome) for _ in range(clients)]
                times.append([seconds for each in asked for seconds in each.result()])
            if attacker:
                attacker.terminate()
                outcome.failures += attacker.communicate()[0].splitlines()[:3]
    peak = memory_of(process, "VmHWM")
    time.sleep(_REST)
    memories.append(memory_of(process))
    alone, beside = (float(np.percentile(one or [outcome.seconds], 99)) for one in times)
    outcome.figures = {
        "p99 alone": f"{alone:.2f} s",
        "beside": f"{beside:.2f} s",
        "longest": f"{max(times[1], default=outcome.seconds):.2f} s",
        "MiB": f"{memories[-2]:.0f}, peak {peak:.0f}, after {memories[-1]:.0f}",
    }
    if outcome.seconds >= _JUDGED and beside > _MOST_RATIO * alone + step:
        outcome.failures.append(f"p99 {beside:.2f} s beside it, {alone:.2f} s alone, a step {step:.2f} s")
    if peak > memories[-2] + _MOST_PEAK:
        outcome.failures.append(f"memory {memories[-2]:.0f} MiB before, {peak:.0f} MiB at the peak")


def _ask_until(until: float, target: Target, expected: dict[str, str], outcome: Outcome) -> list[float]:
    """The seconds of each request of a quiet client, which sends one after the other."""
    seconds: list[float] = []
    while time.monotonic() < until:
        prompt, began = _PROMPTS[len(seconds) % len(_PROMPTS)], time.perf_counter()
        try:
            text = _answer(target, prompt)
        except OSError as error:
            text = f"{type(error).__name__}: {error}"
        seconds.append(time.perf_counter() - began)
        right = text == expected[prompt]
        outcome.note(f"{prompt!r}: {text!r:.200}", "right" if right else "wrong text", right)
        time.sleep(0.01)
    return seconds


def _answer(target: Target, prompt: str) -> str:
    _, answer = target.ask({"prompt": prompt, **_ASK}, "sk-right-one")
    return str(answer["choices"][0]["text"] if "choices" in answer else answer)


def _seconds_of_a_step(target: Target) -> float:
    """The longest step: the prefill chunk of a long prompt, computed alone."""
    status, answer = target.ask({"prompt": [7] * 1000, "max_tokens": 1, "cache_salt": "step"}, "sk-right-one")
    assert status == 200, answer
    metrics = answer["metrics"]
    return float(metrics["time_to_first_token_ms"] - metrics["queue_time_ms"]) / 1e3 / (1000 / 128)


def memory_of(process: int, name: str = "VmRSS") -> float:
    """MiB of memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def give_way() -> None:
    os.nice(19)  # strangers have CPUs of their own


@contextmanager
def served(bundle: Path, keys: str = "", descriptors: int = _DESCRIPTORS) -> Iterator[tuple[Target, int]]:
    """A running service: its address and the id of its process; `descriptors` limits its open files, 0: as usual."""

    def limit_descriptors() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    command = [*_COMMAND, "serve", str(bundle), "--port", "0", "--threads", "1", "--step-costs", "standard"]
    environment = {**os.environ, "SPACEPORT_API_KEY": keys}
    with (
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=limit_descriptors
        ) as process,
        ThreadPoolExecutor(1) as reader,
    ):
        assert process.stderr is not None
        address = next(
            (found[1] for line in process.stderr if (found := re.search(r"running on (http://\S+)", line))), None
        )
        reader.submit(process.stderr.read)  # so that its log is never full
        try:
            assert address is not None, "the service did not start"
            target = Target(address)
            while target.ask({"prompt": "a", "max_tokens": 1}, "sk-right-one")[0] != 200:
                time.sleep(0.05)
            yield target, process.pid
        finally:
            process.kill()
