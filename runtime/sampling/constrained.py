"""Constrained: a token selector that limits another one to the tokens that a grammar allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.sampling.grammar import MOST_SHOWN, Grammar
from spaceport.runtime.sampling.vocabulary import Matcher, Vocabulary

ADVICE = "expected a grammar that the model's tokens can match; use one that allows more at this position"


class DeadEnd(OptionFault):
    """The grammar allows no token at a position where the text cannot end either."""


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
        raise self._dead_end(thread, text, reason_of(state.matcher))

    def _dead_end(self, thread: Thread, text: list[int], reason: str) -> DeadEnd:
        behind = self.vocabulary.tokenizer.decode(text)[-MOST_SHOWN:]
        return DeadEnd(
            f"{self.grammar.label} allows no token at position {thread.start + len(text)}, after {behind!r}: {reason}: "
            f"{ADVICE}"
        )


def reason_of(matcher: Matcher) -> str:
    """llguidance's error message, without the lines of the generated grammar that it quotes."""
    message = matcher.get_error().replace("<non-verbose/>", "")
    message = re.split(r"\n +\d+ \| ", re.sub(r"^(at )?\d+\(\d+\): ", "", message))[0]
    message = " ".join(re.sub(r"regex parse error:.*?error: ", "", message, flags=re.DOTALL).split())
    return "no token of the vocabulary fits" if message in ("", "NoExtensionBias") else message
