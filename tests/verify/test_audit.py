"""Audit: correct engines pass, rounding is a near-tie, and every injected fault is found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spaceport.graphs.contract.draft_methods import DraftMethod
from spaceport.runtime.comparison import ThreadTokens, thread_tokens_of
from spaceport.runtime.decode import step as loop
from spaceport.runtime.decode.plan import Part, Verdict, accept
from spaceport.runtime.decode.sequence import Ending, TokenSelector
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.session import Runtime
from spaceport.verify.audit import AuditReport, ModeCounts, audit, groups_for
from spaceport.verify.plain_logits import find_mismatches, noise_of, selection_rule, unmatched_threads
from spaceport.verify.prompts import TokenizedPrompt
from support.hash_engine import Language
from support.hash_runtime import hash_runtime
from support.paths import TINY
from support.small_bundle import forking_copy
from support.spoilt_engine import Logits, lenient, positions_of, spoilt_runtime, tied

PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))
DECODER, SCANNER, FOREIGN = PROMPTS.values()
TOKENS = 24


def prompts_of(runtime: Runtime, *texts: str) -> list[TokenizedPrompt]:
    return [
        TokenizedPrompt(line, tuple(runtime.tokens_of(text)))
        for line, text in enumerate(texts or (DECODER, FOREIGN), 1)
    ]


def audited(runtime: Runtime, *texts: str, max_tokens: int = TOKENS) -> AuditReport:
    with runtime:
        return audit(runtime, prompts_of(runtime, *texts), max_tokens)


def modes(report: AuditReport, requests: int) -> dict[str, ModeCounts]:
    return {row.mode: row for row in report.modes if row.requests == requests and not row.reference}


@pytest.mark.parametrize("lowering", ["scatter", "append"])
def test_a_correct_bundle_is_lossless(tiny_bundle: Path, tiny_append_bundle: Path, lowering: str) -> None:
    bundle, widths = tiny_bundle if lowering == "scatter" else tiny_append_bundle, set[int]()
    runtime = spoilt_runtime(bundle, before=lambda batch: widths.add(batch.input_ids.shape[1]), requests=3)
    report = audited(runtime, *PROMPTS.values())
    drafts = ["chain k = 5", "chain k = 1", "tree with lookup", "tree with lookup, sampled"]
    assert list(modes(report, 1)) == drafts
    assert sorted(modes(report, 3)) == sorted([*drafts, "plain", "plain, sampled"])
    assert all(row.completions == 3 and row.tokens == 3 * TOKENS for row in report.modes)
    assert all(row.identical == row.completions for row in report.drafted)
    assert all(row.steps < 60 for name, row in modes(report, 1).items() if name != "tree with lookup, sampled")
    assert [(one.plan.rows, one.plan.requests) for one in report.noise] == [
        *((rows, 1) for rows in (1, 2, 4, 9, 16, 36, 64)),
        *((rows, count) for count in (2, 3) for rows in (1, 9)),
    ]
    assert all(one.positions == 3 * (TOKENS + 1) for one in report.noise if one.plan.requests != 2)
    assert all(one.positions == 4 * (TOKENS + 1) for one in report.noise if one.plan.requests == 2)  # one thread twice
    assert noise_of(report.noise) < 1e-4
    assert {1, 2, 4, 9, 16, 36} <= widths
    assert report.passed
    assert report.summary.startswith("lossless: 30 completions, 720 tokens, 0 faults, 0 near-ties (noise ")


def test_a_bundle_without_mask_slots_is_audited_with_prompt_lookup_only(tiny_bundle: Path) -> None:
    runtime = spoilt_runtime(tiny_bundle)
    manifest = runtime.bundle.manifest
    plain = replace(manifest, drafts=DraftMethod(), tokens=replace(manifest.tokens, mask=()))
    bundle = replace(runtime.bundle, manifest=plain)
    report = audited(Runtime(bundle, runtime.engine, 128))
    assert list(modes(report, 1)) == ["lookup", "lookup, sampled"]
    assert report.passed
    assert modes(report, 1)["lookup"].steps < 2 * TOKENS


@pytest.mark.parametrize("bundle", ["tiny_bundle", "tiny_int8_bundle"])
def test_every_thread_of_a_completion_is_audited(request: pytest.FixtureRequest, bundle: str, tmp_path: Path) -> None:
    forking = forking_copy(request.getfixturevalue(bundle), tmp_path / "bundle")
    runtime = Runtime.open(forking, max_seq_len=160, max_requests=2, threads=1)
    report = audited(runtime, DECODER, max_tokens=40)
    forked = [row for row in report.drafted if "forked" in row.mode]
    assert {(row.mode, row.requests) for row in forked} >= {
        (f"{mode}, forked", requests) for mode in ("chain k = 5", "tree with lookup") for requests in (1, 2)
    }
    assert "plain, forked" in {row.mode for row in forked}
    assert min(row.tokens for row in forked) > 2 * 40  # more than one thread generates tokens
    assert all(row.identical == row.completions for row in report.drafted)
    assert bundle == "tiny_bundle" or all(row.near_ties == 0 for row in report.modes)
    assert report.passed


def test_threads_cut_because_kv_slots_ran_out_are_no_fault() -> None:
    """Where each thread is cut depends on how fast the others were, so the lengths are not compared."""
    runtime = hash_runtime(Language(0, quality=70, fork_every=2), max_seq_len=48, requests=2)
    prompts = [TokenizedPrompt(1, (1, 2, 3)), TokenizedPrompt(2, (4, 5, 6, 7))]
    drafted = groups_for(runtime.bundle.manifest, runtime.exactness, 30)[-1].drafted
    endings = [runtime.generate(prompt.tokens, mode.decoding).ending for prompt in prompts for mode in drafted]
    assert "total" in endings
    report = audit(runtime, prompts, 30)
    assert report.passed
    assert report.mismatches == []
    assert all(row.identical == 2 for row in report.drafted)
    runtime.close()


def off_by_one(part: Part, logits: Logits, choose: TokenSelector, *limits: int) -> Verdict:
    """An acceptance rule that reads the logits of the neighbouring row."""
    return accept(part, np.roll(logits, 1, axis=0) if part.draft.tokens else logits, choose, *limits)


@pytest.mark.parametrize(
    "wrong", [lenient(0.0, 5.0), lenient(5.0, np.inf), off_by_one], ids=["small margin", "large margin", "off by one"]
)
def test_a_wrong_acceptance_rule_is_a_fault(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(loop, "accept", wrong)
    runtime = spoilt_runtime(tiny_bundle)
    report = audited(runtime)
    assert all(one.passed for one in report.noise)
    assert sum(row.faults for row in report.drafted) == report.faults > 0
    assert report.summary.startswith("NOT LOSSLESS: 8 completions, 192 tokens, ")
    graded = next(graded for graded in report.mismatches if graded.grade == "FAULT")
    assert graded.mismatch.margin > 2 * noise_of(report.noise)
    assert graded.expected != graded.found
    assert 1 <= graded.mismatch.token <= TOKENS


@pytest.mark.parametrize("fork_every", [10**9, 3])
def test_a_tie_that_the_step_width_decides_is_a_near_tie(fork_every: int) -> None:
    """The hash engine has no noise of its own, so the measured noise is the injected one."""
    language = Language(5, end_every=10**9, fork_every=fork_every)
    with hash_runtime(language, requests=2, after=tied(1e-7)) as runtime:
        report = audit(runtime, [TokenizedPrompt(1, (1, 2, 3)), TokenizedPrompt(2, (4, 5, 6, 7))], 30)
    assert report.passed
    assert noise_of(report.noise) == pytest.approx(1e-7, rel=1e-3)
    assert [one.name for one in report.noise if one.largest == 0] == ["1 row", "2 x 1 row"]
    near = [row for row in report.drafted if row.near_ties]
    assert {row.mode for row in near} >= {"chain k = 5", "chain k = 1", "tree with lookup"}
    assert max(row.margin or 0 for row in near) == pytest.approx(1e-7, rel=1e-3)
    assert any(row.identical < row.completions for row in near)
    assert any("forked" in row.mode and row.tokens > 2 * 30 for row in near) == (fork_every == 3)
    assert report.summary.endswith(" near-ties (margin 1e-07, noise 1e-07)")


def test_noise_beyond_rounding_is_a_fault_and_explains_no_mismatch(tiny_bundle: Path) -> None:
    runtime = spoilt_runtime(tiny_bundle, tied(1e-2))
    report = audited(runtime)
    assert [one.name for one in report.noise if one.passed] == ["1 row"]
    assert noise_of(report.noise) < 1e-4
    tied_apart = [graded for graded in report.mismatches if graded.mismatch.margin == pytest.approx(1e-2, rel=1e-2)]
    assert tied_apart
    assert {graded.grade for graded in tied_apart} == {"FAULT"}
    assert not report.passed


def hide_slots(batch: Batch) -> None:
    if batch.input_ids.shape[1] in (9, 36):
        batch.attention_mask[..., 8:16] = False
        # each row sees itself
        np.put_along_axis(batch.attention_mask, batch.slot_ids[:, None, :, None], True, axis=3)


def raise_an_eighth(batch: Batch, logits: Logits) -> None:
    """By less than the tolerance of the type, and much more than other widths change."""
    if batch.input_ids.shape[1] == 36:
        logits[..., 7::8] += 1e-3


def lose_a_number(batch: Batch, logits: Logits) -> None:
    if batch.input_ids.shape[1] == 16:
        logits[:, -1, 7] = np.nan


@pytest.mark.parametrize(
    ("spoil", "failed"),
    [
        pytest.param({"before": hide_slots}, ["9 rows", "36 rows"], id="a wrong mask"),
        pytest.param({"after": raise_an_eighth}, ["36 rows"], id="outlying noise"),
        pytest.param({"after": lose_a_number}, ["16 rows"], id="NaN"),
    ],
)
def test_a_fault_of_wide_steps_is_one_of_these_widths(
    tiny_bundle: Path, spoil: Any, failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, cleared = spoilt_runtime(tiny_bundle, **spoil), list[int]()
    monkeypatch.setattr(runtime.engine, "clear", cleared.append)
    report = audited(runtime)
    assert [one.name for one in report.noise if not one.passed] == failed
    assert noise_of(report.noise) < 1e-4
    if spoil.get("after") is lose_a_number:
        assert cleared
        assert next(one.as_dict()["noise"] for one in report.noise if not one.passed) is None
    assert not report.passed


@pytest.fixture(scope="module")
def correct(tiny_bundle: Path) -> Iterator[Runtime]:
    with spoilt_runtime(tiny_bundle) as opened:
        yield opened


def plain_mode(runtime: Runtime) -> Decoding:
    return groups_for(runtime.bundle.manifest, runtime.exactness, TOKENS)[0].plain.decoding


def plain_thread(runtime: Runtime) -> ThreadTokens:
    (thread,) = thread_tokens_of(runtime.generate(SCANNER, plain_mode(runtime)), None).values()
    return thread


def found_in(runtime: Runtime, thread: ThreadTokens, plain: ThreadTokens, limit: int) -> list[tuple[int, float, str]]:
    """Position, margin and reason of each mismatch."""
    rule = selection_rule(plain_mode(runtime), runtime.bundle.manifest.tokens)
    found = find_mismatches(runtime.engine, rule, thread, limit, plain)
    return [(mismatch.position, mismatch.margin, mismatch.reason) for mismatch in found]


def test_a_thread_that_ends_too_early_or_too_late_is_a_fault(correct: Runtime) -> None:
    plain = plain_thread(correct)
    limit = len(plain.tokens)
    assert found_in(correct, plain, plain, limit) == []
    early = (limit - 2, np.inf, f"the thread ends too early, its limit is {limit} tokens")
    assert found_in(correct, replace(plain, tokens=plain.tokens[:-2]), plain, limit) == [early]
    late = (limit + 1, np.inf, f"the thread ends too late, its limit is {limit} tokens")
    assert late in found_in(correct, replace(plain, tokens=(*plain.tokens, 5)), plain, limit)
    for tokens in (plain.tokens[:-2], plain.tokens):
        ((position, margin, reason),) = found_in(correct, replace(plain, tokens=tokens, ending="end"), plain, limit)
        assert (position, reason) == (len(tokens), "")
        assert 1 < margin < np.inf


def test_a_thread_is_verified_token_by_token_up_to_its_cut(tiny_bundle: Path, correct: Runtime) -> None:
    plain = plain_thread(correct)
    limit = len(plain.tokens)
    banned = replace(plain, tokens=(*plain.tokens[:-1], correct.bundle.manifest.tokens.mask[0]))
    assert found_in(correct, banned, plain, limit) == [(limit - 1, np.inf, "")], "never a near-tie"
    other = replace(plain, tokens=(*plain.tokens[:-2], 5, plain.tokens[-1]))
    ((first, margin, reason),) = found_in(correct, plain, other, limit)
    assert (first, reason) == (limit - 2, "")
    assert margin == found_in(correct, other, plain, limit)[0][1] > 1, "a plain text that is not reproduced is as wrong"
    cut = replace(plain, tokens=plain.tokens[:-5], ending="total")
    assert found_in(correct, cut, plain, limit) == found_in(correct, plain, cut, limit) == []
    assert found_in(correct, other, cut, limit)[0][0] == limit - 2

    def spoil(batch: Batch, logits: Logits) -> None:
        logits[positions_of(batch) == limit - 1, plain.tokens[-1]] = np.nan

    with spoilt_runtime(tiny_bundle, spoil) as spoilt:
        (first, _, _), (last, margin, reason) = found_in(spoilt, other, plain, limit)
    assert (first, last, reason) == (limit - 2, limit - 1, "the logits hold NaN")
    assert np.isnan(margin)


def thread(path: tuple[int, ...], *tokens: int, ending: Ending = "length") -> ThreadTokens:
    return ThreadTokens(path, (1, 2, *tokens), 2, ending)


def test_a_thread_that_is_missing_is_a_fault() -> None:
    without: dict[tuple[int, ...], ThreadTokens] = {(): thread((), 3)}
    whole = {**without, (0,): thread((0,), 4)}
    (missing,) = unmatched_threads(without, whole)
    assert (missing.path, missing.reason) == ((0,), "the thread is missing")
    assert [mismatch.reason for mismatch in unmatched_threads(whole, without)] == ["plain decoding has no such thread"]
    assert unmatched_threads(whole, whole) == []
    assert unmatched_threads({(): thread((), 5)}, whole) == []  # a different parent, which need not fork
    assert unmatched_threads({(): thread((), 3, ending="total")}, whole) == []
