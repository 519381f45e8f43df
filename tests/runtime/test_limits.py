"""Limits: a request beyond a limit is refused before it is tokenized, with the limit that would allow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import repeat
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
from spaceport.runtime.text.prompt import shown
from spaceport.runtime.text.prompt_size import characters_of, estimated_tokens
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
    DEFAULT_LIMITS.check_decoding(Decoding(stop=["x" * 256] * 16, logprobs=20))
    with pytest.raises(OptionFault, match=message):
        DEFAULT_LIMITS.check_decoding(decoding)
    raised: dict[str, int] = {
        "stop_strings": 17,
        "stop_chars": 1000,
        "logprobs": 21,
        "bias_entries": 1025,
        "threads": 128,
    }
    more = {"banned_tokens": 1025, "fork_depth": 9, "grammar_chars": 100_000, "grammar_depth": 100}
    Limits(**raised, **more).check_decoding(decoding)


@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
def test_a_limit_is_a_whole_number(name: str) -> None:
    for value in (-1, 1.5, "4", True):
        with pytest.raises(OptionFault, match=f"{name} is {value!r}: expected a whole number of at least [01]"):
            Limits(**{name: value})  # type: ignore[arg-type]


def limited(**limits: int) -> Runtime:
    with hash_runtime(Language(3)) as like:
        return Runtime(like.bundle, like.engine, like.max_seq_len, limits=Limits(**limits))


class Endless(Sequence[Any]):
    """A sequence that yields the same item for ever, and says that it has a few."""

    def __init__(self, item: object, length: int) -> None:
        self.item, self.length = item, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.item

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.item)


PARTS = [{"type": "text", "text": "a" * 20}] * 3
TOO_LONG: list[tuple[object, dict[str, int], str]] = [
    ("a" * 41, {"prompt_chars": 40}, "the prompt has 41 characters or more: expected at most 40"),
    ([{"role": "user", "content": "a" * 41}], {"prompt_chars": 40}, "characters or more: expected at most 40"),
    ([{"role": "user", "content": PARTS}], {"prompt_chars": 40}, "characters or more: expected at most 40"),
    (list(range(6)), {"prompt_tokens": 5}, "the prompt has 6 items: expected at most 5"),
    ("abcdef", {"prompt_tokens": 5}, "the prompt has 6 tokens: expected at most 5; Limits.prompt_tokens"),
    ("a" + " " * 12_000_000 + "b", {}, "the prompt has 12000002 characters or more"),  # it is not tokenized
    (range(10**15), {}, r"the prompt has 10+ items: expected at most 1048576 token ids or mess"),
    (Endless(1, 10**12), {}, r"the prompt has 10+ items: expected at most 1048576 token ids or mess"),
    (
        Endless({"role": "user", "content": "a"}, 10**12),
        {},
        r"the prompt has 10+ items: expected at most 1048576 token",
    ),
    (repeat(1), {}, "expected text, token ids or chat mess"),  # an iterator is not read
]


@pytest.mark.parametrize(("prompt", "limits", "message"), TOO_LONG, ids=range(len(TOO_LONG)))
def test_a_long_prompt_is_refused_at_once(prompt: Any, limits: dict[str, int], message: str) -> None:
    with limited(**limits) as runtime:
        calls: list[Callable[[Any], object]] = [runtime.generate, runtime.stream, runtime.score, runtime.tokens_of]
        for call in calls:
            with pytest.raises(OptionFault, match=message):
                call(prompt)


def test_scores_are_limited_too() -> None:
    with limited(logprobs=2, prompt_chars=40) as runtime:
        with pytest.raises(OptionFault, match="top is 3: expected at most 2"):
            runtime.score("ab", top=3)
        with pytest.raises(OptionFault, match="the prompt has 41 characters or more"):
            runtime.score("a", "b" * 41)


def test_an_endless_sequence_has_as_many_items_as_it_says() -> None:
    with hash_runtime(Language(3, end_every=10**9)) as runtime:
        expected = runtime.generate([1, 1, 1], Decoding(max_tokens=5)).tokens
        assert runtime.generate(Endless(1, 3), Decoding(max_tokens=5)).tokens == expected


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


def test_characters_are_counted_until_there_are_too_many() -> None:
    shared: list[Any] = ["a"]
    for _ in range(40):  # 2**40 texts
        shared = [shared, shared]
    assert 100 < characters_of(shared, 100) < 200
    assert characters_of([{"role": "user", "content": "abc"}], 100) == 4 + 4 + 7 + 3 + 2
    for content in ([1, "x" * 99], [""] * 99, [None] * 99, {"a": [0] * 99}):
        assert characters_of([{"role": "user", "content": content}], 80) > 80


def test_tokens_are_estimated_from_characters_or_counted() -> None:
    assert estimated_tokens("a" * 400) == 100
    assert estimated_tokens([1] * 400) == 400
    assert estimated_tokens([{"role": "user", "content": "a" * 400}]) == 104
    assert estimated_tokens(([1] * 10, "a" * 400)) == 110
    assert [estimated_tokens(prompt) for prompt in (None, 5, [], b"abc")] == [0, 0, 0, 0]


def test_an_argument_is_quoted_with_few_characters() -> None:
    assert shown([1, 2]) == "[1, 2]"
    assert len(shown("a" * 10**7)) <= 60
    assert len(shown([1] * 10**7)) <= 60
