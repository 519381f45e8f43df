"""Prompt size: counting stops at the limit, also for values that share parts."""

from __future__ import annotations

from typing import Any

from spaceport.runtime.text.prompt_size import characters_of


def test_characters_are_counted_until_there_are_too_many() -> None:
    shared: list[Any] = ["a"]
    for _ in range(40):  # 2**40 texts
        shared = [shared, shared]
    assert 100 < characters_of(shared, 100) < 200
    assert characters_of([{"role": "user", "content": "abc"}], 100) == 4 + 4 + 7 + 3 + 2
