"""Grammars that a completion matches, and the token selector that limits another one to them, with llguidance."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import MissingDependency, OptionFault
from spaceport.graphs.contract.installation import install_command
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.sequence import NotANumber, TokenSelector, TokenSequence
from spaceport.runtime.isolation import DeadlinePassed, HelperPool, JobFailed
from spaceport.runtime.sampling.option_fields import documented, option

# Whitespace between JSON tokens, where it is allowed: none, a space, or a line break with indentation. If all whitespace
# were allowed, a weak model could generate whitespace for ever.
_SPACE = r" |\n {0,20}"
# Without this option llguidance forces tokens wherever the grammar allows only one continuation. It would force special
# tokens with the same spelling, and characters outside the grammar where the tokenizer normalizes text.
_OPTIONS = '%llguidance {"no_forcing": true}'
_EXAMPLE = '{"type": "object", "properties": {"name": {"type": "string"}}}'
# Keywords of JSON schemas whose conditions are intersected, which may take exponential time.
_INTERSECTIONS = frozenset(
    (
        *("allOf", "oneOf", "not", "if", "then", "else"),
        *("patternProperties", "propertyNames", "dependentSchemas", "contains"),
    )
)
_TEXT_RULES = frozenset(("pattern", "format", "minLength", "maxLength"))
_QUOTED = re.compile(r'"(\\.|[^"\\])*"')
_COSTLY = frozenset("/&~%")  # of rules: expressions, intersections, complements and directives
MOST_SHOWN = 60  # characters of a grammar or a text in an error message


@documented
@dataclass(frozen=True, kw_only=True)
class Grammar:
    """What the whole completion matches: a regular expression, a JSON schema or a context-free grammar; give one of them."""

    regex: str | None = option(
        None,
        "Regular expression that the whole text matches, in the syntax of Rust's regex crate.",
        metavar="REGEX",
        request="spaceport.regex",
    )
    json_schema: str | Mapping[str, Any] | None = option(
        None,
        "JSON schema that the text conforms to; properties come in the schema's order.",
        metavar="FILE",
        request="spaceport.json_schema",
    )
    json_whitespace: bool = option(
        False, "Allow spaces, line breaks and indentation between the tokens of JSON; else it is compact."
    )
    lark: str | None = option(
        None,
        "Context-free grammar in llguidance's dialect of Lark; its first rule is `start`.",
        flag=None,
        request=None,
    )
    schemas: Mapping[str, Mapping[str, Any]] = option(
        dict, "JSON schema of each name that the rules of `lark` use without defining it.", flag=None, request=None
    )
    name: str = option("", "What error messages call the grammar.", unset="its beginning", flag=None, request=None)
    source: str = field(init=False, repr=False)  # the grammar in llguidance's syntax
    label: str = field(init=False, repr=False)  # the grammar as error messages name it
    depth: int = field(init=False, repr=False)  # nested groups of the expression, or objects and arrays of the schema

    def __post_init__(self) -> None:
        kinds = sum(option is not None for option in (self.regex, self.json_schema, self.lark))
        if kinds != 1:
            count = "several of them are given" if kinds else "none of them is given"
            raise OptionFault(f"regex, json_schema and lark: {count}: expected one of the three")
        if self.regex is not None:
            rules, kind, text, brackets = _rule_of(self.regex), "the regular expression", self.regex, "("
        elif self.lark is not None:
            rules, kind, text, brackets = self.lark, "the grammar", self.lark, "(["
        else:
            schema = _schema_of(self.json_schema)
            rules, kind, text, brackets = (
                f"start: {self._schema_rule(schema)}",
                "the JSON schema",
                json.dumps(schema),
                "{[",
            )
        depth = _depth(text, brackets)
        for name, named_schema in self.schemas.items():
            rules += f"\n{name}: {self._schema_rule(named_schema)}"
            depth = max(depth, _depth(json.dumps(named_schema), "{["))
        object.__setattr__(self, "source", f"{_OPTIONS}\n{rules}")
        object.__setattr__(self, "label", self.name or f"{kind} {_shown(text)}")
        object.__setattr__(self, "depth", depth)

    def _schema_rule(self, schema: Mapping[str, Any]) -> str:
        layout = {"whitespace_pattern": _SPACE} if self.json_whitespace else {"whitespace_flexible": False}
        return "%json " + json.dumps({"x-guidance": layout, **schema})


def _rule_of(regex: str) -> str:
    if not isinstance(regex, str) or not regex:
        raise OptionFault(f"regex is {regex!r}: expected a regular expression of at least one character")
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # a rule is one line, and an unescaped / ends its expression
    escaped = re.sub(r"\\.|/|\n", lambda match: escapes.get(match[0], match[0]), regex, flags=re.DOTALL)
    return f"start: TEXT\nTEXT: /{escaped}/"


def _schema_of(option: object) -> dict[str, Any]:
    try:
        plain = dict(option) if isinstance(option, Mapping) else option
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
    for bracket in re.findall(f"[{re.escape(opening + closing)}]", text):
        depth = depth + 1 if bracket in opening else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _shown(text: str) -> str:
    return repr(text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…")


def is_simple(grammar: Grammar) -> bool:
    """Whether a grammar compiles soon: llguidance limits expressions, but not the intersections of JSON schemas."""
    waiting: list[Any] = list(grammar.schemas.values())
    if grammar.json_schema is not None:
        waiting.append(json.loads(grammar.source.partition("%json ")[2]))
    if grammar.lark is not None:
        rules = _QUOTED.sub("", grammar.lark)
        if not _COSTLY.isdisjoint(rules) or rules.count("{") > 1:  # counts could be nested
            return False
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            if not _INTERSECTIONS.isdisjoint(schema) or len(_TEXT_RULES.intersection(schema)) > 1:
                return False
            waiting += schema.values()
        elif isinstance(schema, list):
            waiting += schema
    return True


if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ADVICE = "expected a grammar that the model's tokens can match; use one that allows more at this position"
_MOST_COMPILED = 64  # compiled grammars that are stored


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a bundle for constrained decoding."""

    tokenizer: Tokenizer
    matcher: Callable[[str], LLMatcher]  # creates the matcher of a grammar, before the first token
    text: NDArray[np.bool_]  # V, True = has text
    ends: NDArray[np.bool_]  # V, True = ends a completion
    # First token of a text -> tokens with the same text elsewhere: some decoders remove the first space of a text.
    openings: dict[int, list[int]]

    def allowed(self, matcher: LLMatcher, first: bool) -> NDArray[np.bool_]:
        """Mask of the tokens that a matcher allows next: V, True = allowed; all False if it fails."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        fits = np.unpackbits(bits, count=self.text.size, bitorder="little").view(np.bool_)
        if matcher.is_error():
            return np.zeros_like(self.text)
        allowed = fits & self.text
        if first and self.openings:
            blank, tokens, heads, longer = self._openings
            allowed[blank] = True
            allowed[tokens] = fits[heads]
            for token in longer[allowed[longer]].tolist():
                pieces = self.openings[token]
                allowed[token] = matcher.validate_tokens(pieces) == len(pieces)
        allowed[self._ends] = matcher.is_accepting()
        return allowed

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.ends)

    @cached_property
    def _openings(self) -> tuple[NDArray[np.int64], ...]:
        """First tokens without text; the others, and the first piece of each; those of several pieces."""
        blank = [token for token, pieces in self.openings.items() if not pieces]
        heads = {token: pieces[0] for token, pieces in self.openings.items() if pieces}
        longer = [token for token, pieces in self.openings.items() if len(pieces) > 1]
        return tuple(np.array(list(ids), np.int64) for ids in (blank, heads, heads.values(), longer))


def open_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, end_tokens: Collection[int], never: Collection[int] = ()
) -> Vocabulary:
    """The vocabulary of a model with this tokenizer; slow, so it is built once for all requests.

    A model may have more tokens than its tokenizer. `never` are further tokens without text, and all tokens that the
    inner selector bans.
    """
    encoder, matcher = _library(tokenizer, vocab_size, end_tokens)
    count = min(tokenizer.get_vocab_size(), vocab_size)
    spelt = [b"" if encoder.is_special_token(token) else encoder.decode_bytes([token]) for token in range(count)]
    alone = tokenizer.decode_batch([[token] for token in range(count)], skip_special_tokens=True)
    text, ends = np.zeros(vocab_size, np.bool_), np.zeros(vocab_size, np.bool_)
    openings = {}
    for token, (raw, first) in enumerate(zip(spelt, alone, strict=True)):
        elsewhere = raw.decode("utf-8", "replace")
        if first == elsewhere:
            text[token] = bool(raw)
        elif " " + first == elsewhere:
            openings[token] = pieces = encoder.greedy_tokenize(first)
            text[token] = b"".join(spelt[piece] for piece in pieces if piece < count) == raw[1:]
    text[[*end_tokens, *never]] = False
    ends[list(end_tokens)] = True
    return Vocabulary(tokenizer, matcher, text, ends, {token: openings[token] for token in openings if text[token]})


def _library(
    tokenizer: Tokenizer, vocab_size: int, end_tokens: Collection[int]
) -> tuple[LLTokenizer, Callable[[str], LLMatcher]]:
    try:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    except ImportError as error:
        raise MissingDependency(
            f"a grammar needs the package llguidance, which does not import ({error}): {install_command('grammar')}"
        ) from error
    size = tokenizer.get_vocab_size()
    ends = [token for token in end_tokens if token < size]
    beyond = [token for token in tokenizer.get_added_tokens_decoder() if token >= size]
    try:
        if not ends:
            raise ValueError(f"none of the end tokens {sorted(end_tokens)} is among its {size} tokens")
        if beyond:  # llguidance would panic
            raise ValueError(f"it has {size} tokens, and one with the id {beyond[0]}")
        opened = LLTokenizer(tokenizer.to_str(), n_vocab=max(size, vocab_size), eos_token=ends)
    except ValueError as error:
        raise OptionFault(
            f"the bundle's tokenizer cannot be used with a grammar: {error}: expected a byte-level one or one with byte "
            "fallback, and an end token; decode without a grammar"
        ) from error
    limits = LLParserLimits(verbose_errors=False)  # else errors contain the whole grammar
    return opened, lambda grammar: LLMatcher(opened, grammar, log_level=0, limits=limits)


class DeadEnd(OptionFault):
    """The grammar allows no token at a position where the text cannot end either."""


@dataclass
class Constrained:
    """A token selector that limits another one to the tokens that a grammar allows.

    It serves one request, which must not fork: the grammar applies to the text of its only thread.
    """

    inner: TokenSelector
    grammar: Grammar
    vocabulary: Vocabulary
    start: LLMatcher  # before the first token
    masks: dict[int, NDArray[np.bool_]] = field(init=False)  # recent masks of allowed tokens, by token index
    _matcher: LLMatcher = field(init=False)  # after `_tokens`; it can be rolled back
    _tokens: list[int] = field(init=False)
    _chosen: int = field(init=False)  # number of them that are part of the completion; the others are draft tokens
    _scores: NDArray[np.float32] = field(init=False)  # V, reused for each token: a new array takes longer

    def __post_init__(self) -> None:
        self._scores = np.empty(self.vocabulary.text.size, np.float32)
        self._restart()

    def token(self, logits: NDArray[np.float32], thread: TokenSequence, ahead: Sequence[int]) -> int:
        text = [*thread.generated, *ahead]
        allowed = self._allowed(thread, text, ahead)
        limited = self._limited(logits, allowed)
        try:
            token = self.inner.token(limited, thread, ahead)
        except NotANumber:
            if math.isfinite(limited.max()):
                raise self._dead_end(thread, text, "all tokens that it allows are banned") from None
            raise
        if not self.vocabulary.ends[token]:
            self._advance(token)
            self._chosen = len(self._tokens)
        return token

    def candidates(
        self, logits: NDArray[np.float32], thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        """The candidates of mask slots; behind the token that was chosen last, only those that the grammar allows."""
        candidates: list[Candidates] = []
        if thread.start + self._chosen == position:
            text = self._tokens[: self._chosen]
            for line in logits:
                if not self._reach(text, self._chosen) or not (allowed := self._mask()).any():
                    break
                own = self.inner.candidates(
                    self._limited(line, allowed)[None], thread, position + len(candidates), most
                )
                candidates += own
                if not own[0].tokens or self.vocabulary.ends[own[0].tokens[0]]:
                    break
                text.append(own[0].tokens[0])
            if self._matcher.is_error():
                self._restart()
        if rest := len(logits) - len(candidates):
            candidates += self.inner.candidates(logits[-rest:], thread, position + len(candidates), most)
        return tuple(candidates)

    def _limited(self, logits: NDArray[np.float32], allowed: NDArray[np.bool_]) -> NDArray[np.float32]:
        self._scores.fill(-np.inf)
        np.copyto(self._scores, logits, where=allowed)
        return self._scores

    def _allowed(self, thread: TokenSequence, text: list[int], ahead: Sequence[int]) -> NDArray[np.bool_]:
        if any(self.vocabulary.ends[token] for token in ahead):
            return self.vocabulary.ends  # a draft may go on behind the end token
        if self._reach(text, len(text) - len(ahead)) and (allowed := self._mask()).any():
            return allowed
        reason = reason_of(self._matcher)
        self._restart()  # a matcher that failed cannot be used again
        raise self._dead_end(thread, text, reason)

    def _restart(self) -> None:
        """Go back to the start of the text."""
        self._matcher, self._tokens, self.masks, self._chosen = self.start.deep_copy(), [], {}, 0

    def _reach(self, text: list[int], settled: int) -> bool:
        """Move to the end of these tokens, of which the first `settled` never change; whether the grammar allows them."""
        same = min(len(self._tokens), len(text))
        while self._tokens[:same] != text[:same]:  # only draft tokens differ, and they are few
            same -= 1
        if undone := self._tokens[same:]:
            pieces = len(undone) if same else len(undone) - 1 + len(self._pieces(undone[0], first=True))
            self._matcher.rollback(pieces)
            del self._tokens[same:]
        self.masks = {index: mask for index, mask in self.masks.items() if settled <= index <= same}
        return all(self._advance(token) for token in text[same:])

    def _advance(self, token: int) -> bool:
        """Move behind one more token; whether the grammar allows it."""
        pieces = self._pieces(token, first=not self._tokens)
        self._tokens.append(token)
        return self._matcher.consume_tokens(pieces)

    def _pieces(self, token: int, first: bool) -> list[int]:
        return self.vocabulary.openings.get(token, [token]) if first else [token]

    def _mask(self) -> NDArray[np.bool_]:
        """The tokens that may follow: V, True = allowed."""
        index = len(self._tokens)
        if index not in self.masks:
            self.masks[index] = self.vocabulary.allowed(self._matcher, first=not index)
        return self.masks[index]

    def _dead_end(self, thread: TokenSequence, text: list[int], reason: str) -> DeadEnd:
        behind = self.vocabulary.tokenizer.decode(text)[-MOST_SHOWN:]
        return DeadEnd(
            f"{self.grammar.label} allows no token at position {thread.start + len(text)}, after {behind!r}: {reason}: "
            f"{ADVICE}"
        )


def reason_of(matcher: LLMatcher) -> str:
    """llguidance's error message, without the lines of the generated grammar that it quotes."""
    message = matcher.get_error().replace("<non-verbose/>", "")
    message = re.split(r"\n +\d+ \| ", re.sub(r"^(at )?\d+\(\d+\): ", "", message))[0]
    message = " ".join(re.sub(r"regex parse error:.*?error: ", "", message, flags=re.DOTALL).split())
    return "no token of the vocabulary fits" if message in ("", "NoExtensionBias") else message


