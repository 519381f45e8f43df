"""Summary: the results of each mode from fixed statistics, their picture, and the speedup over prompts."""

from __future__ import annotations

import json
from dataclasses import astuple
from xml.etree import ElementTree

import pytest

from spaceport.tools.bench.compare.summary import Spread
from spaceport.tools.bench.decode.options import DecodeOptions
from spaceport.tools.bench.decode.plot import plot_of
from spaceport.tools.bench.decode.report import markdown_of
from spaceport.tools.bench.decode.speedup import speedup_of
from spaceport.tools.bench.decode.summary import REPLAY_LABEL, Rate
from support.decode_report import decode_report as report

SVG = "{http://www.w3.org/2000/svg}"


def test_rates_are_medians_of_rounds_and_speedups_are_paired() -> None:
    plain, default = report().modes
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
    first, empty = default.prompts
    assert (first.line, first.prompt_tokens, first.tokens) == (2, 3, 12)
    assert (first.tokens_per_second, first.speedup) == (pytest.approx(6.0), pytest.approx(2.5))
    assert (empty.line, empty.tokens, empty.tokens_per_second, empty.speedup) == (7, 0, 0.0, None)


def test_acceptance_is_counted_by_depth_and_by_source() -> None:
    plain, default = report().modes
    assert default.by_depth == (Rate(8, 6), Rate(4, 2))
    assert [rate.rate for rate in default.by_depth] == [0.75, 0.5]
    assert default.by_source == {"both": Rate(2, 2), "mask": Rate(10, 6)}
    assert default.tokens_per_step == pytest.approx(24 / 32)
    assert default.mean_acceptance_length == pytest.approx(1 + 8 / 32)
    assert (plain.by_depth, plain.by_source, plain.mean_acceptance_length) == ((), {}, 1.0)


def test_tables_have_every_result_and_list_differences() -> None:
    lines = markdown_of(report()).splitlines()
    assert "| plain | 0 | 2.06 | - | - | - | - | 250 | 570 | 0.50 | 25% | reference |" in lines
    assert (
        "| default | 0 | 4.00 | 2.00 (1.67-2.33) | 2.45 (2.00-3.00) | 2.45 (line 2) | 2.45 (line 2) | 150 | 200 | 0.75 | 25% | same as plain |"
        in lines
    )
    assert "| default | 0 | 1.25 | 0.75 of 8 | 0.50 of 4 | 0.60 of 10 | - | 1.00 of 2 |" in lines
    assert lines[-1] == "- All 6 compared completions are identical."
    assert "the default drafts pay: 2.45 times the speed of plain decoding" in lines[-2]

    wrong = markdown_of(report(different=12)).splitlines()
    assert wrong[-12].startswith("- 12 of 6 compared completions DIFFER")
    assert wrong[-11] == (
        "  - line 7, temperature 0, round 1, thread 0, token 4: default has token id 99, plain has the end"
    )
    assert wrong[-1] == "  - 2 more: --json lists them"
    assert "| 12 of 6 DIFFER |" in "\n".join(wrong)


def test_the_verdict_names_concurrent_requests_and_empty_completions() -> None:
    lines = markdown_of(report(options=DecodeOptions(rounds=2, requests=4))).splitlines()
    assert lines[-2] == (
        "- Temperature 0: the default drafts pay: 2.00 times the tokens/s of plain decoding with 4 requests "
        "(rounds from 1.67 to 2.33)."
    )
    empty = report(tokens_of_first=0)
    assert [(mode.speedup, mode.throughput_ratio) for mode in empty.modes] == [(None, None)] * 2
    assert markdown_of(empty).splitlines()[-2] == "- Temperature 0: all completions are empty."


def test_json_has_all_results_and_a_replay_is_labelled_in_json_and_markdown() -> None:
    data = json.loads(json.dumps(report(different=1).as_dict()))
    assert (data["kind"], data["identical"], data["prompts"]) == ("measured", False, 2)
    assert data["modes"][1]["by_depth"][0] == {"drafted": 8, "accepted": 6, "rate": 0.75}
    assert data["differences"][0]["found"] == 99
    replay = report(options=DecodeOptions(rounds=2, replay=(0.79, 0.5)))
    assert (replay.as_dict()["kind"], replay.as_dict()["label"]) == ("replay", REPLAY_LABEL)
    assert markdown_of(replay).startswith(f"**{REPLAY_LABEL}** (0.79, 0.5 by depth).")
    texts = [element.text or "" for element in ElementTree.fromstring(plot_of(replay)).iter(f"{SVG}text")]
    assert texts[1] == f"{REPLAY_LABEL}: 0.79, 0.5"


def test_the_picture_has_a_bar_for_each_mode_and_all_its_text_inside() -> None:
    root = ElementTree.fromstring(plot_of(report()))
    widths = [float(rect.attrib["width"]) for rect in root.iter(f"{SVG}rect") if rect.get("height") == "14"]
    assert widths[1] / widths[0] == pytest.approx(6**0.5, abs=0.01)  # speedup of the default over plain decoding
    assert widths[3] / widths[2] == pytest.approx(0.6, abs=0.01)  # times to the first token
    height, width = float(root.attrib["height"]), float(root.attrib["width"])
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.attrib["y"]) <= height
        assert 0 <= float(element.attrib["x"]) <= width


def test_the_speedup_is_the_geometric_mean_of_the_medians_of_prompts() -> None:
    found = speedup_of({3: [2.0, 2.0, 9.0], 5: [0.5, 0.1, 0.7], 9: [4.0, 4.1, 3.9]}, 0)
    assert found is not None
    assert found.mean == pytest.approx((2.0 * 0.5 * 4.0) ** (1 / 3))
    assert (found.worst, found.worst_line) == (pytest.approx(0.5), 5)
    assert (found.best, found.best_line) == (pytest.approx(4.0), 9)
    assert found.prompts == 3
    assert found.low < found.mean < found.high


def interval(ratios: dict[int, list[float]]) -> tuple[float, float]:
    found = speedup_of(ratios, 0)
    assert found is not None
    return found.low, found.high


def test_the_interval_is_that_of_resampled_prompts_and_rounds_and_depends_on_the_seed_only() -> None:
    assert interval({1: [1.5, 1.5], 2: [1.5, 1.5]}) == pytest.approx((1.5, 1.5))
    assert interval({1: [1.0], 2: [4.0]}) == pytest.approx((1.0, 4.0))  # both, or one of them twice: 1, 2 or 4
    assert interval({1: [1.0, 2.0, 4.0]}) == pytest.approx((1.0, 4.0))  # one prompt: only its rounds vary
    many = interval({line: [2.0 if line % 2 else 1.0] for line in range(400)})  # 2^(1/2 ± 1.96 · 0.025)
    assert many == pytest.approx((1.367, 1.463), abs=0.006)
    ratios = {line: [1.0 + line / 7, 1.1, 0.9] for line in range(9)}
    assert speedup_of(ratios, 4) == speedup_of(ratios, 4) != speedup_of(ratios, 5)
    assert speedup_of({}, 0) is None
