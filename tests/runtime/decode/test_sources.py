"""Draft sources: acceptance is learned from generated tokens, drafted or not, and one from outside the package drafts too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.graphs.contract.draft_methods import DraftAcceptance
from spaceport.runtime.decode.draft import Candidates, DraftConfig
from spaceport.runtime.decode.planner import DraftPlanner, Sharing, drafter_for
from spaceport.runtime.decode.sequence import TokenSequence, root_sequence
from spaceport.runtime.decode.sources import SOURCES, Acceptance, Continuation, Lookup, MaskPredictions, Predictions
from spaceport.runtime.decoding import Decoding
from support.hash_engine import FREE_STEPS, Language
from support.hash_runtime import hash_runtime

PROMPT = [1, 2, 3, 4, 5]
LANGUAGE = Language(4, quality=50, end_every=10**9)


class Outside:
    """Proposes the rest of a phrase behind its first tokens."""

    def __init__(self, phrase: Sequence[int], known: int = 2) -> None:
        self._phrase, self._known = list(phrase), known

    def __call__(self, thread: TokenSequence, acceptance: Acceptance) -> Predictions:
        known, phrase = thread.tokens[-self._known :], self._phrase
        ends = [end for end in range(self._known, len(phrase)) if phrase[end - self._known : end] == known]
        rest = phrase[ends[0] : ends[0] + 4] if ends else []
        candidates = [Candidates((token,), (0.9,)) for token in rest]
        return Predictions("outside", candidates, thread.tokens[-1])


def phrase() -> list[int]:
    """Tokens from within the text."""
    return LANGUAGE.write(PROMPT, 50)[10:40]


@pytest.mark.parametrize("options", [{}, {"mask_slots": 0}, {"mask_slots": 0, "lookup": 0}, {"lookup": 0}])
def test_a_source_from_outside_is_drafted_and_counted_and_changes_no_text(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    decoding = Decoding(max_tokens=50, fork=False, trace=True, **options)  # type: ignore[arg-type]
    with hash_runtime(LANGUAGE) as runtime:
        before = runtime.generate(PROMPT, decoding)
    monkeypatch.setitem(SOURCES, "outside", lambda config: Outside(phrase()))
    with hash_runtime(LANGUAGE) as runtime, runtime.stream(PROMPT, decoding) as stream:
        pieces, found = list(stream), stream.completion()
    assert found.tokens == before.tokens == tuple(LANGUAGE.write(PROMPT, 50))
    counts = found.statistics
    named = {source: count for source, count in counts.accepted_by_source.items() if "outside" in source.split("+")}
    assert sum(named.values()) > 10
    assert all(counts.drafted_by_source[source] >= count for source, count in named.items())
    assert Counter(piece.source for piece in pieces if piece.drafted) == counts.accepted_by_source
    assert all((piece.source is not None) == piece.drafted for piece in pieces)
    assert found.trace is not None
    rows = [rows for step in found.trace.record().steps for rows in step.rows]
    assert {source for each in rows for source in each.sources if source} == {*counts.drafted_by_source}
    assert counts.steps < before.statistics.steps


def test_a_chain_takes_the_first_source_that_proposes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "outside", lambda config: Outside((7, 8, 9, 6), known=2))
    drafter = drafter_for(DraftConfig(2, "chain"), DraftPlanner(FREE_STEPS))
    thread = root_sequence([1, 7, 8], 64)
    draft = drafter.draft(thread, 50, 64, Sharing())
    assert (draft.tokens, draft.sources) == ((9, 6), ("outside", "outside"))
    thread.candidates = (Candidates((3,), (0.9,)),)
    draft = drafter.draft(thread, 50, 64, Sharing())
    assert (draft.tokens, draft.sources) == ((3,), ("mask",))


def test_a_source_may_propose_more_tokens_than_any_draft_has(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = [Candidates((token,), (0.9,)) for token in list(range(7)) * 40]
    source = lambda thread, acceptance: Predictions("outside", candidates, thread.tokens[-1])  # noqa: E731
    monkeypatch.setitem(SOURCES, "outside", lambda config: source)
    with hash_runtime(LANGUAGE) as runtime:
        found = runtime.generate(PROMPT, Decoding(max_tokens=20, fork=False, draft_rows=120))
    assert found.tokens == tuple(LANGUAGE.write(PROMPT, 20))


FIRST = Acceptance(3).masks
NOTHING = Candidates((), ())


def candidates_of(*tokens: int) -> tuple[Candidates, ...]:
    """What mask slots predict, one token each."""
    return tuple(Candidates((token,), (0.5,)) for token in tokens)


def copied_by(acceptance: Acceptance, tokens: Sequence[int], equal: int, copied: int) -> Continuation:
    """A continuation by prompt lookup, behind as many right tokens of it."""
    lookup = Lookup()
    lookup.copied, lookup.copied_until = copied, 99
    return Continuation(tokens, equal, lookup, 99, acceptance)


def rates_of(acceptance: Acceptance, equal: int, copied: int, count: int) -> list[float]:
    """The probability of each token of a continuation."""
    proposal = copied_by(acceptance, range(count), equal, copied)
    assert [proposal.behind(depth, (0,))[0][1] for depth in range(count)] == list(proposal.best())
    return [proposal.behind(depth, (0,))[0][0] for depth in range(count)]


def learn(acceptance: Acceptance, candidates: Sequence[Candidates], written: Sequence[int], times: int = 300) -> None:
    """Learn that mask slots had the same fate over and over."""
    for _ in range(times):
        MaskPredictions(candidates, 0, acceptance).learn(written, acceptance.count_step())


@pytest.mark.parametrize(
    ("candidates", "written", "rates"),
    [
        (candidates_of(7, 8, 9), (7, 8, 9, 1), [1, 1, 1]),
        (candidates_of(7, 8, 9), (7, 8, 1), [1, 1, 0]),
        (candidates_of(7, 8, 9), (7, 1), [1, 0, 0]),  # a wrong one makes those behind it wrong as well
        (candidates_of(7, 8, 9), (1,), [0, 0, 0]),
        # of the token that a plain step does not show nothing is known
        (candidates_of(7, 8), (7,), [1, *FIRST[1:]]),
        # a mask slot that predicts nothing ends the prediction
        ((*candidates_of(7), NOTHING, *candidates_of(8)), (7, 8, 1), [1, 0, 0]),
        ((NOTHING, *candidates_of(8, 9)), (8, 1), [0, 0, 0]),
        (candidates_of(7), (1,), [0, 0, 0]),  # no depth is rated better than those before it
    ],
)
def test_a_rate_is_how_often_mask_slots_predict_that_many_tokens(
    candidates: tuple[Candidates, ...], written: tuple[int, ...], rates: list[float]
) -> None:
    acceptance = Acceptance(3)
    learn(acceptance, candidates, written)
    assert acceptance.masks == pytest.approx(rates, abs=1e-3)
    assert acceptance.lookup == Acceptance(3).lookup  # a step without lookup says nothing about it


def test_depths_without_predictions_slowly_get_their_first_rate_back() -> None:
    """Of the bundle, whose last rate holds for all further mask slots."""
    acceptance = Acceptance(3, DraftAcceptance((0.5, 0.2), (0.1, 0.2, 0.3, 0.4, 0.5)))
    assert acceptance.masks == [0.5, 0.2, 0.2]
    assert rates_of(acceptance, 2, 0, 3) == [0.1, 0.2, 0.3]
    learn(acceptance, candidates_of(7, 8, 9), (1,))
    learn(acceptance, (), (1,), 100)
    assert 0.1 < acceptance.masks[0] < 0.2
    learn(acceptance, (), (1,), 5000)
    assert acceptance.masks == pytest.approx([0.5, 0.2, 0.2], abs=1e-3)


@pytest.mark.parametrize(
    ("equal", "copied", "kinds"),
    [(2, 0, [0, 1, 2, 2]), (3, 0, [1, 2, 2, 2]), (4, 2, [2, 2, 3, 3]), (4, 14, [3, 3, 4, 4]), (9, 99, [4, 4, 4, 4])],
)
def test_each_looked_up_token_has_the_rate_of_its_match(equal: int, copied: int, kinds: list[int]) -> None:
    acceptance = Acceptance(0)
    assert rates_of(acceptance, equal, copied, 4) == [acceptance.lookup[kind] for kind in kinds]


def look_up(acceptance: Acceptance, tokens: Sequence[int], equal: int, written: Sequence[int], times: int = 1) -> None:
    """Learn that prompt lookup had the same fate over and over."""
    for _ in range(times):
        copied_by(acceptance, tokens, equal, 0).learn(written, acceptance.count_step())


def test_prompt_lookup_is_learned_token_by_token_until_it_is_wrong() -> None:
    acceptance, before = Acceptance(0), Acceptance(0).lookup
    look_up(acceptance, (7, 8, 9), 2, (7, 8, 1), 300)
    assert acceptance.lookup[:3] == pytest.approx([1, 1, 0], abs=1e-3)
    assert acceptance.lookup[3:] == before[3:]
    look_up(acceptance, (7, 8, 9), 4, (7,), 300)  # also what was not drafted
    assert acceptance.lookup[2] == pytest.approx(1, abs=1e-3)
    known = list(acceptance.lookup)
    look_up(acceptance, (), 0, (1, 2))
    assert acceptance.lookup == known
    acceptance = Acceptance(0)
    look_up(acceptance, (7,), 2, (1,))
    assert acceptance.lookup[0] == pytest.approx(before[0] * 4 / 5)  # the first steps count more than later ones


LONGEST, SHORTEST = 4, 2
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)  # few words, so that they come again


def read_through(tokens: Sequence[int], most: int) -> tuple[list[int], int]:
    """The same, with no memory."""
    end = len(tokens)
    for words in range(LONGEST, SHORTEST - 1, -1):
        for position in range(end - 1, words - 1, -1):
            if words <= end and tokens[position - words : position] == tokens[end - words :]:
                return list(tokens[position : position + most]), words
    return [], 0


@given(text=TEXTS, own=TEXTS, other=TEXTS, asked=st.sets(st.integers(1, 40)), most=st.integers(1, 6))
def test_a_thread_that_grows_and_forks_looks_up_its_own_text_as_if_it_were_read_through(
    text: list[int], own: list[int], other: list[int], asked: set[int], most: int
) -> None:
    parent, lookup = root_sequence(text[:1], 4), Lookup()
    parent.draft_state["lookup"] = lookup
    for token in text[1:]:
        parent.tokens.append(token)
        if len(parent.tokens) in asked:
            found, words = lookup.following(parent.tokens, most)
            assert (list(found), words) == read_through(parent.tokens, most)
    child = parent.child(len(text) - 1, 9, np.empty(0, np.int64))
    for token, its_token in zip(own, other, strict=False):
        for thread, following in ((parent, token), (child, its_token)):
            thread.tokens.append(following)
            found, _ = thread.draft_state["lookup"].following(thread.tokens, 3)
            assert list(found) == read_through(thread.tokens, 3)[0]


def test_a_thread_that_has_ended_keeps_nothing_for_drafts() -> None:
    language = Language(seed=1, end_every=10**9)
    with hash_runtime(language) as runtime, runtime.stream([1, 2, 1, 2], Decoding(max_tokens=20, lookup=4)) as stream:
        next(stream)
        threads = stream.request.sequences.threads
        stream.completion()
    assert [thread.draft_state for thread in threads] == [{} for _ in threads]
