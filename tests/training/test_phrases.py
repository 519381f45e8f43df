"""Phrases: counted in answers, stored beside an adapter or a bundle, and drafted without changing a text."""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from spaceport.exporter.checkpoint_files import read_sar_config
from spaceport.exporter.draft_files import read_mechanisms, write_mechanisms
from spaceport.graphs.contract.faults import CheckpointError, InputFault
from spaceport.graphs.contract.phrases import (
    CHANCES,
    LONGEST,
    PhraseTable,
    context_numbers,
    read_phrases,
    write_phrases,
)
from spaceport.graphs.mechanism import Phrases as Mechanism
from spaceport.runtime import session
from spaceport.runtime.decode.draft import DraftConfig, Outlook, Phrases, tree
from spaceport.runtime.decode.planner import DraftPlanner
from spaceport.runtime.decode.sources import Acceptance, PhraseProposal
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.training.phrases import count_phrases
from spaceport.training.samples import Sample
from support.hash_engine import FREE_STEPS, Language
from support.hash_runtime import hash_runtime
from support.paths import TINY


def sample_of(prompt: Sequence[int], answer: Sequence[int]) -> Sample:
    ids = np.array([*prompt, *answer], np.int64)
    return Sample(1, ids, np.arange(ids.size) - 1, np.arange(ids.size) >= len(prompt))


def number_of(context: Sequence[int]) -> int:
    return context_numbers(context)[-1]


def table_of(entries: dict[tuple[int, ...], tuple[int, float]]) -> PhraseTable:
    """A table from contexts with the token behind each and its probability."""
    numbered = sorted((number_of(context), token, chance) for context, (token, chance) in entries.items())
    contexts, tokens, chances = zip(*numbered, strict=True)
    return PhraseTable(
        np.array(contexts, np.uint64),
        np.array(tokens, np.uint32),
        np.array([round(CHANCES * chance) for chance in chances], np.uint8),
    )


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=12)), max_size=6)
)
def test_each_entry_is_the_most_frequent_token_behind_its_context(texts: list[tuple[list[int], list[int]]]) -> None:
    behind = defaultdict[tuple[int, ...], Counter[int]](Counter)
    for prompt, answer in texts:
        ids = [*prompt, *answer]
        for position in range(len(prompt), len(ids)):
            for length in range(1, min(LONGEST, position) + 1):
                behind[tuple(ids[position - length : position])][ids[position]] += 1
    found = count_phrases([sample_of(*text) for text in texts], 1000)
    assert (found.contexts[1:] > found.contexts[:-1]).all()
    contexts = {number_of(context): context for context in behind}
    for number, token, chance in zip(*(column.tolist() for column in found), strict=True):
        counts = behind[contexts[number]]
        assert counts[token] == max(counts.values())
        assert counts.total() > 1
        assert chance == round(CHANCES * counts[token] / (counts.total() + 1)) >= 0.2 * CHANCES - 1


def test_a_longer_context_has_an_entry_where_it_says_something_else() -> None:
    texts = [([9], [1, 2, 3])] * 4 + [([8], [1, 2, 5])] * 4
    phrases = Phrases(count_phrases([sample_of(*text) for text in texts], 100))
    assert phrases.following([9, 1, 2]) == (pytest.approx(4 / 5, abs=0.01), 3)
    assert phrases.following([8, 1, 2]) == (pytest.approx(4 / 5, abs=0.01), 5)
    assert phrases.following([7, 1]) == (pytest.approx(8 / 9, abs=0.01), 2)
    assert phrases.following([7, 7]) is None
    assert phrases.following([]) is None
    table = count_phrases([sample_of(*text) for text in texts], 100)
    assert number_of([9, 1]) not in table.contexts.tolist()  # as behind 1 alone
    assert len(count_phrases([sample_of(*text) for text in texts], 2).contexts) == 2


def test_nothing_is_counted_without_answers_or_repetition() -> None:
    for samples in ([], [sample_of([1, 2, 3], [])], [sample_of([1], [2, 3])]):
        assert count_phrases(samples, 10).contexts.size == 0


def test_a_table_is_read_as_it_was_written_and_a_damaged_one_is_refused() -> None:
    table = table_of({(3,): (4, 0.5), (2, 3): (5, 0.9)})
    file = io.BytesIO()
    write_phrases(file, table)
    for found, expected in zip(read_phrases(io.BytesIO(file.getvalue()), 6), table, strict=True):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(InputFault, match="have token 5: expected tokens below 5"):
        read_phrases(io.BytesIO(file.getvalue()), 5)
    with pytest.raises(InputFault, match="is not an array"):
        read_phrases(io.BytesIO(file.getvalue()[:-3]), 6)
    twice = io.BytesIO()
    write_phrases(twice, PhraseTable(*(np.concatenate((column, column)) for column in table)))
    with pytest.raises(InputFault, match="do not ascend"):
        read_phrases(io.BytesIO(twice.getvalue()), 6)
    other = io.BytesIO()
    np.save(other, np.zeros(3))
    with pytest.raises(InputFault, match="expected entries of"):
        read_phrases(io.BytesIO(other.getvalue()), 6)


