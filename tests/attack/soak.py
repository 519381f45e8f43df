"""Soak: eight clients with mixed requests to a service, with strangers beside them; texts stay right, and memory stays."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from attack.outcome import Budget, Outcome
from attack.service import give_way, memory_of, served
from attack.strangers import STRANGERS, TEXT, Target

_CLIENTS = 8
_CYCLES = 4  # of all strangers, so that each quarter of the time has all of them
_MOST_GROWTH = 1.03  # of the median of the memory from the second quarter of the time to the last one
_JUDGED = 300.0  # seconds of a soak from which on the memory is held
_SAMPLES = 720
_DESCRIPTORS = 8  # that may be open at the end besides those of the beginning
_BUSY = (429, 503)
_IDLE = 30.0  # seconds in which a service ends what strangers have left
_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"


class Call(NamedTuple):
    """A request with the same answer each time: its path and body, and what of the answer is compared."""

    path: str
    body: dict[str, Any]
    compared: Callable[[Any], object] = lambda answer: answer["choices"]


def _chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 32, "temperature": 0, **fields}


def _text(prompt: str | list[int] | list[str], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}


_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_SAMPLED = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
CALLS: dict[str, Call] = {
    "completion": Call(_COMPLETIONS, _text("import json\n")),
    "long prompt": Call(_COMPLETIONS, _text([7 + number % 400 for number in range(600)], max_tokens=4)),
    "several prompts": Call(_COMPLETIONS, _text(["class Reader:\n", "def close(self):\n"])),
    "sampled": Call(_COMPLETIONS, _text(TEXT, **_SAMPLED, n=3)),
    "stop string": Call(_COMPLETIONS, _text("for name in names:\n", stop=["\n\n", ")"])),
    "scored": Call(_COMPLETIONS, _text(TEXT, echo=True, max_tokens=1, logprobs=3)),
    "grammar": Call(
        _CHAT,
        _chat("An object", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}),
    ),
    "chat": Call(_CHAT, _chat("Explain the parameters of move( src, dst )", max_tokens=96)),
    "sampled chat": Call(_CHAT, _chat("move( a )", **_SAMPLED, logprobs=True, top_logprobs=2)),
    "response": Call(
        "/v1/responses",
        {"input": "move( a )", "max_output_tokens": 24, "temperature": 0},
        lambda answer: [item.get("content") for item in answer["output"]],
    ),
    "tokens": Call("/tokenize", {"prompt": TEXT}, lambda answer: answer["tokens"]),
    "invalid": Call(_CHAT, _chat("a", temperature=-1), lambda answer: answer["error"]["message"]),
}


def soak(bundle: Path, seed: int, budget: Budget) -> Outcome:
    """Clients compare each answer with that of the same request alone; a stream in four is cancelled meanwhile."""
    outcome, lock = Outcome("soak", seed), threading.Lock()
    with served(bundle, descriptors=0) as (target, process):
        expected = {name: _answer(target, call) for name, call in CALLS.items()}
        for name, (status, compared) in expected.items():
            assert status == (400 if name == "invalid" else 200), f"{name}: {status} {compared}"
        files, until = _descriptors(process), time.monotonic() + budget.seconds

        def client(number: int) -> None:
            random = Random(f"{seed} {number}")
            while time.monotonic() < until:
                name = random.choice(["cancelled", *CALLS])
                found = _cancelled(target, random) if name == "cancelled" else _answered(target, CALLS[name])
                result, fine = "cancelled" if name == "cancelled" else "right", True
                if name != "cancelled" and found != expected[name]:
                    fine = isinstance(found, tuple) and found[0] in _BUSY
                    result = "refused while busy" if fine else "wrong"
                with lock:
                    outcome.note(f"{name}: {found!r:.300}", result, fine)
                if result == "refused while busy":
                    time.sleep(0.1)

        with _strangers(target, budget.seconds, outcome), ThreadPoolExecutor(_CLIENTS) as pool:
            clients = [pool.submit(client, number) for number in range(_CLIENTS)]
            memory = list(_memory_until(until, process, budget.seconds / _SAMPLES))
            for one in clients:
                one.result()
        _check_end(outcome, target, process, files, expected)
        _check_memory(outcome, memory, budget.seconds)
    return outcome


def _answered(target: Target, call: Call) -> object:
    try:
        return _answer(target, call)
    except (OSError, http.client.HTTPException, ValueError) as error:  # of a service that has ended, or half an answer
        return f"{type(error).__name__}: {error}"


def _answer(target: Target, call: Call) -> tuple[int, object]:
    """The status of an answer and what is compared of it."""
    status, answer = target.ask(call.body, path=call.path)
    return status, answer if status in _BUSY else call.compared(answer)


def _cancelled(target: Target, random: Random) -> object:
    """Read the beginning of a stream, then close the connection."""
    content = json.dumps(_chat(TEXT, stream=True, max_tokens=200, **_SAMPLED)).encode()
    try:
        with target.posted(len(content), content, path=_CHAT) as connection:
            return len(connection.recv(random.choice((1, 1 << 8, 1 << 12))))
    except OSError as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def _strangers(target: Target, seconds: float, outcome: Outcome) -> Iterator[None]:
    """One kind of stranger after the other, each in a process of its own, until the block ends."""
    ended = threading.Event()
    names = [name for name, (_, _, has_keys) in STRANGERS.items() if not has_keys]

    def attack() -> None:
        while True:
            for name in names:
                command = [sys.executable, "-m", "attack.strangers", name, f"http://{target.host}:{target.port}"]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=give_way) as attacker:
                    ended.wait(seconds / (_CYCLES * len(names)))
                    attacker.terminate()
                    outcome.failures += [f"{name}: {line}" for line in attacker.communicate()[0].splitlines()[:3]]
                if ended.is_set():
                    return

    with ThreadPoolExecutor(1) as pool:
        attacking = pool.submit(attack)
        try:
            yield
        finally:
            ended.set()
            attacking.result()


def _memory_until(until: float, process: int, pause: float) -> Iterator[float]:
    """MiB of memory of a process, again and again."""
    while time.monotonic() < until:
        yield memory_of(process)
        time.sleep(pause)


def _descriptors(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))  # noqa: PTH208  (open files, not a folder)


def _check_end(
    outcome: Outcome, target: Target, process: int, files: int, expected: dict[str, tuple[int, object]]
) -> None:
    """Fail unless the service answers as in the beginning, and nothing of the requests before is left."""
    end = time.monotonic() + _IDLE
    while (load := target.load()) and any(load[name] for name in ("running", "waiting", "kv_slots_used")):
        if time.monotonic() > end:
            outcome.failures.append(f"at the end: {load}")
            break
        time.sleep(0.1)
    for name, call in CALLS.items():
        if (found := _answered(target, call)) != expected[name]:
            outcome.failures.append(f"{name} at the end: {found!r:.300}")
    left = _descriptors(process)
    outcome.figures["open files"] = f"{files}, at the end {left}"
    if left > files + _DESCRIPTORS:
        outcome.failures.append(f"{files} open files, {left} at the end")


def _check_memory(outcome: Outcome, memory: list[float], seconds: float) -> None:
    quarter = len(memory) // 4
    before, after = (float(np.median(part)) for part in (memory[quarter : 2 * quarter + 1], memory[-quarter - 1 :]))
    outcome.figures["memory"] = f"{before:.0f} MiB in the second quarter, {after / before - 1:+.1%} in the last one"
    outcome.figures["at the peak"] = f"{max(memory):.0f} MiB"
    if seconds >= _JUDGED and after > _MOST_GROWTH * before:
        outcome.failures.append(f"memory grows: {before:.0f} MiB, later {after:.0f} MiB")
