"""Prompts are read once and have a maximum number of items, whatever sequence they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.text.prompt import shown
from support.hash_engine import Language
from support.hash_runtime import hash_runtime

LANGUAGE = Language(3, end_every=10**9)


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


def test_an_endless_sequence_has_as_many_items_as_it_says() -> None:
    with hash_runtime(LANGUAGE) as runtime:
        expected = runtime.generate([1, 1, 1], Decoding(max_tokens=5)).tokens
        assert runtime.generate(Endless(1, 3), Decoding(max_tokens=5)).tokens == expected


@pytest.mark.parametrize(
    "prompt", [range(10**15), Endless(1, 10**12), Endless({"role": "user", "content": "a"}, 10**12)]
)
def test_a_prompt_with_too_many_items_is_refused_at_once(prompt: Any) -> None:
    with hash_runtime(LANGUAGE) as runtime:
        for use in (runtime.generate, runtime.score, runtime.tokens_of):
            with pytest.raises(
                OptionFault, match=r"the prompt has 10+ items: expected at most 1048576 token ids or mess"
            ):
                use(prompt)


def test_an_iterator_is_no_prompt_and_is_not_read() -> None:
    with hash_runtime(LANGUAGE) as runtime, pytest.raises(OptionFault, match="expected text, token ids or chat mess"):
        runtime.generate(repeat(1))  # type: ignore[arg-type]


def test_an_argument_is_quoted_with_few_characters() -> None:
    assert shown([1, 2]) == "[1, 2]"
    assert len(shown("a" * 10**7)) <= 60
    assert len(shown([1] * 10**7)) <= 60