def test_phrases_are_a_mechanism_of_an_adapter_folder(tmp_path: Path) -> None:
    table = table_of({(3,): (4, 0.5), (2, 3): (5, 0.9)})
    write_mechanisms(tmp_path, [Mechanism(table)])
    (found,) = read_mechanisms(tmp_path, read_sar_config(tmp_path))
    assert isinstance(found, Mechanism)
    for column, expected in zip(found.table, table, strict=True):
        np.testing.assert_array_equal(column, expected)
        assert column.dtype == expected.dtype
    state = dict(found.state())
    for damaged in ({"contexts": state["contexts"]}, {**state, "tokens": state["contexts"].clone()}):
        save_file(damaged, tmp_path / "phrases.safetensors")
        with pytest.raises(CheckpointError, match="expected contexts, tokens and chances, 2 each"):
            read_mechanisms(tmp_path, read_sar_config(tmp_path))


LANGUAGE = Language(4, quality=50, end_every=10**9)
PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "options", [{}, {"mask_slots": 0, "lookup": 6}, {"sampling": Sampling(temperature=0.2, seed=2)}]
)
def test_phrases_are_drafted_and_change_no_text(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    decoding = Decoding(max_tokens=60, fork=False, **options)
    with hash_runtime(LANGUAGE) as runtime:
        before = runtime.generate(PROMPT, decoding)
    table = count_phrases([sample_of(PROMPT, before.tokens)] * 2, 1000)
    monkeypatch.setattr(session, "read_phrase_table", lambda bundle: table)
    with hash_runtime(LANGUAGE) as runtime:
        found = runtime.generate(PROMPT, decoding)
        off = runtime.generate(PROMPT, replace(decoding, lookup=0))
    assert found.tokens == before.tokens == off.tokens
    accepted = found.statistics.accepted_by_source
    assert sum(count for source, count in accepted.items() if "phrase" in source.split("+")) > 20
    assert found.statistics.steps < before.statistics.steps
    assert not any("phrase" in source for source in off.statistics.drafted_by_source)


class Given:
    """A source that proposes one token."""

    source, copying, anywhere, depths = "given", False, False, 1

    def behind(self, depth: int, path: Sequence[int]) -> list[tuple[float, int]]:
        return [(0.9, 7)]


def test_phrases_continue_the_tokens_of_other_sources() -> None:
    phrases = Phrases(table_of({(2, 7): (8, 0.9), (2, 7, 8): (9, 0.9)}))
    proposals = [Given(), PhraseProposal(phrases, [1, 2], 4, Acceptance(0))]
    curve = DraftPlanner(FREE_STEPS).costs.curve(8, 1, 1, 1)
    draft = tree(proposals, DraftConfig(lookup=4, rows=8), 50, 8, Outlook(curve, 1.0, (), 2))
    assert draft.tokens == (7, 8, 9)
    assert draft.sources == ("given", "phrase", "phrase")
    assert draft.parents == (0, 1, 2)


def test_phrases_that_are_wrong_are_trusted_less() -> None:
    phrases = Phrases(table_of({(2,): (3, 0.8), (3,): (4, 0.8)}))
    acceptance = Acceptance(0)

    def proposal() -> PhraseProposal:
        return PhraseProposal(phrases, [1, 2], 4, acceptance)

    assert proposal().best() == [3, 4]
    (first,) = proposal().behind(0, (2,))
    for _ in range(100):
        proposal().learn([3, 5], 0.1)
    ((chance, token),) = proposal().behind(0, (2,))
    assert (first[1], token) == (3, 3)
    assert chance == pytest.approx(0.5, abs=0.1)
    assert chance < first[0]


@pytest.mark.slow
def test_an_export_counts_the_phrases_of_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from spaceport.runtime.session import Runtime
    from spaceport.tools.cli import INPUT, OK, run

    answers, bundle = tmp_path / "answers.jsonl", tmp_path / "bundle"
    lines = [{"prompt": f"Which {number}?", "response": "Red or green, and then blue."} for number in range(3)]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    assert run(["export", str(TINY), str(bundle), "--phrases", str(answers)]) == OK
    with Runtime.open(bundle, max_seq_len=100) as runtime:
        text = runtime.tokens_of("Red or green, and then blue.")
        table = session.read_phrase_table(runtime.bundle)
        assert table is not None
        found = Phrases(table).following(text[:4])
        assert found is not None
        assert found[1] == text[4]
        assert "phrases" in runtime.bundle.manifest.drafts.mechanisms
    answers.write_text(json.dumps({"prompt": "a", "response": "b"}), "utf-8")
    assert run(["export", str(TINY), str(bundle), "--phrases", str(answers), "--overwrite"]) == INPUT
    assert "no phrase occurs 2 times in its answers" in capsys.readouterr().err
