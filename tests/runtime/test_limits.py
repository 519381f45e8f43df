"""Limits: a request beyond a limit is refused before it is tokenized, with the limit that would allow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.limits import DEFAULT_LIMITS, Limits
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.queue import QueueFull
from spaceport.runtime.session import Runtime
from support.hash_engine import Language
from support.hash_runtime import hash_runtime
from support.stepwise_engine import StepwiseEngine, close_between_steps

NESTED: dict[str, Any] = {"type": "string"}
for _ in range(70):
    NESTED = {"type": "array", "items": NESTED}

REFUSED: list[tuple[Decoding, str]] = [
    (Decoding(stop=["x"] * 17), "stop has 17 stop strings: expected at most 16; Limits.stop_strings=…. allows more"),
    (Decoding(stop=["x" * 1000] * 16), "a stop string has 1000 characters: expected at most 256; Limits.stop_chars"),
    (Decoding(logprobs=21), "logprobs is 21: expected at most 20; Limits.logprobs"),
    (Decoding(sampling=Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))), "logit_bias has 1025 entries"),
    (Decoding(sampling=Sampling(banned=range(1025))), "banned has 1025 entries: expected at most 1024"),
    (Decoding(max_threads=33), "max_threads is 33: expected at most 32; Limits.threads"),
    (Decoding(max_depth=9), "max_depth is 9: expected at most 8; Limits.fork_depth"),
    (Decoding(grammar=Grammar(regex="a" * 70_000)), r"the grammar has 700\d\d characters: expected at most 65536"),
    (Decoding(grammar=Grammar(regex="(" * 70 + "a" + ")" * 70)), "the grammar has 70 nested levels"),
    (Decoding(grammar=Grammar(json_schema=NESTED)), "the grammar has 71 nested levels: expected at most 64"),
]


@pytest.mark.parametrize(("decoding", "message"), REFUSED)
def test_options_beyond_the_defaults_are_refused(decoding: Decoding, message: str) -> None:
    with pytest.raises(OptionFault, match=message):
        DEFAULT_LIMITS.check_decoding(decoding)


def test_a_raised_limit_allows_more() -> None:
    raised = Limits(
        stop_strings=17, stop_chars=1000, logprobs=21, bias_entries=1025, banned_tokens=1025, threads=128, fork_depth=9,
        grammar_chars=100_000, grammar_depth=100,
    )  # fmt: skip
    for decoding, _ in REFUSED:
        raised.check_decoding(decoding)


def test_the_defaults_of_a_completion_are_allowed() -> None:
    DEFAULT_LIMITS.check_decoding(Decoding())
    DEFAULT_LIMITS.check_decoding(Decoding(stop=["x" * 256] * 16, logprobs=20))


@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
@pytest.mark.parametrize("value", [-1, 1.5, "4", True])
def test_a_limit_is_a_whole_number(name: str, value: object) -> None:
    with pytest.raises(OptionFault, match=f"{name} is {value!r}: expected a whole number of at least [01]"):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_limits_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        DEFAULT_LIMITS.stop_chars = 5  # type: ignore[misc]


def limited(**limits: int) -> Runtime:
    with hash_runtime(Language(3)) as like:
        return Runtime(like.bundle, like.engine, like.max_seq_len, limits=Limits(**limits))


TOO_LONG: list[tuple[object, str]] = [
    ("a" * 41, "the prompt has 41 characters or more: expected at most 40"),
    ([{"role": "user", "content": "a" * 41}], "characters or more: expected at most 40"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a" * 20}] * 3}],
        "characters or more: expected at most 40",
    ),
    (list(range(6)), "the prompt has 6 items: expected at most 5"),
    ("abcdef", "the prompt has 6 tokens: expected at most 5; Limits.prompt_tokens"),
]


@pytest.mark.parametrize(("prompt", "message"), TOO_LONG)
def test_a_long_prompt_is_refused(prompt: Any, message: str) -> None:
    with limited(prompt_chars=40, prompt_tokens=5) as runtime:
        calls: list[Callable[[Any], object]] = [runtime.generate, runtime.stream, runtime.score, runtime.tokens_of]
        for call in calls:
            with pytest.raises(OptionFault, match=message):
                call(prompt)
        with pytest.raises(OptionFault, match="the prompt has 41 characters or more"):
            runtime.score("a", "b" * 41)


def test_a_long_prompt_is_not_tokenized() -> None:
    with limited() as runtime, pytest.raises(OptionFault, match="the prompt has 12000002 characters or more"):
        runtime.generate("a" + " " * 12_000_000 + "b")


def test_log_probabilities_of_given_text_are_limited() -> None:
    with limited(logprobs=2) as runtime, pytest.raises(OptionFault, match="top is 3: expected at most 2"):
        runtime.score("ab", top=3)


def test_prompt_tokens_of_waiting_requests_are_limited() -> None:
    with hash_runtime(Language(3, end_every=10**9)) as like:
        engine = StepwiseEngine(Language(3, end_every=10**9), like.engine.capacity, 1)
        runtime = Runtime(like.bundle, engine, like.max_seq_len, limits=Limits(queued_prompt_tokens=10))
    running = runtime.stream([1, 2, 3])
    engine.wait()
    waiting = [runtime.stream([1] * 20)]  # a single one may be longer
    with pytest.raises(QueueFull, match="have 21 prompt tokens, queued_prompt_tokens is 10: try again later, or raise"):
        runtime.stream([1])
    close_between_steps(runtime, engine)
    del running, waiting


def test_an_absurd_number_of_cpu_threads_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(OptionFault, match="threads is 999: expected 0 "):
        Runtime.open(tiny_bundle, threads=999)
