"""Service: what quiet clients notice of each kind of stranger, and what that costs in memory."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attack.outcome import Budget, Outcome
from attack.strangers import QUIET_PROMPT, STRANGERS, Target

_COMMAND = [sys.executable, "-c", "import sys; from spaceport.tools.cli import run; sys.exit(run(sys.argv[1:]))"]
_DESCRIPTORS = 256  # of the service, so that its connections end soon
_KEYS = "sk-right-one,sk-other"
_LONG = 1800.0  # seconds from which on eight normal clients ask, and the memory is held
_CLIENTS = 8
_MOST_RATIO = 3.0  # of the 99th percentile of a request beside an attack to that alone, with one step more
_MOST_GROWTH = 1.1  # of the memory in a long campaign
_MOST_PEAK = 512.0  # MiB more than before an attack
_JUDGED = 5.0  # seconds of an attack from which the times of requests are held
_REST = 1.5  # seconds after an attack until its memory is measured
_ASK = {"max_tokens": 24, "temperature": 0, "seed": 1}
_PROMPTS = ("import json\n", "def close(self):\n", "class Reader:\n", "for name in names:\n", QUIET_PROMPT)


@dataclass
class Quiet:
    """Normal clients, each of which sends one request after the other, over one connection or a new one each time."""

    target: Target
    expected: dict[str, str]
    key: str
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def run(self, until: Callable[[], bool], number: int = 0) -> None:
        """Ask until it is time to stop."""
        connection, count = self._connection(), number
        while not until():
            prompt, count = _PROMPTS[count % len(_PROMPTS)], count + 1
            began = time.perf_counter()
            try:
                text = self.ask(connection, prompt)
                if text != self.expected[prompt]:
                    self.wrong.append(f"{prompt!r}: {text!r:.200}")
                self.seconds.append(time.perf_counter() - began)
            except (OSError, http.client.HTTPException) as error:  # an idle connection may have made room for others
                if count % 2:
                    self.wrong.append(f"{type(error).__name__}: {error}")
            if count % 2 == 0:
                connection.close()
                connection = self._connection()
            time.sleep(0.01)
        connection.close()

    def ask(self, connection: http.client.HTTPConnection, prompt: str) -> str:
        """The text of an answer, or its error."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt, **_ASK}), headers)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return str(answer["choices"][0]["text"]) if "choices" in answer else json.dumps(answer)

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.target.host, self.target.port, timeout=120)


def _give_way() -> None:
    os.nice(19)  # strangers have CPUs of their own


def _limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))


@contextmanager
def _served(bundle: Path, keys: str) -> Iterator[tuple[Target, int]]:
    """A running service: its address and the id of its process."""
    command = [*_COMMAND, "serve", str(bundle), "--port", "0", "--threads", "1", "--step-costs", "standard"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SPACEPORT_API_KEY": keys},
        preexec_fn=_limit_descriptors,
    )
    assert process.stderr is not None
    address = next(
        (found[1] for line in process.stderr if (found := re.search(r"running on (http://\S+)", line))), None
    )
    threading.Thread(target=process.stderr.read, daemon=True).start()  # so that its log is never full
    try:
        assert address is not None, "the service did not start"
        target = Target(address)
        while target.ask({"prompt": "a", "max_tokens": 1}, "sk-right-one")[0] != 200:
            time.sleep(0.05)
        yield target, process.pid
    finally:
        process.kill()
        process.communicate()


