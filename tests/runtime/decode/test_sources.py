"""Draft sources: one from outside the package drafts beside mask slots and prompt lookup, and changes no text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spaceport.runtime.decode.draft import Candidates, DraftConfig
from spaceport.runtime.decode.planner import DraftPlanner, Sharing, drafter_for
from spaceport.runtime.decode.sequence import TokenSequence, root_sequence
from spaceport.runtime.decode.sources import SOURCES, Acceptance, Predictions, named_source
from spaceport.runtime.decoding import Decoding
from support.hash_engine import FREE_STEPS, Language
from support.hash_runtime import hash_runtime

PROMPT = [1, 2, 3, 4, 5]
LANGUAGE = Language(4, quality=50, end_every=10**9)


class Phrase:
    """Proposes the rest of a phrase behind its first tokens."""

    def __init__(self, phrase: Sequence[int], known: int = 2) -> None:
        self._phrase, self._known = list(phrase), known

    def propose(self, thread: TokenSequence, acceptance: Acceptance) -> Predictions:
        known, phrase = thread.tokens[-self._known :], self._phrase
        ends = [end for end in range(self._known, len(phrase)) if phrase[end - self._known : end] == known]
        rest = phrase[ends[0] : ends[0] + 4] if ends else []
        candidates = [Candidates((token,), (0.9,)) for token in rest]
        return Predictions("phrase", candidates, thread.tokens[-1], acceptance)


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
    monkeypatch.setitem(SOURCES, "phrase", lambda config: Phrase(phrase()))
    with hash_runtime(LANGUAGE) as runtime, runtime.stream(PROMPT, decoding) as stream:
        pieces, found = list(stream), stream.completion()
    assert found.tokens == before.tokens == tuple(LANGUAGE.write(PROMPT, 50))
    counts = found.statistics
    named = {source: count for source, count in counts.accepted_by_source.items() if "phrase" in source.split("+")}
    assert sum(named.values()) > 10
    assert all(counts.drafted_by_source[source] >= count for source, count in named.items())
    assert {piece.source for piece in pieces if piece.drafted} == {*counts.accepted_by_source}
    assert found.trace is not None
    rows = [rows for step in found.trace.record().steps for rows in step.rows]
    assert {source for each in rows for source in each.sources if source} == {*counts.drafted_by_source}
    assert counts.steps < before.statistics.steps


def test_a_source_that_is_always_wrong_is_trusted_less_and_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [token for token in range(10) for _ in range(4)]
    monkeypatch.setitem(SOURCES, "phrase", lambda config: Phrase(wrong, known=1))
    with hash_runtime(LANGUAGE) as runtime:
        found = runtime.generate(PROMPT, Decoding(max_tokens=50, fork=False, mask_slots=0, lookup=0))
    assert found.tokens == tuple(LANGUAGE.write(PROMPT, 50))
    assert found.statistics.drafted_by_source["phrase"] > found.statistics.accepted_by_source.get("phrase", 0)


def test_a_chain_takes_the_first_source_that_proposes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "phrase", lambda config: Phrase((7, 8, 9, 6), known=2))
    drafter = drafter_for(DraftConfig(2, "chain"), DraftPlanner(FREE_STEPS))
    thread = root_sequence([1, 7, 8], 64)
    draft = drafter.draft(thread, 50, 64, Sharing())
    assert (draft.tokens, draft.sources) == ((9, 6), ("phrase", "phrase"))
    thread.candidates = (Candidates((3,), (0.9,)),)
    draft = drafter.draft(thread, 50, 64, Sharing())
    assert (draft.tokens, draft.sources) == ((3,), ("mask",))


def test_users_read_the_names_of_all_sources() -> None:
    assert named_source("mask+lookup") == "mask slots + prompt lookup"
    assert named_source("phrase") == "phrase"


def test_a_source_may_propose_more_tokens_than_any_draft_has(monkeypatch: pytest.MonkeyPatch) -> None:
    phrase = list(range(7)) * 40
    monkeypatch.setattr(
        Phrase,
        "propose",
        lambda self, thread, acceptance: Predictions(
            "phrase", [Candidates((token,), (0.9,)) for token in phrase], thread.tokens[-1], acceptance
        ),
    )
    monkeypatch.setitem(SOURCES, "phrase", lambda config: Phrase(phrase))
    with hash_runtime(LANGUAGE) as runtime:
        found = runtime.generate(PROMPT, Decoding(max_tokens=20, fork=False, draft_rows=120))
    assert found.tokens == tuple(LANGUAGE.write(PROMPT, 20))
