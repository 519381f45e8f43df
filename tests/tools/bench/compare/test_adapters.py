"""Adapters: the answers of other runtimes are the same with and without their prompt lookup."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.tools.bench.compare.adapters import on_llama_cpp
from spaceport.tools.bench.compare.adapters.worker import adapter_at
from spaceport.tools.bench.compare.subjects import ADAPTERS
from support.paths import TINY

pytestmark = pytest.mark.on_change()
PROMPT = [5, 6, 7, 5, 6, 7, 5]


@pytest.mark.slow
@pytest.mark.torch
def test_transformers_answers_alike_with_and_without_prompt_lookup() -> None:
    adapter = adapter_at(str(ADAPTERS / "on_transformers.py"))
    runner = adapter.open_runner({"model": str(TINY), "threads": 1, "length": 64})
    plain, lookup = (runner.answer(PROMPT, 12, [], drafts) for drafts in (0, 10))
    assert plain["tokens"] == lookup["tokens"]
    assert len(plain["tokens"]) == 12
    assert plain["first_tokens"] == 1 <= lookup["first_tokens"]
    for answer in (plain, lookup):
        assert 0 < answer["first_token_seconds"] < answer["seconds"]
    ended = runner.answer(PROMPT, 12, [plain["tokens"][3]], 0)
    assert ended["tokens"] == plain["tokens"][: plain["tokens"].index(plain["tokens"][3]) + 1]


class _Context:
    """A cache of tokens and a model whose next token depends on all of them."""

    def __init__(self) -> None:
        self.cached: list[int] = []
        self.calls = 0
        self._rows: list[int] = []  # cached tokens up to each row of the last call

    def feed(self, rows: list[on_llama_cpp.Row]) -> None:
        self.calls += 1
        self._rows = []
        for token, position, _, _ in rows:
            assert position == len(self.cached), "a row at this position overwrites nothing and leaves no gap"
            self.cached.append(token)
            self._rows.append(position + 1)

    def best(self, row: int) -> int:
        return following(self.cached[: self._rows[row]])

    def forget(self, begin: int = 0) -> None:
        del self.cached[begin:]


def following(tokens: list[int]) -> int:
    """The next token: a hash of all tokens, among few so that drafts are often right."""
    return sum((index + 1) * token for index, token in enumerate(tokens)) % 5


def answer_of(drafts: Callable[[int], list[int]], tokens: int, ends: set[int]) -> tuple[list[int], int]:
    """The answer with these drafts, and the number of calls."""
    runner = on_llama_cpp.Runner.__new__(on_llama_cpp.Runner)
    context = _Context()
    runner.single = context  # type: ignore[assignment]
    runner._following = lambda _, count: drafts(count)  # type: ignore[method-assign]
    found = runner.answer(PROMPT, tokens, list(ends), 4)
    return found["tokens"], context.calls


@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=12), st.integers(1, 12), st.sets(st.integers(0, 4)))
def test_llama_cpp_answers_alike_with_any_drafts(drafts: list[list[int]], tokens: int, ends: set[int]) -> None:
    plain, calls = answer_of(lambda count: [], tokens, ends)
    given = iter(drafts)
    found, _ = answer_of(lambda count: next(given, [])[: max(0, count)], tokens, ends)
    assert found == plain
    assert calls == len(plain)
    assert len(plain) == tokens or plain[-1] in ends