def _memory(process: int, name: str = "VmRSS") -> float:
    """MiB of memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def _seconds_of_a_step(target: Target) -> float:
    """The longest step: the prefill chunk of a long prompt, computed alone."""
    status, answer = target.ask({"prompt": [7] * 1000, "max_tokens": 1, "cache_salt": "step"}, "sk-right-one")
    assert status == 200, answer
    metrics = answer["metrics"]
    return float(metrics["time_to_first_token_ms"] - metrics["queue_time_ms"]) / 1e3 / (1000 / 128)


def _measured(quiet: Quiet, seconds: float, clients: int, during: list[str]) -> tuple[list[float], list[str]]:
    """The seconds of each request of quiet clients beside a process, and what that process says."""
    quiet.seconds = []
    until = time.monotonic() + seconds
    process = subprocess.Popen(during, stdout=subprocess.PIPE, text=True, preexec_fn=_give_way) if during else None
    time.sleep(0.5 if during else 0)  # until it attacks
    threads = [
        threading.Thread(target=quiet.run, args=(lambda: time.monotonic() > until, number)) for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if process is None:
        return quiet.seconds, []
    process.terminate()
    return quiet.seconds, process.communicate()[0].splitlines()


def strangers(bundle: Path, seed: int, budget: Budget, names: list[str] | None = None) -> list[Outcome]:
    """Quiet clients alone and beside each attack."""
    chosen = [name for name in STRANGERS if names is None or name in names]
    clients = _CLIENTS if budget.seconds >= _LONG else 1
    rounds = max(1, round(budget.seconds / 600)) if clients > 1 else 1
    outcomes: list[Outcome] = []
    for keys in sorted({STRANGERS[name][2] for name in chosen}):
        group = [name for name in chosen if STRANGERS[name][2] == keys]
        share = budget.seconds * len(group) / len(chosen)
        with _served(bundle, _KEYS if keys else "") as (target, process):
            outcomes += _attacks(target, process, seed, group, rounds, share / (rounds * len(group)), clients)
    return outcomes


def _attacks(
    target: Target, process: int, seed: int, names: list[str], rounds: int, seconds: float, clients: int
) -> Iterator[Outcome]:
    """The outcome of each attack on one service, with this time for each; the memory is held from the second round on."""
    quiet = Quiet(target, {}, "sk-right-one")
    for prompt in _PROMPTS:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=120)
        quiet.expected[prompt] = quiet.ask(connection, prompt)
        connection.close()
    step, usual = _seconds_of_a_step(target), 0.0
    for number, name in enumerate(names * rounds):
        outcome = Outcome(name, seed)
        before = _memory(process)
        alone, _ = _measured(quiet, seconds / 4, clients, [])
        Path(f"/proc/{process}/clear_refs").write_text("5")  # the peak is that of this attack
        command = [sys.executable, "-m", "attack.strangers", name, f"http://{target.host}:{target.port}"]
        beside, said = _measured(quiet, 3 * seconds / 4, clients, command)
        peak = _memory(process, "VmHWM")
        time.sleep(_REST)
        after = _memory(process)
        usual = max(usual, after) if number < len(names) else usual
        p99 = [float(np.percentile(times or [seconds], 99)) for times in (alone, beside)]
        outcome.cases, outcome.seconds = len(alone) + len(beside), seconds
        outcome.figures = {
            "p99 alone": f"{p99[0]:.2f} s",
            "beside": f"{p99[1]:.2f} s",
            "longest": f"{max(beside or [seconds]):.2f} s",
            "MiB": f"{before:.0f}, peak {peak:.0f}, after {after:.0f}",
            "wrong texts": str(len(quiet.wrong)),
        }
        outcome.failures += [*said[:3], *quiet.wrong]
        if seconds >= _JUDGED and p99[1] > _MOST_RATIO * p99[0] + step:
            outcome.failures.append(f"p99 {p99[1]:.2f} s beside it, {p99[0]:.2f} s alone, a step {step:.2f} s")
        if peak > before + _MOST_PEAK:
            outcome.failures.append(f"memory {before:.0f} MiB before, {peak:.0f} MiB at the peak")
        if after > _MOST_GROWTH * usual:
            outcome.failures.append(f"memory {usual:.0f} MiB in the first round, {after:.0f} MiB after this attack")
        quiet.wrong = []
        yield outcome
