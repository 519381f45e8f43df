"""Mismatches: the tokens of a completion that plain decoding does not select at their positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.comparison import ThreadTokens, TokenDifference, first_difference, token_differences
from spaceport.runtime.decode.sequence import root_sequence
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Engine
from spaceport.runtime.sampling.choice import Bans
from spaceport.runtime.sampling.sampler import gumbels, noise_key
from spaceport.runtime.text.transcript import Path
from spaceport.tools.verify.audit.modes import ModeGroup
from spaceport.tools.verify.feeding import Logits, logits_of


@dataclass(frozen=True)
class SelectionRule:
    """How the modes of a group select tokens, computed independently of the runtime's selectors."""

    tokens: TokenIds
    bans: Bans
    seed: int | None

    def scores(self, logits: Logits, thread: ThreadTokens, position: int) -> NDArray[np.float64]:
        """Scores by token at a position: the highest is selected, among equal ones the lowest id."""
        scores = logits.astype(np.float64)
        if self.seed is not None:
            scores += gumbels(noise_key(self.seed, thread.path, position), np.arange(scores.size))
        before = root_sequence(thread.tokens[position - 1 : position], 0)
        before.path = thread.path
        scores[list(self.bans.at(before, ()))] = -np.inf
        return scores


def selection_rule(group: ModeGroup, tokens: TokenIds) -> SelectionRule:
    """The selection rule of a group of modes."""
    never = frozenset(tokens.forbidden)
    if group.forks:
        return SelectionRule(tokens, Bans(never, tokens.fork, tokens.child, Decoding.max_depth), group.seed)
    return SelectionRule(tokens, Bans(never | frozenset(tokens.fork_ids)), group.seed)


def find_mismatches(
    engine: Engine, rule: SelectionRule, thread: ThreadTokens, limit: int, plain: ThreadTokens | None = None
) -> list[TokenDifference]:
    """Every position, from the first difference to the plain thread on, whose token plain decoding would not select.

    The thread's own tokens are fed, one row per step, so each token is verified after the tokens that precede it here, and a
    later mismatch is not hidden by an earlier one. `limit` is the maximum length of the thread, prompt included.
    """
    first = thread.start if plain is None else first_difference(thread, plain)
    if first is None:
        return []
    logits = logits_of(engine, thread)
    found = [*_wrong_tokens(rule, thread, logits, first), *_wrong_length(thread, limit)]
    if plain is not None and first < min(_length(thread), _length(plain)):
        found = [
            _first_mismatch(rule, thread, plain, first, logits),
            *(mismatch for mismatch in found if mismatch.position != first),
        ]
    return found


def unmatched_threads(threads: dict[Path, ThreadTokens], plain: dict[Path, ThreadTokens]) -> list[TokenDifference]:
    """The threads that only one of two completions has, although their parents are equal."""
    differences = token_differences(threads, plain)
    return [difference for path, difference in differences.items() if path not in threads or path not in plain]


def _wrong_tokens(rule: SelectionRule, thread: ThreadTokens, logits: Logits, first: int) -> Iterator[TokenDifference]:
    for position in range(first, _length(thread)):
        scores = rule.scores(logits[position - thread.start], thread, position)
        found, best = _token_at(rule, thread, position, scores), int(scores.argmax())
        if np.isnan(scores).any():
            yield TokenDifference(
                thread.path, position, thread.start, None, found, np.nan, reason="the logits hold NaN"
            )
        elif best != found:
            margin = float(scores[best] - scores[found])
            yield TokenDifference(thread.path, position, thread.start, best, found, margin)


def _wrong_length(thread: ThreadTokens, limit: int) -> list[TokenDifference]:
    """A mismatch if a thread without an end token is shorter or longer than its limit."""
    length = len(thread.tokens)
    if thread.ended or thread.cut or max(limit, thread.start) == length:
        return []
    reason = f"the thread ends too {'early' if length < limit else 'late'}, its limit is {limit} tokens"
    return [TokenDifference(thread.path, length, thread.start, None, None, reason=reason)]


def _first_mismatch(
    rule: SelectionRule, thread: ThreadTokens, plain: ThreadTokens, position: int, logits: Logits
) -> TokenDifference:
    """The first difference of two threads, with the tokens of both.

    The margin is that of the worse token: on a nondeterministic engine the plain token may not be the best one.
    """
    scores = rule.scores(logits[position - thread.start], thread, position)
    expected, found = _token_at(rule, plain, position, scores), _token_at(rule, thread, position, scores)
    margin = float(scores.max() - min(scores[expected], scores[found]))
    reason = "the logits hold NaN" if np.isnan(margin) else ""
    return TokenDifference(thread.path, position, thread.start, expected, found, margin, reason=reason)


def _token_at(rule: SelectionRule, thread: ThreadTokens, position: int, scores: NDArray[np.float64]) -> int:
    """The token at a position; after the last token the most probable end token."""
    if position < len(thread.tokens):
        return thread.tokens[position]
    return max(rule.tokens.end, key=lambda token: (scores[token], -token))


def _length(thread: ThreadTokens) -> int:
    """Number of tokens, end token included."""
    return len(thread.tokens) + thread.ended
