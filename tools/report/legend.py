"""Legend: the marks of the drawings and their meaning."""

from __future__ import annotations

from spaceport.tools.report.drawing import Element, add, new

# CSS class of a mark and its meaning
LANES = (
    ("accepted", "accepted draft token"),
    ("own", "own token of the model"),
    ("forks", "[Fork] token"),
    ("rejected", "number of rejected draft tokens"),
    ("wait", "thread is queued"),
    ("prompt", "prefill step"),
    ("end", "end of a thread"),
)

_LINES = ("wait", "mean", "line", "held")


def mark(kind: str) -> Element:
    """The mark of a CSS class as a small picture."""
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
