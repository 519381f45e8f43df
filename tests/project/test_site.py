"""What `make docs` builds: an API reference of all public names, and pages that load nothing over a network."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import spaceport.runtime
from support.paths import DOCS


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The check of built pages, which is part of the docs and of no package."""
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    return import_module("offline")


def test_the_reference_has_every_public_name() -> None:
    shown = re.findall(r"^::: spaceport\.runtime\.(\w+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(spaceport.runtime.__all__)


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://far.example/a.js"></script>',
        '<script src="//far.example/a.js"></script>',
        '<link rel="stylesheet" href="https://far.example/a.css">',
        '<link rel="preconnect" href="https://far.example">',
        '<link rel="canonical stylesheet" href="https://far.example/a.css">',
        '<img alt="" src="HTTP://far.example/a.png">',
        '<img alt="" src="a.png" srcset="a.png 1x, https://far.example/b.png 2x">',
        '<p style="background: url(https://far.example/a.png)">',
        "<style>@import 'https://far.example/a.css';</style>",
        "<style>@font-face { src: url(//far.example/a.woff2) }</style>",
        '<svg><image xlink:href="https://far.example/a.png"/></svg>',
    ],
)
def test_a_page_that_loads_over_a_network_is_found(offline: ModuleType, page: str) -> None:
    assert len(offline.loads_of(f"<html><head>{page}</head></html>")) == 1


def test_links_to_click_and_what_lies_beside_a_page_are_no_faults(offline: ModuleType) -> None:
    page = """<link rel="stylesheet" href="assets/a.css"><link rel="canonical" href="https://far.example/a">
    <script src="a.js"></script><script>var link = "https://far.example"</script><a href="https://far.example">read</a>
    <svg xmlns="http://www.w3.org/2000/svg"><use href="#shape"/></svg><code>url(https://far.example)</code>"""
    assert offline.loads_of(page) == []


def test_styles_and_pictures_are_looked_at_too(offline: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@import url('https://far.example/b.css');")
    (tmp_path / "b.svg").write_text('<svg><image href="https://far.example/c.png"/></svg>')
    (tmp_path / "c.js").write_text("fetch('https://far.example')")
    assert len(list(offline.faults(tmp_path))) == 2
