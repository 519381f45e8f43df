"""Grammar compiler: the token selector for a grammar; the last compiled grammars are stored."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.runtime.isolation.pool import HelperPool
from spaceport.runtime.isolation.process import DeadlinePassed, JobFailed
from spaceport.runtime.sampling.constrained import ADVICE, Constrained, DeadEnd, reason_of
from spaceport.runtime.sampling.grammar import Grammar, is_simple
from spaceport.runtime.sampling.vocabulary import Matcher, Vocabulary

_MOST_COMPILED = 64  # compiled grammars that are stored


class GrammarCompiler:
    """Compiled grammars of one vocabulary; the last ones are stored for further requests."""

    def __init__(self, vocabulary: Vocabulary, helper: HelperPool | None = None) -> None:
        self._vocabulary = vocabulary
        self._helper = helper  # compiles grammars first that may take long; None: they are compiled here
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._lock = Lock()

    def isolates(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled in a helper process first."""
        return self._helper is not None and grammar.source not in self._compiled and not is_simple(grammar)

    def constrained(self, inner: TokenSelector, grammar: Grammar, deadline: float | None = None) -> Constrained:
        """A token selector for one request, whose completion matches the grammar."""
        with self._lock:
            start = self._compiled.get(grammar.source)
            if start is not None:
                self._compiled.move_to_end(grammar.source)
        if start is None:
            if self._helper is not None and not is_simple(grammar):
                try:
                    self._helper.run("compile", deadline, grammar=grammar.source)
                except DeadlinePassed:
                    raise
                except JobFailed as error:
                    raise OptionFault(f"{grammar.label} cannot be used: {error}: expected a simpler grammar") from error
            start = _compiled(grammar, self._vocabulary)
            with self._lock:
                self._compiled[grammar.source] = start
                while len(self._compiled) > _MOST_COMPILED:
                    self._compiled.popitem(last=False)
        return Constrained(inner, grammar, self._vocabulary, start.deep_copy())


def constrained(inner: TokenSelector, grammar: Grammar, vocabulary: Vocabulary) -> Constrained:
    """A token selector for one request, whose completion matches the grammar."""
    return GrammarCompiler(vocabulary).constrained(inner, grammar)


def _compiled(grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
    """The matcher of a grammar before the first token, after a check that it allows one."""
    start = vocabulary.matcher(grammar.source)
    if start.is_error():
        known = "Rust's regex crate" if grammar.regex is not None else "llguidance's JSON schemas"
        known = "llguidance's Lark dialect and JSON schemas" if grammar.lark is not None else known
        raise OptionFault(f"{grammar.label} cannot be used: {reason_of(start)}: expected the syntax of {known}")
    trial = start.deep_copy()
    if not vocabulary.allowed(trial, first=True).any():
        raise DeadEnd(f"{grammar.label} allows no first token: {reason_of(trial)}: {ADVICE}")
    return start
