"""Figure: a self-contained SVG that shows each token of its trace once."""

from __future__ import annotations

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from hypothesis import given, settings

from spaceport.runtime.trace.trace import Trace
from spaceport.tools.report.figure import figure_of
from support.traced import CASES, TOKENIZER, Case, traced

SVG = "{http://www.w3.org/2000/svg}"


def having(root: Element, kind: str) -> list[Element]:
    """The elements of a class inside the cells, without those of names and of the legend."""
    cells = [element for element in root.iter() if "cell" in element.get("class", "").split()]
    return [part for cell in cells for part in cell.iter() if kind in part.get("class", "").split()]


@settings(max_examples=40)
@given(case=CASES)
def test_a_picture_marks_every_token_of_the_trace_once(case: Case) -> None:
    request, trace, _ = traced(case)
    root = ElementTree.fromstring(figure_of(trace.record(TOKENIZER), "title"))
    statistics = request.statistics
    accepted = sum(statistics.accepted_by_depth)
    assert len(having(root, "accepted")) == accepted
    assert len(having(root, "own")) == statistics.tokens - accepted
    assert len([part for part in root.iter() if part.get("class") == "name"]) == statistics.threads
    (summary,) = re.findall(r">(\d+ tokens? in [^<]+)<", figure_of(trace.record(), "title"))
    assert f"; {accepted} of {sum(statistics.drafted_by_depth)} draft token" in summary
    assert summary.startswith(f"{statistics.tokens} token")


def test_a_picture_has_colours_for_light_and_dark_a_legend_inside_and_loads_nothing() -> None:
    picture = figure_of(traced(Case(44, max_threads=2))[1].record(TOKENIZER), "a < b & \x1b")
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert root.get("aria-label") == "a < b & ⟨1B⟩"
    assert "@media (prefers-color-scheme: dark)" in picture
    assert not [element for element in root.iter() if element.tag == f"{SVG}a" or element.get("href")]
    assert "url(" not in picture
    variables = set(re.findall(r"var\((--\w+)\)", picture))
    for palette in re.findall(r":root \{(.*?)\}", picture, re.DOTALL):
        assert variables - {"--c"} <= set(re.findall(r"(--\w+):", palette))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    keys = [part for part in root if part.get("viewBox") == "0 0 20 12"]  # of the legend
    assert len(keys) >= 4
    for key in keys:
        assert float(key.attrib["x"]) + 20 <= width
        assert float(key.attrib["y"]) + 12 <= height
    for title in ("", "title"):
        assert ElementTree.fromstring(figure_of(Trace().record(), title)).tag == f"{SVG}svg"
