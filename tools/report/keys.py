"""Keys: what the marks of the drawings mean."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup

from spaceport.tools.report.drawing import Element, add, markup, new

Meanings = Iterable[tuple[str, str]]  # class of a mark and what it means

LANES = (
    ("accepted", "accepted draft"),
    ("own", "the network's own token"),
    ("forks", "[Fork] among them"),
    ("rejected", "rejected candidates, how many"),
    ("wait", "waits for its turn"),
    ("prompt", "only feeds the prompt"),
    ("end", "end of a thread"),
)

_LINES = ("wait", "mean", "line", "held")


def keys(meanings: Meanings) -> list[tuple[Markup, str]]:
    """Each mark drawn small, with its meaning."""
    return [(markup(mark(kind)), meaning) for kind, meaning in meanings]


def mark(kind: str) -> Element:
    """The mark of a class, drawn small."""
    drawing = new("svg", {"width": 20, "height": 12, "viewBox": "0 0 20 12", "aria-hidden": "true"})
    if kind in _LINES:
        add(drawing, "path", {"d": "M0 6 H20", "class": kind})
    elif kind == "end":
        add(drawing, "path", {"d": "M10 0 V12", "class": kind})
    elif kind == "forks":
        add(drawing, "circle", {"cx": 10, "cy": 6, "r": 2.5, "class": kind})
    else:
        add(drawing, "rect", {"x": 1, "y": 1, "width": 18, "height": 10, "rx": 1.5, "class": kind})
    if kind == "rejected":
        add(drawing, "text", {"x": 10, "y": 9, "class": "count"}, "3")
    return drawing
