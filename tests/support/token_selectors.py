"""Selectors: greedy selection and constrained decoding of single tests."""

from __future__ import annotations

from collections.abc import Collection

from spaceport.runtime.decode.sequence import TokenSelector
from spaceport.runtime.sampling.choice import Bans, Greedy
from spaceport.runtime.sampling.grammar import Constrained, Grammar, GrammarCompiler, Vocabulary


def greedy(banned: Collection[int] = ()) -> Greedy:
    """Greedy selection with banned tokens."""
    return Greedy(Bans(frozenset(banned)))


def constrained(inner: TokenSelector, grammar: Grammar, vocabulary: Vocabulary) -> Constrained:
    """A token selector for one request, whose completion matches the grammar."""
    return GrammarCompiler(vocabulary).constrained(inner, grammar)
