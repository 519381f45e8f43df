"""Grammar: constrained decoding with a regular expression or a JSON schema."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.isolation.pool import HelperPool
from spaceport.runtime.isolation.process import DeadlinePassed, JobFailed
from spaceport.runtime.sampling.vocabulary import Matcher, Vocabulary

# Whitespace between JSON tokens: none, a space, or a line break with indentation. If all whitespace were allowed, a weak
# model could generate whitespace for ever.
_SPACE = r" |\n {0,20}"
# Without this option llguidance forces tokens wherever the grammar allows only one continuation. It would force special
# tokens with the same spelling, and characters outside the grammar where the tokenizer normalizes text.
_OPTIONS = '%llguidance {"no_forcing": true}'
_EXAMPLE = '{"type": "object", "properties": {"name": {"type": "string"}}}'
_ADVICE = "expected a grammar that the model's tokens can match; use one that allows more at this position"
_MOST_COMPILED = 64  # compiled grammars that are stored
# Keywords of JSON schemas whose conditions are intersected, which may take exponential time.
_INTERSECTIONS = frozenset(
    (
        "allOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "patternProperties",
        "propertyNames",
        "dependentSchemas",
        "contains",
    )
)
_TEXT_RULES = frozenset(("pattern", "format", "minLength", "maxLength"))
_MOST_SHOWN = 60  # characters of a grammar or a text in an error message


class DeadEnd(OptionFault):
    """The grammar allows no token at a position where the text cannot end either."""


@dataclass(frozen=True)
class Grammar:
    """A regular expression or a JSON schema that the whole completion matches; give exactly one of them.

    - `regex`: Regular expression in the syntax of Rust's regex crate: no look-around, no back-references.
    - `json_schema`: JSON schema as a string or a mapping; properties are generated in the schema's order.
    """

    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    source: str = field(init=False, repr=False)  # the grammar in llguidance's syntax
    label: str = field(init=False, repr=False)  # the grammar as error messages name it
    depth: int = field(init=False, repr=False)  # nested groups of the expression, or objects and arrays of the schema

    def __post_init__(self) -> None:
        if (self.regex is None) == (self.json_schema is None):
            raise OptionFault("regex and json_schema are both given, or neither is: expected one of the two")
        schema: dict[str, Any] = {}
        if self.regex is not None:
            rule, label = _rule_of(self.regex), f"the regular expression {_shown(self.regex)}"
        else:
            schema = _schema_of(self.json_schema)
            rule = "start: %json " + json.dumps({"x-guidance": {"whitespace_pattern": _SPACE}, **schema})
            label = f"the JSON schema {_shown(json.dumps(schema))}"
        object.__setattr__(self, "source", f"{_OPTIONS}\n{rule}")
        object.__setattr__(self, "label", label)
        text = self.regex if self.regex is not None else json.dumps(schema)
        object.__setattr__(self, "depth", _depth(text, "(" if self.regex is not None else "{["))


def _rule_of(regex: str) -> str:
    if not isinstance(regex, str) or not regex:
        raise OptionFault(f"regex is {regex!r}: expected a regular expression of at least one character")
    signs = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # a rule is one line, and an unescaped / ends its expression
    escaped = re.sub(r"\\.|/|\n", lambda found: signs.get(found[0], found[0]), regex, flags=re.DOTALL)
    return f"start: TEXT\nTEXT: /{escaped}/"


def _schema_of(given: object) -> dict[str, Any]:
    try:
        plain = dict(given) if isinstance(given, Mapping) else given
        schema = json.loads(plain if isinstance(plain, str) else json.dumps(plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionFault(f"json_schema is not JSON: {error}: expected a schema such as {_EXAMPLE}") from error
    if not isinstance(schema, dict):
        raise OptionFault(f"json_schema is {_shown(json.dumps(schema))}: expected an object such as {_EXAMPLE}")
    return schema


def _depth(text: str, opening: str) -> int:
    """The deepest nesting of brackets in a text, an upper bound that also counts those that are quoted."""
    closing = opening.translate({ord("("): ")", ord("{"): "}", ord("["): "]"})
    depth = deepest = 0
    for sign in re.findall(f"[{re.escape(opening + closing)}]", text):
        depth = depth + 1 if sign in opening else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…")


@dataclass
class GrammarState:
    """The state of a grammar after the tokens of one thread; it can be rolled back."""

    vocabulary: Vocabulary
    matcher: Matcher
    tokens: list[int] = field(default_factory=list)
    masks: dict[int, NDArray[np.bool_]] = field(default_factory=dict)  # recent masks of allowed tokens, by token index
    chosen: int = 0  # number of tokens that are part of the completion; those after them are draft tokens

    def reach(self, text: list[int], settled: int) -> bool:
        """Move to the end of these tokens, of which the first `settled` never change; whether the grammar allows them."""
        same = min(len(self.tokens), len(text))
        while self.tokens[:same] != text[:same]:  # only draft tokens differ, and they are few
            same -= 1
        if undone := self.tokens[same:]:
            pieces = len(undone) if same else len(undone) - 1 + len(self._pieces(undone[0], first=True))
            self.matcher.rollback(pieces)
            del self.tokens[same:]
        self.masks = {index: mask for index, mask in self.masks.items() if settled <= index <= same}
        return all(self.advance(token) for token in text[same:])

    def advance(self, token: int) -> bool:
        """Move behind one more token; whether the grammar allows it."""
        pieces = self._pieces(token, first=not self.tokens)
        self.tokens.append(token)
        return self.matcher.consume_tokens(pieces)

    def allowed(self) -> NDArray[np.bool_]:
        """Mask of the tokens that may follow: V, True = allowed."""
        index = len(self.tokens)
        if index not in self.masks:
            self.masks[index] = self.vocabulary.allowed(self.matcher, first=not index)
        return self.masks[index]

    def _pieces(self, token: int, first: bool) -> list[int]:
        return self.vocabulary.openings.get(token, [token]) if first else [token]


@dataclass
class Constrained:
    """A token selector that limits another one to the tokens that a grammar allows.

    It serves one request. The grammar applies to the text of each thread, so a constrained request must not fork.
    """

    inner: TokenSelector
    grammar: Grammar
    vocabulary: Vocabulary
    start: Matcher  # before the first token of a thread
    states: dict[tuple[int, ...], GrammarState] = field(default_factory=dict)  # by the path of the thread
    scores: NDArray[np.float32] = field(init=False)  # V, reused for each token: a new array takes longer

    def __post_init__(self) -> None:
        self.scores = np.empty(self.vocabulary.text.size, np.float32)

    def token(self, logits: NDArray[np.float32], thread: Thread, ahead: Sequence[int]) -> int:
        text = [*thread.generated, *ahead]
        allowed = self._allowed(thread, text, ahead)
        token = self.inner.token(self._scores(logits, allowed), thread, ahead)
        if not allowed[token]:
            raise self._dead_end(thread, text, "all tokens that it allows are banned")
        if not self.vocabulary.ends[token]:
            state = self.states[thread.path]
            state.advance(token)
            state.chosen = len(state.tokens)
        return token

    def candidates(
        self, logits: NDArray[np.float32], thread: Thread, position: int, most: int
    ) -> tuple[Candidates, ...]:
        """The candidates of mask slots; behind the token that was chosen last, only those that the grammar allows."""
        found: list[Candidates] = []
        state = self.states.get(thread.path)
        if state is not None and thread.start + state.chosen == position:
            text = state.tokens[: state.chosen]
            while len(found) < len(logits) and state.reach(text, state.chosen) and (allowed := state.allowed()).any():
                scores = self._scores(logits[len(found)], allowed)
                found += self.inner.candidates(scores[None], thread, position + len(found), most)
                if not found[-1].tokens or self.vocabulary.ends[found[-1].tokens[0]]:
                    break
                text.append(found[-1].tokens[0])
            if state.matcher.is_error():
                del self.states[thread.path]
        if len(found) < len(logits):
            found += self.inner.candidates(logits[len(found) :], thread, position + len(found), most)
        return tuple(found)

    def _scores(self, logits: NDArray[np.float32], allowed: NDArray[np.bool_]) -> NDArray[np.float32]:
        self.scores.fill(-np.inf)
        np.copyto(self.scores, logits, where=allowed)
        return self.scores

    def _allowed(self, thread: Thread, text: list[int], ahead: Sequence[int]) -> NDArray[np.bool_]:
        if any(self.vocabulary.ends[token] for token in ahead):
            return self.vocabulary.ends  # a draft may go on behind the end token
        if thread.path not in self.states:
            self.states[thread.path] = GrammarState(self.vocabulary, self.start.deep_copy())
        state = self.states[thread.path]
        if state.reach(text, len(text) - len(ahead)) and (allowed := state.allowed()).any():
            return allowed
        del self.states[thread.path]  # a matcher that failed cannot be used again
        raise self._dead_end(thread, text, _reason(state.matcher))

    def _dead_end(self, thread: Thread, text: list[int], reason: str) -> DeadEnd:
        behind = self.vocabulary.tokenizer.decode(text)[-_MOST_SHOWN:]
        return DeadEnd(
            f"{self.grammar.label} allows no token at position {thread.start + len(text)}, after {behind!r}: {reason}: "
            f"{_ADVICE}"
        )


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


def is_simple(grammar: Grammar) -> bool:
    """Whether a grammar compiles soon: llguidance limits expressions, but not the intersections of JSON schemas."""
    if grammar.regex is not None:
        return True
    waiting: list[Any] = [json.loads(grammar.source.partition("%json ")[2])]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            if not _INTERSECTIONS.isdisjoint(schema) or len(_TEXT_RULES.intersection(schema)) > 1:
                return False
            waiting += schema.values()
        elif isinstance(schema, list):
            waiting += schema
    return True


def constrained(inner: TokenSelector, grammar: Grammar, vocabulary: Vocabulary) -> Constrained:
    """A token selector for one request, whose completion matches the grammar."""
    return GrammarCompiler(vocabulary).constrained(inner, grammar)


def _compiled(grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
    """The matcher of a grammar before the first token, after a check that it allows one."""
    start = vocabulary.matcher(grammar.source)
    if start.is_error():
        known = "Rust's regex crate" if grammar.regex is not None else "llguidance's JSON schemas"
        raise OptionFault(f"{grammar.label} cannot be used: {_reason(start)}: expected the syntax of {known}")
    trial = start.deep_copy()
    if not vocabulary.allowed(trial, first=True).any():
        raise DeadEnd(f"{grammar.label} allows no first token: {_reason(trial)}: {_ADVICE}")
    return start


def _reason(matcher: Matcher) -> str:
    """llguidance's error message, without the lines of the generated grammar that it quotes."""
    message = matcher.get_error().replace("<non-verbose/>", "")
    message = re.split(r"\n +\d+ \| ", re.sub(r"^(at )?\d+\(\d+\): ", "", message))[0]
    message = " ".join(re.sub(r"regex parse error:.*?error: ", "", message, flags=re.DOTALL).split())
    return "no token of the vocabulary fits" if message in ("", "NoExtensionBias") else message