class GrammarCompiler:
    """Compiled grammars of one vocabulary; the last ones are stored for further requests."""

    def __init__(self, open_vocabulary: Callable[[], Vocabulary], helper: HelperPool | None = None) -> None:
        self._open = open_vocabulary  # called once, by the first grammar or by `prepare`
        self._vocabulary: Vocabulary | None = None
        self._opening = Lock()
        self._helper = helper  # compiles grammars first that may take long; None: they are compiled here
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def prepare(self) -> Vocabulary:
        """The vocabulary, which takes seconds if it is large and was not prepared before."""
        with self._opening:
            if self._vocabulary is None:
                self._vocabulary = self._open()
            return self._vocabulary

    def isolates(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled in a helper process first."""
        return self._helper is not None and grammar.source not in self._compiled and not is_simple(grammar)

    def constrained(self, inner: TokenSelector, grammar: Grammar, deadline: float | None = None) -> Constrained:
        """A token selector for one request, whose completion matches the grammar."""
        vocabulary = self.prepare()
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
            start = _compiled(grammar, vocabulary)
            with self._lock:
                self._compiled[grammar.source] = start
                while len(self._compiled) > _MOST_COMPILED:
                    self._compiled.popitem(last=False)
        return Constrained(inner, grammar, vocabulary, start.deep_copy())


def _compiled(grammar: Grammar, vocabulary: Vocabulary) -> LLMatcher:
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
