"""`spaceport demo`: its table compares like with like and tells a text that drafts have changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spaceport.runtime.session import Runtime
from spaceport.tools.cli.demo import MODES, DecodingMode, Timed, compare, lines_of, play, timed
from support.forking_bundle import forking_copy
from support.paths import TINY
from support.small_bundle import edit

DECODER: str = json.loads((TINY / "prompts.json").read_text("utf-8"))["begin of json/decoder.py"]
PLAIN, DRAFTED, FORKED, BOTH = MODES

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    bundle = forking_copy(tiny_bundle, tmp_path_factory.mktemp("forking") / "bundle")
    with Runtime.open(bundle, threads=1, max_seq_len=256, step_costs="free") as opened:
        yield opened


@pytest.fixture(scope="module")
def found(runtime: Runtime) -> dict[DecodingMode, Timed]:
    return timed(runtime, DECODER, 60)


def test_a_text_that_forks_is_written_in_four_ways(found: dict[DecodingMode, Timed]) -> None:
    assert list(found) == [PLAIN, DRAFTED, FORKED, BOTH]
    steps = [one.completion.statistics for one in found.values()]
    assert [len(one.completion.threads) for one in found.values()] == [1, 1, 5, 5]
    assert [any(one.drafted_by_depth) for one in steps] == [False, True, False, True]


def test_each_drafted_text_is_compared_with_the_one_above_it(found: dict[DecodingMode, Timed]) -> None:
    assert [line[-1] for line in lines_of(found)] == ["-", "same", "-", "same"]
    assert not found[FORKED].same_as(found[PLAIN])
    other = replace(found[BOTH], completion=replace(found[BOTH].completion, threads=found[PLAIN].completion.threads))
    assert [line[-1] for line in lines_of(found | {BOTH: other})][-1] == "DIFFERENT"
    assert [line[-1] for line in lines_of(found | {DRAFTED: found[FORKED]})] == ["-", "DIFFERENT", "-", "same"]


def test_a_difference_in_one_thread_is_one(found: dict[DecodingMode, Timed]) -> None:
    completion = found[BOTH].completion
    last = completion.threads[-1]
    threads = (*completion.threads[:-1], replace(last, tokens=(*last.tokens[:-1], 5)))
    assert not replace(found[BOTH], completion=replace(completion, threads=threads)).same_as(found[FORKED])


def test_a_line_tells_what_the_text_cost_and_how_fast_it_was_against_the_plain_one(
    found: dict[DecodingMode, Timed],
) -> None:
    halved = found | {BOTH: replace(found[BOTH], seconds=found[PLAIN].seconds / 2)}
    *_, line = lines_of(halved)
    count, cost = len(found[BOTH].completion.tokens), found[BOTH].completion.statistics
    assert line[:5] == ("forked + drafted", count, cost.steps, count / cost.steps, cost.peak_slots)
    assert line[5] == pytest.approx(found[PLAIN].seconds * 500)
    assert line[6] == pytest.approx(2 * count / len(found[PLAIN].completion.tokens))


def test_ways_that_make_no_difference_are_left_out(tiny_bundle: Path, tmp_path: Path, runtime: Runtime) -> None:
    assert list(timed(runtime, DECODER, 5)) == [PLAIN, DRAFTED]  # it would fork later
    with Runtime.open(tiny_bundle, threads=1, max_seq_len=256) as plain:
        assert list(timed(plain, DECODER, 5)) == [PLAIN, DRAFTED]
    copy = forking_copy(tiny_bundle, tmp_path / "bundle")
    edit(copy, lambda manifest: manifest.update(max_mask_slots=0, tokens={**manifest["tokens"], "mask": []}))
    with Runtime.open(copy, threads=1, max_seq_len=256) as unmasked:
        assert list(timed(unmasked, DECODER, 60)) == [PLAIN, FORKED]


def test_the_table_has_a_line_for_each_way_and_says_what_is_compared(runtime: Runtime, capfd: Capture) -> None:
    assert compare(runtime, {"long": DECODER, "short": DECODER[:9]}, 60)
    long, short, note = capfd.readouterr().out.split("\n\n")
    modes = ["plain", "drafted", "forked", "forked + drafted"]
    assert [line.split("  ")[0] for line in long.splitlines()] == ["long", "decoding", *modes]
    assert short.startswith("short\n")
    assert note.startswith("text: a drafted text is compared with the one in the line above it")
    assert compare(runtime, {"short": DECODER}, 5)
    assert "compared" not in capfd.readouterr().out


def test_a_text_is_shown_thread_by_thread_with_its_drafts_in_brackets(runtime: Runtime, capfd: Capture) -> None:
    play(runtime, DECODER, 60)
    rows = capfd.readouterr().out.splitlines()
    assert [row[:10].rstrip() for row in rows if row[:10].strip()] == [
        "spine",
        *(f"thread {number}" for number in range(4)),
    ]
    shown = "".join(row[10:] for row in rows)
    assert [shown.count(f"<{number}>") for number in range(4)] == [1, 1, 1, 1]
    assert shown.count("[") > 5
