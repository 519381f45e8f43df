"""The picture of packages and imports is that of the sources, and can be read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from itertools import combinations
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from support.paths import DOCS


@pytest.fixture(scope="module")
def drawing() -> Iterator[SimpleNamespace]:
    """What the program defines that draws; it is part of the docs and of no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "drawing"))
        modules = [import_module(name) for name in ("import_graph", "row_layout", "architecture")]
        yield SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


def test_the_picture_is_that_of_the_imports(drawing: SimpleNamespace) -> None:
    found = drawing.draw(drawing.imports_between_boxes())
    assert (DOCS / "architecture.svg").read_text("utf-8") == found, "run: python docs/drawing/architecture.py"


def test_the_arrows_show_all_imports_and_point_down(drawing: SimpleNamespace) -> None:
    graph = drawing.imports_between_boxes()
    groups = drawing.groups_of(graph)
    arrows = drawing.arrows_of(graph, groups)
    rows = drawing.rows_of(groups, arrows)
    assert all(rows[above] < rows[below] for above, below in arrows)
    shown = {group[0]: frozenset(below for above, below in arrows if above == group[0]) for group in groups}
    first = {box: group[0] for group in groups for box in group}
    for box, reached in drawing.reach(graph).items():
        expected = {first[other] for other in reached} - {first[box]}
        assert drawing.reach(shown)[first[box]] == expected


def test_no_packages_import_each_other(drawing: SimpleNamespace) -> None:
    assert [group for group in drawing.groups_of(drawing.imports_between_boxes()) if len(group) > 1] == []


def test_no_box_covers_another_or_leaves_the_picture() -> None:
    root = ElementTree.fromstring((DOCS / "architecture.svg").read_text("utf-8"))
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    boxes = [shape.attrib for shape in root if shape.get("class") == "box"]
    edges = [tuple(float(box[name]) for name in ("x", "y", "width", "height")) for box in boxes]
    assert len(edges) == len([text for text in root if text.tag.endswith("text") and text.get("class") is None])
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in edges)
    for (x, y, w, h), (x2, y2, w2, h2) in combinations(edges, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_boxes_that_import_each_other_share_a_frame_and_no_arrow_leads_up(drawing: SimpleNamespace) -> None:
    ring = {"tools.a": {"tools.b"}, "tools.b": {"tools.c"}, "tools.c": {"tools.b", "exporter"}, "tools.d": {"tools.a"}}
    graph = {box: frozenset(found) for box, found in ring.items()}
    graph |= {"exporter": frozenset({"graphs"}), "graphs": frozenset(), "runtime": frozenset({"graphs"})}
    picture = drawing.draw(graph)
    assert picture.count('class="frame"') == 1
    for start, end in re.findall(r'class="arrow" d="M\d+ (\d+).*?(\d+)"/>', picture):
        assert int(start) < int(end)
    assert picture.count('class="arrow"') == 5
