"""Mismatches: a completion is verified by one-row logits to its last token, and its length is verified too."""

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
from spaceport.tools.verify.audit.mismatches import find_mismatches, selection_rule, unmatched_threads
from spaceport.tools.verify.audit.modes import groups_for
from spaceport.tools.verify.feeding import FeedPlan, feed
from spaceport.tools.verify.thread_tokens import ThreadTokens, thread_tokens_of
from support.paths import TINY
from support.spoilt_engine import Logits, positions_of, spoilt_runtime

PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))
SCANNER = PROMPTS["end of json/scanner.py"]
TOKENS = 24


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Iterator[Runtime]:
    with spoilt_runtime(tiny_bundle)[0] as opened:
        yield opened


def plain_thread(runtime: Runtime, max_tokens: int = TOKENS) -> ThreadTokens:
    decoding = groups_for(runtime.bundle.manifest, runtime.exactness, max_tokens)[0].plain.decoding
    (thread,) = thread_tokens_of(runtime.generate(SCANNER, decoding), None).values()
    return thread


def found_in(runtime: Runtime, thread: ThreadTokens, plain: ThreadTokens, limit: int) -> list[tuple[int, float, str]]:
    """Position, margin and reason of each mismatch."""
    group = groups_for(runtime.bundle.manifest, runtime.exactness, TOKENS)[0]
    rule = selection_rule(group, runtime.bundle.manifest.tokens)
    return [
        (mismatch.position, mismatch.margin, mismatch.reason)
        for mismatch in find_mismatches(runtime.engine, rule, thread, limit, plain)
    ]


def test_a_thread_that_ends_too_early_or_too_late_is_a_fault(runtime: Runtime) -> None:
    plain = plain_thread(runtime)
    limit = len(plain.tokens)
    early = "the thread ends too early, its limit is "
    assert found_in(runtime, plain, plain, limit) == []
    assert found_in(runtime, replace(plain, tokens=plain.tokens[:-2]), plain, limit) == [
        (limit - 2, np.inf, f"{early}{limit} tokens")
    ]
    longer = replace(plain, tokens=(*plain.tokens, 5))
    late = (limit + 1, np.inf, f"the thread ends too late, its limit is {limit} tokens")
    assert late in found_in(runtime, longer, plain, limit)
    for tokens in (plain.tokens[:-2], plain.tokens):
        ((position, margin, reason),) = found_in(runtime, replace(plain, tokens=tokens, ended=True), plain, limit)
        assert (position, reason) == (len(tokens), "")
        assert 1 < margin < np.inf


def test_nan_in_the_logits_of_a_step_of_one_row_is_a_fault(tiny_bundle: Path, runtime: Runtime) -> None:
    plain = plain_thread(runtime)
    position = len(plain.tokens) - 1

    def spoil(batch: Batch, logits: Logits) -> None:
        logits[positions_of(batch) == position, plain.tokens[position]] = np.nan

    other = replace(plain, tokens=(*plain.tokens[: position - 1], 5, plain.tokens[position]))
    with spoilt_runtime(tiny_bundle, spoil)[0] as spoilt:
        (first, _, _), (last, margin, reason) = found_in(spoilt, other, plain, len(plain.tokens))
    assert (first, last, reason) == (position - 1, position, "the logits hold NaN")
    assert np.isnan(margin)


def test_the_margin_of_the_first_difference_does_not_depend_on_which_thread_is_plain(runtime: Runtime) -> None:
    """A plain completion that is not reproduced is as wrong as a drafted one."""
    plain = plain_thread(runtime)
    other = replace(plain, tokens=(*plain.tokens[:-2], 5, plain.tokens[-1]))
    position = len(plain.tokens) - 2
    ((first, margin, reason),) = found_in(runtime, plain, other, len(plain.tokens))
    assert (first, reason) == (position, "")
    assert margin == found_in(runtime, other, plain, len(plain.tokens))[0][1] > 1


def test_a_thread_that_continues_after_its_end_token_is_a_fault(runtime: Runtime) -> None:
    plain = plain_thread(runtime, max_tokens=64)
    assert plain.ended
    limit = plain.start + 64
    longer = replace(plain, tokens=(*plain.tokens, *plain.tokens[-3:]), ended=False)
    found = found_in(runtime, longer, plain, limit)
    assert found[0][0] == len(plain.tokens)
    assert found[0][1] > 1
    assert found[-1][2].startswith("the thread ends too early")


def test_a_banned_token_is_never_a_near_tie_and_a_cut_thread_is_verified_up_to_the_cut(runtime: Runtime) -> None:
    plain = plain_thread(runtime)
    limit = len(plain.tokens)
    wrong = replace(plain, tokens=(*plain.tokens[:-1], runtime.bundle.manifest.tokens.mask[0]))
    assert found_in(runtime, wrong, plain, limit) == [(limit - 1, np.inf, "")]
    cut = replace(plain, tokens=plain.tokens[:-5], cut=True)
    assert found_in(runtime, cut, plain, limit) == []
    assert found_in(runtime, plain, cut, limit) == []
    wrong = replace(plain, tokens=(*plain.tokens[:-2], 5, plain.tokens[-1]))
    assert found_in(runtime, wrong, cut, limit)[0][0] == limit - 2


def thread(path: Sequence[int], *tokens: int, cut: bool = False) -> ThreadTokens:
    return ThreadTokens(tuple(path), (1, 2, *tokens), 2, cut=cut)


def test_a_thread_that_is_missing_is_a_fault() -> None:
    without: dict[tuple[int, ...], ThreadTokens] = {(): thread((), 3)}
    whole = {**without, (0,): thread((0,), 4)}
    (missing,) = unmatched_threads(without, whole)
    assert (missing.path, missing.reason) == ((0,), "the thread is missing")
    assert [mismatch.reason for mismatch in unmatched_threads(whole, without)] == ["plain decoding has no such thread"]
    assert unmatched_threads(whole, whole) == []
    assert unmatched_threads({(): thread((), 5)}, whole) == []  # a different parent, which need not fork
    assert unmatched_threads({(): thread((), 3, cut=True)}, whole) == []


def test_noise_is_measured_with_gaps_between_kv_slots(tiny_bundle: Path) -> None:
    """Drafts leave gaps that later rows fill, which changes the order of floating-point sums at every width."""
    runtime, engine = spoilt_runtime(tiny_bundle)
    with runtime:
        fed = plain_thread(runtime)
        slot_ids: list[NDArray[np.int64]] = []
        engine.before = lambda batch: slot_ids.append(batch.slot_ids.copy())
        feed(engine, [fed], FeedPlan(1, 1, 16, gaps=True), lambda *_: None)
    slots = np.concatenate([one[0] for one in slot_ids])
    assert slots.size == len(fed.tokens)

    assert (np.diff(slots[:16]) > 1).any()  # gaps
    assert (np.diff(slots) < 0).any()  # filled later
    assert len(set(slots.tolist())) == slots.size
