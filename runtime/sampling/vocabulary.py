"""Vocabulary: the tokens of a bundle for constrained decoding with llguidance."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import MissingDependency, OptionFault
from spaceport.graphs.contract.installation import install_command


class Matcher(Protocol):
    """The used part of llguidance's LLMatcher: a grammar and the state of a text in it."""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool: ...
    def validate_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def is_accepting(self) -> bool: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def deep_copy(self) -> Matcher: ...


class Spelling(Protocol):
    """The used part of llguidance's LLTokenizer: the bytes of tokens."""

    def is_special_token(self, token: int) -> bool: ...
    def decode_bytes(self, tokens: list[int]) -> bytes: ...
    def greedy_tokenize(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a bundle for constrained decoding."""

    tokenizer: Tokenizer
    matcher: Callable[[str], Matcher]  # creates the matcher of a grammar, before the first token
    text: NDArray[np.bool_]  # V, True = has text
    ends: NDArray[np.bool_]  # V, True = ends a completion
    # First token of a text -> tokens with the same text elsewhere: some decoders remove the first space of a text.
    openings: dict[int, list[int]]

    def allowed(self, matcher: Matcher, first: bool) -> NDArray[np.bool_]:
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
) -> tuple[Spelling, Callable[[str], Matcher]]:
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
