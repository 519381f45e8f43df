"""Judging: a text is held against one-row logits to its last token, and to where it had to end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.runtime.engine import Batch
from spaceport.runtime.session import Runtime
from spaceport.tools.verify.audit.judging import mismatches, rule_for, strays
from spaceport.tools.verify.audit.kinds import groups_for
from spaceport.tools.verify.feeding import Pace, feed
from spaceport.tools.verify.thread_tokens import ThreadTokens, thread_tokens_of
from support.paths import TINY
from support.spoilt_engine import Logits, places, spoilt_runtime

PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))
SCANNER = PROMPTS["end of json/scanner.py"]
TOKENS = 24


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Iterator[Runtime]:
    with spoilt_runtime(tiny_bundle)[0] as opened:
        yield opened


def plain_line(runtime: Runtime, max_tokens: int = TOKENS) -> ThreadTokens:
    decoding = groups_for(runtime.bundle.manifest, max_tokens)[0].plain.decoding
    (line,) = thread_tokens_of(runtime.generate(SCANNER, decoding), None).values()
    return line


def judged(runtime: Runtime, line: ThreadTokens, plain: ThreadTokens, limit: int) -> list[tuple[int, float, str]]:
    group = groups_for(runtime.bundle.manifest, TOKENS)[0]
    rule = rule_for(group, runtime.bundle.manifest.tokens)
    return [
        (mismatch.place, mismatch.margin, mismatch.said)
        for mismatch in mismatches(runtime.engine, rule, line, limit, plain)
    ]


def test_a_text_that_ends_elsewhere_is_a_fault(runtime: Runtime) -> None:
    plain = plain_line(runtime)
    limit = len(plain.tokens)
    early = "the text ends too early, its limit is "
    assert judged(runtime, plain, plain, limit) == []
    assert judged(runtime, replace(plain, tokens=plain.tokens[:-2]), plain, limit) == [
        (limit - 2, np.inf, f"{early}{limit}")
    ]
    longer = replace(plain, tokens=(*plain.tokens, 5))
    assert (limit + 1, np.inf, f"the text ends too late, its limit is {limit}") in judged(runtime, longer, plain, limit)
    ((place, margin, said),) = judged(runtime, replace(plain, tokens=plain.tokens[:-2], ended=True), plain, limit)
    assert (place, said) == (limit - 2, "")
    assert 1 < margin < np.inf
    ((place, margin, said),) = judged(runtime, replace(plain, ended=True), plain, limit)
    assert (place, said) == (limit, "")
    assert 1 < margin < np.inf


def test_a_text_whose_one_row_logits_are_no_numbers_is_a_fault(tiny_bundle: Path, runtime: Runtime) -> None:
    plain = plain_line(runtime)
    place = len(plain.tokens) - 1

    def spoil(batch: Batch, logits: Logits) -> None:
        logits[places(batch) == place, plain.tokens[place]] = np.nan

    other = replace(plain, tokens=(*plain.tokens[: place - 1], 5, plain.tokens[place]))
    with spoilt_runtime(tiny_bundle, spoil)[0] as spoilt:
        (first, _, _), (last, margin, said) = judged(spoilt, other, plain, len(plain.tokens))
    assert (first, last, said) == (place - 1, place, "the logits hold NaN")
    assert np.isnan(margin)


def test_two_texts_are_held_against_the_same_logits_wherever_they_part(runtime: Runtime) -> None:
    """A plain text that would not be written again is as suspicious as a drafted one."""
    plain = plain_line(runtime)
    other = replace(plain, tokens=(*plain.tokens[:-2], 5, plain.tokens[-1]))
    place = len(plain.tokens) - 2
    ((first, margin, said),) = judged(runtime, plain, other, len(plain.tokens))
    assert (first, said) == (place, "")
    assert margin == judged(runtime, other, plain, len(plain.tokens))[0][1] > 1


def test_a_text_that_goes_on_behind_its_end_is_a_fault(runtime: Runtime) -> None:
    plain = plain_line(runtime, max_tokens=64)
    assert plain.ended
    limit = plain.start + 64
    on = replace(plain, tokens=(*plain.tokens, *plain.tokens[-3:]), ended=False)
    found = judged(runtime, on, plain, limit)
    assert found[0][0] == len(plain.tokens)
    assert found[0][1] > 1
    assert found[-1][2].startswith("the text ends too early")


def test_a_token_that_may_not_be_written_is_never_a_near_tie(runtime: Runtime) -> None:
    plain = plain_line(runtime)
    mask = runtime.bundle.manifest.tokens.mask[0]
    wrong = replace(plain, tokens=(*plain.tokens[:-1], mask))
    assert judged(runtime, wrong, plain, len(plain.tokens)) == [(len(plain.tokens) - 1, np.inf, "")]


def test_a_line_that_was_cut_is_judged_as_far_as_it_came(runtime: Runtime) -> None:
    plain = plain_line(runtime)
    limit = len(plain.tokens)
    cut = replace(plain, tokens=plain.tokens[:-5], cut=True)
    assert judged(runtime, cut, plain, limit) == []
    assert judged(runtime, plain, cut, limit) == []
    wrong = replace(plain, tokens=(*plain.tokens[:-2], 5, plain.tokens[-1]))
    assert judged(runtime, wrong, cut, limit)[0][0] == limit - 2


def line(path: Sequence[int], *tokens: int, cut: bool = False) -> ThreadTokens:
    return ThreadTokens(tuple(path), (1, 2, *tokens), 2, cut=cut)


def test_a_thread_that_is_missing_is_a_fault() -> None:
    whole: dict[tuple[int, ...], ThreadTokens] = {(): line((), 3), (0,): line((0,), 4)}
    without: dict[tuple[int, ...], ThreadTokens] = {(): line((), 3)}
    assert [(mismatch.path, mismatch.said) for mismatch in strays(without, whole)] == [((0,), "the thread is missing")]
    assert [mismatch.said for mismatch in strays(whole, without)] == ["plain decoding has no such thread"]
    assert strays(whole, whole) == []
    assert strays({(): line((), 5)}, whole) == []  # another text, which need not fork
    assert strays({(): line((), 3, cut=True)}, whole) == []


def test_other_slots_and_gaps_between_them_count_as_noise(tiny_bundle: Path) -> None:
    """Drafts leave gaps, which later rows fill: sums are then taken in another order, with rows of any width."""
    runtime, engine = spoilt_runtime(tiny_bundle)
    with runtime:
        line = plain_line(runtime)
        heard: list[NDArray[np.int64]] = []
        engine.before = lambda batch: heard.append(batch.slot_ids.copy())
        feed(engine, [line], Pace(1, 1, 16, gaps=True), lambda *_: None)
    slots = np.concatenate([one[0] for one in heard])
    assert slots.size == len(line.tokens)
    assert (np.diff(slots[:16]) > 1).any()  # gaps
    assert (np.diff(slots) < 0).any()  # filled later
    assert len(set(slots.tolist())) == slots.size
