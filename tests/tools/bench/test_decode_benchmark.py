"""Decode benchmark: modes, differences, replays with given acceptance rates, and figures of measurements."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from spaceport.graphs.contract.draft_methods import DraftMethod
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode import ModeSummary, Rate, Spread, mode_summaries
from spaceport.tools.bench.decode_measuring import (
    MODES,
    PLAIN,
    DecodeMeasurements,
    DecodeMode,
    DecodeOptions,
    MeasuredCompletion,
    measure_modes,
    modes_for,
    parse_modes,
)
from spaceport.tools.bench.replay import SyntheticTexts, replay_runtime
from spaceport.tools.cli import ACCURACY, OK, run
from spaceport.verify.prompts import TokenizedPrompt
from support.paths import TINY
from support.planted import ignore_the_mask, planted

Capture = pytest.CaptureFixture[str]
Replayed = Callable[..., list[ModeSummary]]  # called with numbers of mask slots
TWO_MODES = (DecodeMode(PLAIN, Decoding(), PLAIN), DecodeMode("default", Decoding(), PLAIN))
PROMPTS = (TokenizedPrompt(2, (1, 2, 3)), TokenizedPrompt(7, (4,)))
# Seconds of each completion by mode, round and prompt; the second prompt's completion is empty in both modes.
SECONDS = {PLAIN: ((4.0, 1.0), (6.0, 1.0)), "default": ((2.0, 1.0), (2.0, 1.0))}
DRAFTED = {
    "drafted_by_depth": [4, 2],
    "accepted_by_depth": [3, 1],
    "drafted_by_source": {"mask": 5, "mask+lookup": 1},
    "accepted_by_source": {"mask": 3, "mask+lookup": 1},
}


pytestmark = pytest.mark.on_change("verify")  # runs thousands of steps


def summaries() -> tuple[ModeSummary, ...]:
    """The summaries of SECONDS and DRAFTED."""
    found = DecodeMeasurements()
    for mode, rounds in SECONDS.items():
        for number, row in enumerate(rounds, 1):
            found.seconds[mode, 0.0, number] = sum(row)
            for prompt, seconds in enumerate(row):
                statistics = Statistics(
                    steps=12 if mode == PLAIN else 8,
                    tokens=0 if prompt else 12,
                    engine_seconds=0.75 * seconds,
                    outside_seconds=0.25 * seconds,
                    first_token_seconds=seconds / 10,
                    seconds=seconds + 5,
                    waiting_seconds=5.0,
                    **({} if prompt or mode == PLAIN else DRAFTED),  # type: ignore[arg-type]
                )
                found.completions.append(MeasuredCompletion(mode, 0.0, number, prompt, statistics))
    return mode_summaries(found, TWO_MODES, PROMPTS, DecodeOptions(rounds=2, temperatures=(0.0,)))


def names_of(manifest: Manifest, names: tuple[str, ...] | None = None, fixed: tuple[int, ...] = ()) -> list[str]:
    return [mode.name for mode in modes_for(manifest, 8, names, fixed)]


def test_a_bundle_that_drafts_and_forks_has_all_modes_and_references_are_always_included(demo_bundle: Path) -> None:
    manifest = read_manifest(demo_bundle)
    assert names_of(manifest) == list(MODES)
    assert names_of(manifest, fixed=(3, 1, 3)) == [*MODES, "fixed 3", "fixed 1"]
    assert names_of(manifest, ("default",)) == ["plain", "default"]
    assert names_of(manifest, ("forked+drafted",)) == ["plain", "forked", "forked+drafted"]
    assert [mode.reference for mode in modes_for(manifest, 8)] == ["plain"] * 4 + ["forked"] * 2


def test_unsupported_modes_are_left_out_or_refused(tiny_bundle: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    assert names_of(manifest) == ["plain", "lookup", "masks", "default"]
    untuned = replace(manifest, drafts=DraftMethod())
    assert names_of(untuned) == ["plain", "default"]
    for refused, message in (
        (lambda: names_of(manifest, ("forked+drafted",)), "expected a bundle with a fork token"),
        (lambda: names_of(untuned, ("masks",)), "expected a bundle with mask slots"),
        (lambda: names_of(manifest, fixed=(6,)), r"--fixed names 6: .* this one has 5"),
        (lambda: parse_modes("plain,fast"), "--modes names 'fast': expected comma-separated names"),
    ):
        with pytest.raises(OptionFault, match=message):
            refused()


def test_each_mode_drafts_what_its_name_says(demo_bundle: Path) -> None:
    decodings: dict[str, Decoding] = {
        mode.name: mode.decoding for mode in modes_for(read_manifest(demo_bundle), 8, fixed=(2,))
    }
    drafts = {name: decoding.draft_config(DraftMethod(max_tokens=5)) for name, decoding in decodings.items()}
    assert {name: (draft.mask_slots, draft.lookup > 0) for name, draft in drafts.items()} == {
        "plain": (0, False),
        "lookup": (0, True),
        "masks": (5, False),
        "default": (5, True),
        "forked": (0, False),
        "forked+drafted": (5, True),
        "fixed 2": (2, False),
    }
    assert drafts["default"] == Decoding().draft_config(DraftMethod(max_tokens=5))
    assert drafts["fixed 2"].shape == "chain"
    assert [name for name, decoding in decodings.items() if decoding.fork] == ["forked", "forked+drafted"]
    assert {decoding.max_tokens for decoding in decodings.values()} == {8}


@contextmanager
def replayed(bundle: Path, acceptance: tuple[float, ...], requests: int = 1, seed: int = 0) -> Iterator[Replayed]:
    """Decodes synthetic texts with these acceptance rates in chains of a number of mask slots."""
    options = DecodeOptions(96, rounds=1, requests=requests)
    with Runtime.open(bundle, threads=1, max_requests=requests) as base:
        texts = SyntheticTexts(base.bundle.manifest, acceptance, 6, 16, 96, seed)
        with replay_runtime(base, texts) as runtime:
            assert (runtime.costs, runtime.exactness) == (base.costs, base.exactness)

            def of(*slots: int) -> list[ModeSummary]:
                modes = modes_for(base.bundle.manifest, 96, (), slots)
                measured = measure_modes(modes, runtime, texts.prompts, options, lambda line: None)
                assert not measured.differences
                assert set(measured.compared.values()) == {6 * 2}
                return list(mode_summaries(measured, modes, texts.prompts, options))

            yield of


@pytest.mark.slow
def test_chains_reach_the_tokens_per_step_that_the_acceptance_rates_imply(tiny_bundle: Path) -> None:
    with replayed(tiny_bundle, (0.79,) * 5) as of:
        plain, *chains = of(1, 3, 5)
    assert plain.tokens_per_step == 1.0
    for slots, chain in zip((1, 3, 5), chains, strict=True):
        # The first step has no candidates, and max_tokens cuts the last ones.
        assert chain.tokens_per_step == pytest.approx(sum(0.79**depth for depth in range(slots + 1)), rel=0.09)
        rates = [rate.rate for rate in chain.by_depth]
        assert rates == pytest.approx([0.79**depth for depth in range(1, slots + 1)], abs=0.07)
        assert set(chain.by_source) == {"mask"}


def test_a_replay_is_repeatable_also_with_concurrent_requests(tiny_bundle: Path) -> None:
    found = []
    for acceptance, requests, seed in (((0.6, 0.3), 1, 0), ((0.6, 0.3), 3, 0), ((0.6, 0.3), 1, 1), ((0.0, 0.5), 1, 0)):
        with replayed(tiny_bundle, acceptance, requests, seed) as of:
            found.append(of(2)[1].by_depth)
    alone, concurrent, other, never = found
    assert alone == concurrent != other
    assert [rate.rate for rate in never] == [0.0, 0.0]


def test_the_inner_engine_computes_every_row(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime.open(tiny_bundle, threads=1, max_seq_len=64) as base:
        fed: list[int] = []
        run = base.engine.run
        monkeypatch.setattr(base.engine, "run", lambda batch: (fed.append(batch.input_ids.size), run(batch))[1])
        texts = SyntheticTexts(base.bundle.manifest, (0.5,), 1, 8, 20)
        with replay_runtime(base, texts) as runtime:
            found = runtime.generate(
                list(texts.prompts[0].tokens), Decoding(max_tokens=20, mask_slots=2, draft="chain")
            )
    assert sum(fed) == found.statistics.rows
    assert found.tokens == tuple(texts.tokens[0, 8:28].tolist())


def test_rates_are_medians_of_rounds_and_speedups_are_paired() -> None:
    plain, default = summaries()
    assert plain.tokens_per_second == pytest.approx((12 / 5 + 12 / 7) / 2)
    assert default.tokens_per_second == pytest.approx(12 / 3)
    assert isinstance(default.throughput_ratio, Spread)
    assert astuple(default.throughput_ratio) == pytest.approx((2.0, 5 / 3, 7 / 3))
    assert (plain.speedup, plain.throughput_ratio) == (None, None)
    assert default.speedup is not None
    assert default.speedup.mean == pytest.approx((2 * 3) ** 0.5)  # the median of 2 and 3, in logarithms
    assert (default.speedup.worst_line, default.speedup.prompts) == (2, 1)  # the empty completion has no speed
    assert (plain.first_token_p50, plain.first_token_p95) == pytest.approx((0.25, 0.57))
    assert default.outside_share == pytest.approx(0.25)
    assert (default.by_depth, default.by_source) == (
        (Rate(8, 6), Rate(4, 2)),
        {"mask+lookup": Rate(2, 2), "mask": Rate(10, 6)},
    )
    assert (default.tokens_per_step, default.mean_acceptance_length) == pytest.approx((24 / 32, 1 + 8 / 32))
    first, empty = default.prompts
    assert (first.line, first.prompt_tokens, first.tokens) == (2, 3, 12)
    assert (first.tokens_per_second, first.speedup) == (pytest.approx(6.0), pytest.approx(2.5))
    assert (empty.line, empty.tokens, empty.tokens_per_second, empty.speedup) == (7, 0, 0.0, None)


def decode(bundle: Path, folder: Path, *options: str) -> int:
    """The exit code of `bench decode` with two prompts."""
    texts = list(json.loads((TINY / "prompts.json").read_text("utf-8")).values())[:2]
    (file := folder / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    words = ("decode", str(bundle), str(file), "--threads", "1", "--max-tokens", "16", "--rounds", "1")
    return run(["bench", *words, *options])


@pytest.mark.slow
def test_every_mode_and_temperature_is_reported(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    assert decode(tiny_bundle, tmp_path, "--temperatures", "0,0.8,0", "--fixed", "2,2") == OK
    out, err = capsys.readouterr()
    modes = ["plain", "lookup", "masks", "default", "fixed 2"]
    lines = [line.split(" | ")[:2] for line in out.splitlines() if line.endswith((" reference |", " same as plain |"))]
    assert lines == [[f"| {mode}", heat] for heat in ("0", "0.8") for mode in modes]
    assert out.splitlines()[-1] == "- All 32 compared completions are identical."
    assert "round 1 of 1, temperature 0.8" in err
    work = (
        r" 2 prompts, 5 modes, 1 rounds after a warm-up: about \d+ s if every completion has 16 tokens\n.* warming up, "
    )
    assert re.search(work, err)


@pytest.mark.slow
def test_what_differs_is_reported_with_exit_code_4(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    wrong = planted(tiny_bundle, tmp_path / "wrong", ignore_the_mask)
    assert decode(wrong, tmp_path) == ACCURACY
    out = capsys.readouterr().out
    assert " DIFFER |" in out
    assert "compared completions DIFFER; `spaceport audit` separates rounding from faults:" in out
    assert "  - line 2, temperature 0, warm-up, token " in out
