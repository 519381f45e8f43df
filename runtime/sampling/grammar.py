"""Grammar: what a text has to be like, token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.draft import Guess
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.sampling.vocabulary import Matcher, Vocabulary

# Between the parts of a JSON text: nothing, a space, or a new line and its indentation. A weak model that may write any
# white space writes nothing else.
_SPACE = r" |\n {0,20}"
# The library would otherwise force tokens of its own where a text can go on in one way only: special tokens that are
# spelt alike, and other characters than the grammar's where the tokenizer normalizes.
_OPTIONS = '%llguidance {"no_forcing": true}'
_EXAMPLE = '{"type": "object", "properties": {"name": {"type": "string"}}}'
_ADVICE = "expected a form that the model's tokens can write; ask for one that allows more there"
_MOST_SHOWN = 60  # characters of a form or a text in a message


class DeadEnd(OptionFault):
    """A text that can neither go on nor end as it is asked for."""


@dataclass(frozen=True)
class Form:
    """What is asked of a whole text: that it matches a regular expression, or is JSON that fits a schema."""

    regex: str | None = None  # Rust's kind: no look-around, no back-references
    json_schema: str | Mapping[str, Any] | None = None  # properties are written in the schema's order
    grammar: str = field(init=False, repr=False)  # the same for the library
    name: str = field(init=False, repr=False)  # the same in a message

    def __post_init__(self) -> None:
        if (self.regex is None) == (self.json_schema is None):
            raise OptionFault("regex and json_schema are both given, or neither is: expected one of the two")
        if self.regex is not None:
            rule, name = _rule_of(self.regex), f"the regular expression {_shown(self.regex)}"
        else:
            schema = _schema_of(self.json_schema)
            rule = "start: %json " + json.dumps({"x-guidance": {"whitespace_pattern": _SPACE}, **schema})
            name = f"the JSON schema {_shown(json.dumps(schema))}"
        object.__setattr__(self, "grammar", f"{_OPTIONS}\n{rule}")
        object.__setattr__(self, "name", name)


def _rule_of(regex: str) -> str:
    if not isinstance(regex, str) or not regex:
        raise OptionFault(f"regex is {regex!r}: expected a regular expression of at least one character")
    signs = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # a rule is one line, and its expression ends at a bare /
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


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…")


@dataclass
class GrammarState:
    """A grammar's state along the text of one thread; it is rolled back where the text is."""

    vocabulary: Vocabulary
    matcher: Matcher
    tokens: list[int] = field(default_factory=list)
    masks: dict[int, NDArray[np.bool_]] = field(default_factory=dict)  # what was asked for lately, by place
    chosen: int = 0  # tokens that are written or will be; those behind them were only tried

    def reach(self, text: list[int], settled: int) -> bool:
        """Go to the end of a text, whose first `settled` tokens never change; answers whether the grammar allows it."""
        same = min(len(self.tokens), len(text))
        while self.tokens[:same] != text[:same]:  # only what was drafted differs, and that is short
            same -= 1
        if undone := self.tokens[same:]:
            pieces = len(undone) if same else len(undone) - 1 + len(self._pieces(undone[0], first=True))
            self.matcher.rollback(pieces)
            del self.tokens[same:]
        self.masks = {place: mask for place, mask in self.masks.items() if settled <= place <= same}
        return all(self.write(token) for token in text[same:])

    def write(self, token: int) -> bool:
        """Go one token further; answers whether the grammar allows it."""
        pieces = self._pieces(token, first=not self.tokens)
        self.tokens.append(token)
        return self.matcher.consume_tokens(pieces)

    def allowed(self) -> NDArray[np.bool_]:
        """V, True = may follow."""
        place = len(self.tokens)
        if place not in self.masks:
            self.masks[place] = self.vocabulary.allowed(self.matcher, first=not place)
        return self.masks[place]

    def _pieces(self, token: int, first: bool) -> list[int]:
        return self.vocabulary.openings.get(token, [token]) if first else [token]


