"""Service: what clients of it notice of strangers, of each kind alone and of all of them for long, and what memory that costs."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from attack.outcome import Budget, Outcome, memory_of, open_files_of
from attack.strangers import COMPLETIONS, QUIET_PROMPT, STRANGERS, TEXT, Target

_COMMAND = [sys.executable, "-c", "import sys; from spaceport.tools.cli import run; sys.exit(run(sys.argv[1:]))"]
_KEY = "sk-right-one"
_DESCRIPTORS = 256  # of the service beside one kind of stranger, so that its connections end soon
_LONG = 1800.0  # seconds of a campaign from which on eight quiet clients ask
_MOST_RATIO = 3.0  # of the 99th percentile of a request beside an attack to that alone, with one step more
_MOST_PEAK = 512.0  # MiB more than before an attack
_MOST_GROWTH = 1.1  # of the memory from the first half of the attacks to the last one
_JUDGED = 5.0  # seconds of an attack from which the times of requests are held
_REST = 1.5  # seconds after an attack until its memory is measured

_SOAKING = 8  # clients
_CYCLES = 4  # of all strangers, so that each quarter of a soak has all of them
_MOST_SOAKED = 1.03  # growth of the median of the memory from the second quarter of a soak to the last one
_SOAK_JUDGED = 300.0  # seconds of a soak from which on the memory is held
_SAMPLES = 720
_LEFT = 8  # descriptors that may be open after a soak besides those of its beginning
_BUSY = (429, 503)
_IDLE = 30.0  # seconds in which a service ends what strangers have left


class Call(NamedTuple):
    """A request with the same answer each time: its body and path, and what of the answer is compared."""

    body: dict[str, Any]
    path: str = COMPLETIONS
    compared: Callable[[Any], object] = lambda answer: answer["choices"]


def _text(prompt: str | list[int] | list[str], **fields: Any) -> Call:
    return Call({"prompt": prompt, "max_tokens": 24, "temperature": 0, "seed": 1, **fields})


def _chat(text: str, **fields: Any) -> Call:
    messages = [{"role": "user", "content": text}]
    return Call({"messages": messages, "max_tokens": 32, "temperature": 0, **fields}, "/v1/chat/completions")


_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_SAMPLED = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
QUIET = {
    prompt: _text(prompt)
    for prompt in ("import json\n", "def close(self):\n", "class Reader:\n", "for name in names:\n", QUIET_PROMPT)
}
MIXED = {
    "completion": _text("import json\n"),
    "long prompt": _text([7 + number % 400 for number in range(600)], max_tokens=4),
    "several prompts": _text(["class Reader:\n", "def close(self):\n"]),
    "sampled": _text(TEXT, **_SAMPLED, n=3),
    "stop string": _text("for name in names:\n", stop=["\n\n", ")"]),
    "scored": _text(TEXT, echo=True, max_tokens=1, logprobs=3),
    "grammar": _chat(
        "An object", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
    ),
    "chat": _chat("Explain the parameters of move( src, dst )", max_tokens=96),
    "sampled chat": _chat("move( a )", **_SAMPLED, logprobs=True, top_logprobs=2),
    "response": Call(
        {"input": "move( a )", "max_output_tokens": 24, "temperature": 0},
        "/v1/responses",
        lambda answer: [item.get("content") for item in answer["output"]],
    ),
    "tokens": Call({"prompt": TEXT}, "/tokenize", lambda answer: answer["tokens"]),
    "invalid": _chat("a", temperature=-1)._replace(compared=lambda answer: answer["error"]["message"]),
}


def strangers(bundle: Path, seed: int, budget: Budget) -> list[Outcome]:
    """Quiet clients alone and beside each attack."""
    outcomes: list[Outcome] = []
    for keys in ("", f"{_KEY},sk-other"):
        names = [name for name, (_, _, has_keys) in STRANGERS.items() if has_keys == bool(keys)]
        with served(bundle, keys) as (target, process):
            step, clients = _seconds_of_a_step(target), 8 if budget.seconds >= _LONG else 1
            expected = _expected(target, QUIET)
            memories = [memory_of(process)]
            for name in names:
                outcome, seconds = Outcome(name, seed), budget.seconds / len(STRANGERS)
                _attack(outcome, seconds, target, process, expected, step, clients, memories)
                outcomes.append(outcome)
            if budget.seconds >= _LONG and memories[-1] > _MOST_GROWTH * max(memories[: len(memories) // 2 + 1]):
                outcomes[-1].failures.append(f"memory grows: {memories} MiB")
    return outcomes


def _attack(
    outcome: Outcome,
    seconds: float,
    target: Target,
    process: int,
    expected: dict[str, object],
    step: float,
    clients: int,
    memories: list[float],
) -> None:
    """Measure quiet clients a quarter of the time alone, then beside an attack, whose peak of memory counts."""

    def client(until: float) -> list[float]:
        took: list[float] = []
        while time.monotonic() < until:
            name, began = [*QUIET][len(took) % len(QUIET)], time.perf_counter()
            _ask(outcome, target, name, QUIET[name], expected)
            took.append(time.perf_counter() - began)
            time.sleep(0.01)
        return took

    times = []
    Path(f"/proc/{process}/clear_refs").write_text("5")  # the peak is that of this attack
    for share, attack in ((0.25, nullcontext()), (0.75, _attacker(outcome.attack, target, outcome))):
        with attack, ThreadPoolExecutor(clients) as pool:
            time.sleep(0.5 if times else 0)  # until it attacks
            until = time.monotonic() + share * seconds
            times.append([took for each in pool.map(client, [until] * clients) for took in each])
    peak = memory_of(process, "VmHWM")
    time.sleep(_REST)
    memories.append(memory_of(process))
    alone, beside = (float(np.percentile(one or [seconds], 99)) for one in times)
    outcome.figures = {
        "p99 alone": f"{alone:.2f} s",
        "beside": f"{beside:.2f} s",
        "longest": f"{max(times[1], default=seconds):.2f} s",
        "MiB": f"{memories[-2]:.0f}, peak {peak:.0f}, after {memories[-1]:.0f}",
    }
    if seconds >= _JUDGED and beside > _MOST_RATIO * alone + step:
        outcome.failures.append(f"p99 {beside:.2f} s beside it, {alone:.2f} s alone, a step {step:.2f} s")
    if peak > memories[-2] + _MOST_PEAK:
        outcome.failures.append(f"memory {memories[-2]:.0f} MiB before, {peak:.0f} MiB at the peak")


def soak(bundle: Path, seed: int, budget: Budget) -> Outcome:
    """Eight clients with mixed requests, some of them cancelled, beside one kind of stranger after the other."""
    outcome, memory = Outcome("soak", seed), list[float]()
    with served(bundle, descriptors=0) as (target, process), ThreadPoolExecutor(_SOAKING) as pool:
        expected = _expected(target, MIXED)
        files, until = open_files_of(process), time.monotonic() + budget.seconds

        def client(number: int) -> None:
            random = Random(f"{seed} {number}")
            while time.monotonic() < until:
                name = random.choice(["cancelled", *MIXED])
                if name == "cancelled":
                    _cancel(target, random)
                    outcome.note(name, name, True)
                elif not _ask(outcome, target, name, MIXED[name], expected, may_be_busy=True):
                    time.sleep(0.1)

        clients = pool.map(client, range(_SOAKING))
        names = [name for name, (_, _, has_keys) in STRANGERS.items() if not has_keys] * _CYCLES
        for number, name in enumerate(names, 1):
            with _attacker(name, target, outcome):
                while time.monotonic() < until - budget.seconds * (1 - number / len(names)):
                    memory.append(memory_of(process))
                    time.sleep(budget.seconds / _SAMPLES)
        list(clients)  # raises what they have raised
        end = time.monotonic() + _IDLE
        while any((load := target.load())[name] for name in ("running", "waiting", "kv_slots_used")):
            if time.monotonic() > end:
                outcome.failures.append(f"at the end: {load}")
                break
            time.sleep(0.1)
        for name, call in MIXED.items():
            _ask(outcome, target, name, call, expected)
        left = open_files_of(process)
    outcome.figures["open files"] = f"{files}, at the end {left}"
    if left > files + _LEFT:
        outcome.failures.append(f"{files} open files, {left} at the end")
    quarter = len(memory) // 4
    before, after = (float(np.median(part)) for part in (memory[quarter : 2 * quarter + 1], memory[-quarter - 1 :]))
    outcome.figures["memory"] = f"{before:.0f} MiB in the second quarter, {after / before - 1:+.1%} in the last one"
    outcome.figures["at the peak"] = f"{max(memory):.0f} MiB"
    if budget.seconds >= _SOAK_JUDGED and after > _MOST_SOAKED * before:
        outcome.failures.append(f"memory grows: {before:.0f} MiB, later {after:.0f} MiB")
    return outcome


def _expected(target: Target, calls: dict[str, Call]) -> dict[str, object]:
    """The answers to calls, each asked alone."""
    expected = {}
    for name, call in calls.items():
        status, answer = target.ask(call.body, _KEY, call.path)
        assert status == (400 if name == "invalid" else 200), f"{name}: {status} {answer}"
        expected[name] = call.compared(answer)
    return expected


def _ask(
    outcome: Outcome, target: Target, name: str, call: Call, expected: dict[str, object], may_be_busy: bool = False
) -> bool:
    """Ask a call and note whether its answer is right; returns whether the service answered."""
    try:
        status, answer = target.ask(call.body, _KEY, call.path)
        found = answer if status in _BUSY else call.compared(answer)
    except (
        OSError,
        http.client.HTTPException,
        ValueError,
        LookupError,
    ) as error:  # a service that ended, half an answer
        status, found = 0, f"{type(error).__name__}: {error}"
    busy = may_be_busy and status in _BUSY
    right = not busy and found == expected[name]
    result = "refused while busy" if busy else "right" if right else "wrong answer"
    outcome.note(f"{name!r}: {found!r:.300}", result, right or busy)
    return not busy


def _cancel(target: Target, random: Random) -> None:
    """Read the beginning of a stream, then close the connection."""
    call = _chat(TEXT, stream=True, max_tokens=200, **_SAMPLED)
    content = json.dumps(call.body).encode()
    try:
        with target.posted(len(content), content, path=call.path) as connection:
            connection.recv(random.choice((1, 1 << 8, 1 << 12)))
    except OSError:  # closed by the service, which is busy
        pass


@contextmanager
def _attacker(name: str, target: Target, outcome: Outcome) -> Iterator[None]:
    """A kind of stranger, in a process of its own, until the end of the block."""
    command = [sys.executable, "-m", "attack.strangers", name, f"http://{target.host}:{target.port}"]
    # strangers have CPUs of their own
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(19)) as attacker:
        try:
            yield
        finally:
            attacker.terminate()
            outcome.failures += [f"{name}: {line}" for line in attacker.communicate()[0].splitlines()[:3]]


def _seconds_of_a_step(target: Target) -> float:
    """The longest step: the prefill chunk of a long prompt, computed alone."""
    status, answer = target.ask({"prompt": [7] * 1000, "max_tokens": 1, "cache_salt": "step"}, _KEY)
    assert status == 200, answer
    metrics = answer["metrics"]
    return float(metrics["time_to_first_token_ms"] - metrics["queue_time_ms"]) / 1e3 / (1000 / 128)


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
            while target.ask({"prompt": "a", "max_tokens": 1}, _KEY)[0] != 200:
                time.sleep(0.05)
            yield target, process.pid
        finally:
            process.kill()
