"""Plot: bars for each mode, lines for modes with drafts, and the label of a replay."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from spaceport.tools.bench.decode.options import DecodeOptions
from spaceport.tools.bench.decode.plot import plot_of
from spaceport.tools.bench.decode.summary import REPLAY_LABEL
from support.decode_report import decode_report

SVG = "{http://www.w3.org/2000/svg}"


def test_there_is_a_bar_for_each_mode_and_a_line_for_modes_with_drafts() -> None:
    root = ElementTree.fromstring(plot_of(decode_report()))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert texts[0] == "x.bundle, all thread(s), a CPU"
    assert not any(REPLAY_LABEL in text for text in texts)
    widths = [float(rect.attrib["width"]) for rect in root.iter(f"{SVG}rect") if rect.get("height") == "14"]
    assert widths[1] / widths[0] == pytest.approx(6**0.5, abs=0.01)  # speedup of the default over plain decoding
    assert widths[3] / widths[2] == pytest.approx(0.6, abs=0.01)  # times to the first token
    (line,) = (path for path in root.iter(f"{SVG}path") if path.get("stroke-width") == "2")
    heights = [float(point.split()[1]) for point in line.attrib["d"][1:].split(" L")]
    assert heights[1] - heights[0] == pytest.approx(180 * (0.75 - 0.5))


def test_a_replay_is_labelled() -> None:
    root = ElementTree.fromstring(plot_of(decode_report(options=DecodeOptions(rounds=2, replay=(0.79, 0.5)))))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert texts[1] == f"{REPLAY_LABEL}: 0.79, 0.5"


def test_all_text_is_inside_the_picture() -> None:
    root = ElementTree.fromstring(plot_of(decode_report()))
    height, width = float(root.attrib["height"]), float(root.attrib["width"])
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.attrib["y"]) <= height
        assert 0 <= float(element.attrib["x"]) <= width