@dataclass
class Constrained:
    """Another choice, out of the tokens that a text may go on with to become what is asked for.

    It serves one request. A thread's own text is a whole text: do not let a text fork that is meant as one.
    """

    inner: TokenSelector
    form: Form
    vocabulary: Vocabulary
    start: Matcher  # before the first token of any thread
    lines: dict[tuple[int, ...], GrammarState] = field(default_factory=dict)  # by the path of the thread
    scores: NDArray[np.float32] = field(init=False)  # V, used again for each token: a new array takes longer to get

    def __post_init__(self) -> None:
        self.scores = np.empty(self.vocabulary.text.size, np.float32)

    def token(self, logits: NDArray[np.float32], thread: Thread, ahead: Sequence[int]) -> int:
        text = [*thread.written, *ahead]
        allowed = self._allowed(thread, text, ahead)
        token = self.inner.token(self._scores(logits, allowed), thread, ahead)
        if not allowed[token]:
            raise self._dead_end(thread, text, "all tokens that fit are banned there")
        if not self.vocabulary.ends[token]:
            line = self.lines[thread.path]
            line.write(token)
            line.chosen = len(line.tokens)
        return token

    def guesses(self, logits: NDArray[np.float32], thread: Thread, place: int, most: int) -> tuple[Guess, ...]:
        """Behind the token that was chosen last, only what may follow it and the best guesses before."""
        found: list[Guess] = []
        line = self.lines.get(thread.path)
        if line is not None and thread.start + line.chosen == place:
            text = line.tokens[: line.chosen]
            while len(found) < len(logits) and line.reach(text, line.chosen) and (allowed := line.allowed()).any():
                scores = self._scores(logits[len(found)], allowed)
                found += self.inner.guesses(scores[None], thread, place + len(found), most)
                if not found[-1].tokens or self.vocabulary.ends[found[-1].tokens[0]]:
                    break
                text.append(found[-1].tokens[0])
            if line.matcher.is_error():
                del self.lines[thread.path]
        if len(found) < len(logits):
            found += self.inner.guesses(logits[len(found) :], thread, place + len(found), most)
        return tuple(found)

    def _scores(self, logits: NDArray[np.float32], allowed: NDArray[np.bool_]) -> NDArray[np.float32]:
        self.scores.fill(-np.inf)
        np.copyto(self.scores, logits, where=allowed)
        return self.scores

    def _allowed(self, thread: Thread, text: list[int], ahead: Sequence[int]) -> NDArray[np.bool_]:
        if any(self.vocabulary.ends[token] for token in ahead):
            return self.vocabulary.ends  # a draft may be longer than the text
        if thread.path not in self.lines:
            self.lines[thread.path] = GrammarState(self.vocabulary, self.start.deep_copy())
        line = self.lines[thread.path]
        if line.reach(text, len(text) - len(ahead)) and (allowed := line.allowed()).any():
            return allowed
        del self.lines[thread.path]  # a matcher that failed stays so
        raise self._dead_end(thread, text, _reason(line.matcher))

    def _dead_end(self, thread: Thread, text: list[int], reason: str) -> DeadEnd:
        behind = self.vocabulary.tokenizer.decode(text)[-_MOST_SHOWN:]
        return DeadEnd(
            f"{self.form.name} cannot be kept to at place {thread.start + len(text)}, behind {behind!r}: {reason}: "
            f"{_ADVICE}"
        )


def constrained(inner: TokenSelector, form: Form, vocabulary: Vocabulary) -> Constrained:
    """A choice for one request, whose text will have this form."""
    start = vocabulary.matcher(form.grammar)
    if start.is_error():
        known = "Rust's regex crate" if form.regex is not None else "llguidance's JSON schemas"
        raise OptionFault(f"{form.name} cannot be used: {_reason(start)}: expected the syntax of {known}")
    trial = start.deep_copy()
    if not vocabulary.allowed(trial, first=True).any():
        raise DeadEnd(f"{form.name} cannot be begun: {_reason(trial)}: {_ADVICE}")
    return Constrained(inner, form, vocabulary, start)


def _reason(matcher: Matcher) -> str:
    """What the library says is wrong, without the lines of our own that it quotes."""
    told = matcher.get_error().replace("<non-verbose/>", "")
    told = re.split(r"\n +\d+ \| ", re.sub(r"^(at )?\d+\(\d+\): ", "", told))[0]
    told = " ".join(re.sub(r"regex parse error:.*?error: ", "", told, flags=re.DOTALL).split())
    return "no token writes what would have to follow" if told in ("", "NoExtensionBias") else told
