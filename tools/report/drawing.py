"""Drawing: HTML and SVG elements with escaped text and rounded numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element as Element

from markupsafe import Markup

Attributes = Mapping[str, str | float]


def new(tag: str, attributes: Attributes | None = None, text: str = "") -> Element:
    """An element."""
    element = Element(tag, {name: spelled(value) for name, value in (attributes or {}).items()})
    element.text = text
    return element


def add(parent: Element, tag: str, attributes: Attributes | None = None, text: str = "") -> Element:
    """A new element at the end of another."""
    element = new(tag, attributes, text)
    parent.append(element)
    return element


def picture(width: float, height: float, label: str) -> Element:
    """An empty SVG of this size in pixels."""
    size: Attributes = {"width": width, "height": height, "viewBox": f"0 0 {spelled(width)} {spelled(height)}"}
    return new("svg", {**size, "role": "group", "aria-label": label})


def path(points: Iterable[tuple[float, float]]) -> str:
    """An SVG path of straight lines through the points."""
    return "M" + " L".join(f"{spelled(x)} {spelled(y)}" for x, y in points)


def markup(element: Element) -> Markup:
    """The element as markup for the page template."""
    return Markup(ElementTree.tostring(element, encoding="unicode", short_empty_elements=False))


def spelled(value: str | float) -> str:
    """A number rounded to one decimal; text as it is."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
