"""Requests: hostile ones beside normal ones, whose texts must stay right; what they leave, and what grows."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from attack.outcome import Budget, Outcome, memory_of, open_files_of
from spaceport.runtime import Decoding, Grammar, Limits, Prompt, Runtime, Sampling, SpaceportError

_HOSTILE = 4
_PATIENCE = 60.0  # seconds of a case on a busy machine; a limit of the runtime ends it long before
_LIMITS = Limits(threads=64, fork_depth=64, stop_strings=100, stop_chars=1000)  # the defaults refuse fork bombs
_SAMPLES = 720  # of memory; more in a list would themselves be growth that is measured
_PROMPTS = ("import json\n", "def close(self):\n", "class Reader:\n", "for name in names:\n")
_PLAIN = Decoding(max_tokens=32, fork=False)

Hostile = Callable[[Runtime, Random], object]


def hostile_requests(bundle: Path, seed: int, budget: Budget) -> Outcome:
    """Normal clients beside hostile ones: texts are right, errors have types, and nothing is left at the end."""
    outcome = Outcome("hostile requests", seed)
    numbers, lock, ended = budget.numbers(), threading.Lock(), threading.Event()
    longest, used = [(0.0, "none")], [_usage()]

    def attack() -> None:
        while True:
            with lock:
                if (number := next(numbers, None)) is None:
                    return
            random, began = Random(f"{outcome.seed} {number}"), time.monotonic()
            name = random.choice([*HOSTILE])
            result, fine = _result(runtime, HOSTILE[name], random)
            took = time.monotonic() - began
            longest.append((took, name))
            outcome.note(f"{number} {name}, {took:.0f} s", result, fine and took < _PATIENCE)
            with lock:
                if began - used[-1].seconds > budget.seconds / _SAMPLES:
                    used.append(_usage())

    def normal(prompt: str) -> None:
        while not ended.is_set():
            text = "".join(piece.reading for piece in runtime.stream(prompt, _PLAIN))
            right = text == expected[prompt]
            outcome.note(f"normal request {prompt!r}: {text!r}", "right" if right else "wrong text", right)

    options: dict[str, Any] = {"max_seq_len": 512, "max_requests": len(_PROMPTS) + _HOSTILE, "limits": _LIMITS}
    with Runtime.open(bundle, threads=1, **options) as runtime:
        expected = {prompt: runtime.generate(prompt, _PLAIN).text for prompt in _PROMPTS}
        with ThreadPoolExecutor(options["max_requests"]) as pool:
            clients = pool.map(normal, _PROMPTS)
            try:
                list(pool.map(lambda _: attack(), range(_HOSTILE)))  # raises what they have raised
            finally:
                ended.set()
            list(clients)
        end = time.monotonic() + 10
        while (status := runtime.status()).active_requests and time.monotonic() < end:
            time.sleep(0.02)
        if status.active_requests or status.kv_slots_used or status.queued_requests or not status.healthy:
            outcome.failures.append(f"at the end: {status}")
    outcome.figures["longest"] = "{:.1f} s ({})".format(*max(longest))
    middle, last = used[len(used) // 2], used[-1]
    if last.files > middle.files + 2 * _HOSTILE:
        outcome.failures.append(f"{middle.files} open files, later {last.files}")
    growth = last.mebibytes - middle.mebibytes
    outcome.figures["memory"] = f"{last.mebibytes:.1f} MiB, {growth:+.1f} in the second half"
    outcome.figures["at the end"] = f"{last.files} open files"
    return outcome


class Usage(NamedTuple):
    """What this process uses."""

    seconds: float  # time.monotonic()
    mebibytes: float
    files: int


def _usage() -> Usage:
    return Usage(time.monotonic(), memory_of(os.getpid()), open_files_of(os.getpid()))


def _result(runtime: Runtime, hostile: Hostile, random: Random) -> tuple[str, bool]:
    try:
        hostile(runtime, random)
    except SpaceportError as error:
        return f"refused {type(error).__name__}", True
    except BaseException as error:  # noqa: BLE001  (what the campaign looks for)
        return f"untyped {type(error).__name__}: {str(error)[:100]}", False
    return "ended", True


Schema = dict[str, Any]


def _nested(depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


_EXPRESSIONS = [{"pattern": f"^.{{0,{number + 2}}}(a|b){{1,{3 * number + 5}}}$"} for number in range(30)]
_SCHEMAS: list[Schema] = [
    *({"type": "string", keyword: _EXPRESSIONS} for keyword in ("allOf", "oneOf")),
    {"type": "string", "not": {"anyOf": _EXPRESSIONS}},
    *(_nested(60), _nested(300)),
    {"enum": ["x" * 100 + str(number) for number in range(10_000)]},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 5},
    {"patternProperties": {f"^(a|b){{{n}}}": {"type": "null"} for n in range(500)}},
    {"anyOf": [{"type": "object", "properties": {f"p{n}": {}}} for n in range(1000)]},
    {"type": "integer", "multipleOf": 10**30 + 57, "minimum": 10**300},
]
_REGEXES = [
    *("((a{1,100}){1,100}){1,100}", "a{1,100000}", "|".join(f"word{number}" for number in range(5000))),
    *("(" * 60 + "a" + ")*" * 60, "(" * 1000 + "a" + ")" * 1000, "(\\w|\\W|\\p{L}){0,200}\\d{50}", "(a|b)*a(a|b){18}"),
]


def _options(random: Random) -> Decoding:
    """One option with a value that is wrong, or of another type."""
    name = random.choice(("max_tokens", "stop", "timeout", "max_depth", "draft", "logprobs", "grammar", "sampling"))
    values: list[Any] = [-1, 10**30, "x" * 10**5, None, True, [], float("nan"), {"a": 1}, object(), 10**4]
    return Decoding(**{"timeout": 3, name: random.choice(values)})


def _grammar(random: Random) -> Grammar:
    """One that takes long to compile, or some of the schemas in one."""
    kind, chosen = random.random(), random.sample(_SCHEMAS, random.randrange(2, 4))
    if kind < 0.3:
        return Grammar(regex=random.choice(_REGEXES))
    together = {random.choice(("allOf", "anyOf", "oneOf", "prefixItems")): chosen}
    return Grammar(json_schema=chosen[0] if kind < 0.7 else together)


def _fork_bomb(runtime: Runtime, random: Random) -> object:
    """As many forks as the limits allow, with many stop strings."""
    tokens = runtime.bundle.manifest.tokens
    stop = [f"{number} " + "ab" * random.randrange(100, 490) for number in range(random.choice((0, 100, 1000)))]
    bias = {tokens.fork or 0: random.choice((0.0, 5.0, 6.0, 100.0))}
    sampling = Sampling(temperature=1.0, seed=random.randrange(10**6), logit_bias=bias, banned=tokens.end)
    depth = random.choice((1, 8, 64))
    decoding = Decoding(max_tokens=256, max_depth=depth, max_threads=64, stop=stop, timeout=3, sampling=sampling)
    return runtime.generate([{"role": "user", "content": "Explain the parameters of move( src, dst )"}], decoding)


def _invalid_prompt(runtime: Runtime, random: Random) -> object:
    prompts: list[Any] = [b"x", 5, None, "", [], [10**9], [-1], [True], [1, "a"], "\ud800", iter([1]), {"a": 1}, [{}]]
    prompts += [[{"role": "user", "content": value}] for value in (None, 5, "\0", "x" * 10**5)]
    prompts.append([{"role": "<s>", "content": "</s><s>[Fork][Child]" * 20}])
    return runtime.generate(random.choice(prompts), Decoding(max_tokens=4))


def _cancelled(runtime: Runtime, prompt: Prompt, seconds: float) -> object:
    stream = runtime.stream(prompt, Decoding(max_tokens=96))
    time.sleep(seconds)
    stream.close()
    return stream.completion()


_FOUR = Decoding(max_tokens=4)
HOSTILE: dict[str, Hostile] = {
    "long text": lambda runtime, random: runtime.generate("a" + " " * random.choice((10, 10**4, 10**6)) + "b", _FOUR),
    "long prompt": lambda runtime, random: runtime.generate([7] * random.randrange(300, 600), _FOUR),
    "invalid option": lambda runtime, random: runtime.generate("x", _options(random)),
    "short deadline": lambda runtime, random: runtime.generate("x", Decoding(timeout=random.uniform(1e-9, 0.05))),
    "slow grammar": lambda runtime, random: runtime.generate(
        "x", Decoding(max_tokens=8, grammar=_grammar(random), fork=False, timeout=20)
    ),
    "fork bomb": _fork_bomb,
    "invalid prompt": _invalid_prompt,
    "cancelled prompt": lambda runtime, random: _cancelled(runtime, list(range(300)), random.uniform(0, 0.05)),
    "scoring": lambda runtime, random: runtime.score(
        "x" * random.choice((1, 300)), random.choice(("y", None, "", [5]))
    ),
}
