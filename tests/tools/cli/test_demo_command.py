"""`spaceport demo`: the table compares speculative runs with plain ones and reports every difference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spaceport.runtime.session import Runtime
from spaceport.tools.cli import run
from spaceport.tools.cli.demo import names_of, show_generation
from spaceport.tools.cli.demo_tables import (
    CHAT_LEGEND,
    LEGEND,
    THREADS_LEGEND,
    chat_rows,
    compare,
    compare_chats,
    rows_of,
)
from spaceport.tools.cli.exit_codes import USAGE
from spaceport.tools.demo.timing import MODES, DecodingMode, TimedCompletion, timed
from support.forking_bundle import forking_copy
from support.paths import TINY
from support.small_bundle import edit

DECODER: str = json.loads((TINY / "prompts.json").read_text("utf-8"))["begin of json/decoder.py"]
PLAIN, SPECULATIVE, PARALLEL, BOTH = MODES

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    bundle = forking_copy(tiny_bundle, tmp_path_factory.mktemp("forking") / "bundle")
    with Runtime.open(bundle, threads=1, max_seq_len=256, step_costs="free") as opened:
        yield opened


@pytest.fixture(scope="module")
def found(runtime: Runtime) -> dict[DecodingMode, TimedCompletion]:
    return timed(runtime, DECODER, 60)


def test_a_prompt_whose_output_forks_runs_in_four_modes(found: dict[DecodingMode, TimedCompletion]) -> None:
    assert list(found) == [PLAIN, SPECULATIVE, PARALLEL, BOTH]
    steps = [one.completion.statistics for one in found.values()]
    assert [len(one.completion.threads) for one in found.values()] == [1, 1, 5, 5]
    assert [any(one.drafted_by_depth) for one in steps] == [False, True, False, True]


def test_each_speculative_run_is_compared_with_the_run_above_it(found: dict[DecodingMode, TimedCompletion]) -> None:
    assert [row[-1] for row in rows_of(found)] == ["-", "identical", "-", "identical"]
    assert not found[PARALLEL].same_as(found[PLAIN])
    other = replace(found[BOTH], completion=replace(found[BOTH].completion, threads=found[PLAIN].completion.threads))
    assert [row[-1] for row in rows_of(found | {BOTH: other})][-1] == "DIFFERENT"
    assert [row[-1] for row in rows_of(found | {SPECULATIVE: found[PARALLEL]})] == ["-", "DIFFERENT", "-", "identical"]


def test_a_difference_in_one_thread_is_a_difference(found: dict[DecodingMode, TimedCompletion]) -> None:
    completion = found[BOTH].completion
    last = completion.threads[-1]
    threads = (*completion.threads[:-1], replace(last, tokens=(*last.tokens[:-1], 5)))
    assert not replace(found[BOTH], completion=replace(completion, threads=threads)).same_as(found[PARALLEL])


def test_a_row_shows_the_cost_and_the_speedup_over_plain_decoding(
    found: dict[DecodingMode, TimedCompletion],
) -> None:
    halved = found | {BOTH: replace(found[BOTH], seconds=found[PLAIN].seconds / 2)}
    *_, row = rows_of(halved)
    count, cost = len(found[BOTH].completion.tokens), found[BOTH].completion.statistics
    assert row[:5] == ("both", count, cost.steps, count / cost.steps, cost.peak_slots)
    assert row[5] == pytest.approx(found[PLAIN].seconds * 500)
    assert row[6] == pytest.approx(2 * count / len(found[PLAIN].completion.tokens))


def test_modes_that_change_nothing_are_left_out(tiny_bundle: Path, tmp_path: Path, runtime: Runtime) -> None:
    assert list(timed(runtime, DECODER, 5)) == [PLAIN, SPECULATIVE]  # too short to fork
    with Runtime.open(tiny_bundle, threads=1, max_seq_len=256) as plain:
        assert list(timed(plain, DECODER, 5)) == [PLAIN, SPECULATIVE]
    copy = forking_copy(tiny_bundle, tmp_path / "bundle")
    edit(copy, lambda manifest: manifest.update(max_mask_slots=0, tokens={**manifest["tokens"], "mask": []}))
    with Runtime.open(copy, threads=1, max_seq_len=256) as unmasked:
        assert list(timed(unmasked, DECODER, 60)) == [PLAIN, PARALLEL]


def test_the_table_has_a_row_for_each_mode_and_a_legend(runtime: Runtime, capfd: Capture) -> None:
    assert compare(runtime, {"long": DECODER, "short": DECODER[:9]}, 60)
    long, short, legend = capfd.readouterr().out.split("\n\n")
    modes = ["plain", "speculative", "parallel threads", "both"]
    assert [line.split("  ")[0] for line in long.splitlines()] == ["long", "decoding", *modes]
    assert short.startswith("short\n")
    assert legend == f"{LEGEND}\n{THREADS_LEGEND}\n"
    assert compare(runtime, {"short": DECODER}, 5)
    assert capfd.readouterr().out.split("\n\n")[-1] == f"{LEGEND}\n"


def test_one_table_for_all_prompts_ends_with_the_sums_of_modes_that_all_have(
    found: dict[DecodingMode, TimedCompletion],
) -> None:
    slow = {mode: replace(one, seconds=2 * one.seconds) for mode, one in found.items() if not mode.forks}
    rows = list(chat_rows({"a": found, "b": slow}))
    assert [row[:2] for row in rows] == [
        *(("a" if mode is PLAIN else "", mode.name) for mode in MODES),
        *(("b", "plain"), ("", "speculative"), ("all", "plain"), ("", "speculative")),
    ]
    plain, drafted = found[PLAIN], found[SPECULATIVE]
    tokens = len(drafted.completion.tokens)
    assert rows[-1][2:5] == (2 * tokens, 2 * drafted.completion.statistics.steps, rows[1][4])
    assert rows[-1][5] == pytest.approx(2 * tokens / (3 * drafted.seconds))
    assert rows[-1][6] == pytest.approx(drafted.tokens_per_second / plain.tokens_per_second)
    assert [row[-1] for row in rows] == ["-", "identical"] * 4
    other = {**slow, SPECULATIVE: replace(slow[SPECULATIVE], completion=found[PARALLEL].completion)}
    assert [row[-1] for row in chat_rows({"a": found, "b": other})][-3:] == ["DIFFERENT", "-", "DIFFERENT"]


def test_one_table_for_all_prompts_has_a_legend(runtime: Runtime, capfd: Capture) -> None:
    assert compare_chats(runtime, {"long": DECODER, "short": DECODER[:9]}, 20)
    printed = capfd.readouterr()
    assert printed.err.splitlines() == ["decoding prompt 1 of 2: long", "decoding prompt 2 of 2: short"]
    assert printed.out.endswith((f"\n\n{CHAT_LEGEND}\n", f"\n\n{CHAT_LEGEND}\n{THREADS_LEGEND}\n"))


def test_output_is_shown_by_thread_with_accepted_draft_tokens_in_brackets(runtime: Runtime, capfd: Capture) -> None:
    show_generation(runtime, DECODER, 60)
    rows = capfd.readouterr().out.splitlines()
    assert [row[:10].rstrip() for row in rows if row[:10].strip()] == [
        "root",
        *(f"thread {number}" for number in range(4)),
    ]
    shown = "".join(row[10:] for row in rows)
    assert [shown.count(f"<{number}>") for number in range(4)] == [1, 1, 1, 1]
    assert shown.count("[") > 5


def test_prompts_that_begin_alike_are_all_decoded() -> None:
    prompts = ("Write a Python function that adds", "Write a Python function that sorts", "import os")
    assert names_of(prompts) == ["1 Write a Python funct", "2 Write a Python funct", "import os"]


def test_prompts_for_a_page_are_refused_before_the_export(capfd: Capture) -> None:
    assert run(["demo", "--page", "--prompt", "x"]) == USAGE
    assert "--page with --prompt" in capfd.readouterr().err
