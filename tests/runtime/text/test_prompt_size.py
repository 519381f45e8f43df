"""Prompt size: counting stops at the limit, also for values that share parts."""

from __future__ import annotations

from typing import Any

import pytest

from spaceport.runtime.text.prompt_size import characters_of, estimated_tokens


def test_characters_are_counted_until_there_are_too_many() -> None:
    shared: list[Any] = ["a"]
    for _ in range(40):  # 2**40 texts
        shared = [shared, shared]
    assert 100 < characters_of(shared, 100) < 200
    assert characters_of([{"role": "user", "content": "abc"}], 100) == 4 + 4 + 7 + 3 + 2


@pytest.mark.parametrize("content", [[1, "x" * 99], [""] * 99, [None] * 99, {"a": [0] * 99}], ids=str)
def test_no_value_of_a_message_goes_uncounted(content: object) -> None:
    assert characters_of([{"role": "user", "content": content}], 80) > 80


def test_tokens_are_estimated_from_characters_or_counted() -> None:
    assert estimated_tokens("a" * 400) == 100
    assert estimated_tokens([1] * 400) == 400
    assert estimated_tokens([{"role": "user", "content": "a" * 400}]) == 104
    assert estimated_tokens(([1] * 10, "a" * 400)) == 110
    assert [estimated_tokens(prompt) for prompt in (None, 5, [], b"abc")] == [0, 0, 0, 0]
