"""Browser: a real Chromium, in which the page and reports are drawn."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from spaceport.runtime.trace import TraceRecord
from spaceport.serving.page.modules import import_map, style

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_BLANK = """<!doctype html><meta charset="utf-8"><style>{style}</style><script type="importmap">{modules}</script>
<main id="report"></main><script type="module">import * as report from 'report.js'; import * as trace from 'trace.js';
import * as words from 'words.js'; import * as lanes from 'lanes.js'; import * as svg from 'svg.js';
Object.assign(window, {{ report, trace, words, lanes, svg, loaded: true }});</script>"""


@contextmanager
def open_browser() -> Iterator[Any]:
    """A Chromium without a window; skips a test where none is installed."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Sheet:
    """A page of a browser with the drawing modules, which may draw many records one after the other."""

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        modules = import_map("report_file.js")
        self.page.set_content(_BLANK.format(style=style("colours", "marks", "style"), modules=modules))
        self.page.wait_for_function("window.loaded")

    def call(self, function: str, *given: Any) -> Any:
        """What a function of the modules returns, such as "words.visible"."""
        return self.page.evaluate(f"given => {function}(...JSON.parse(given))", json.dumps(given))

    def report(self, record: TraceRecord) -> Element:
        """The report of a record as an element tree, without namespaces."""
        serialized = self.page.evaluate(_DRAW, json.dumps(record.as_dict()))
        return ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", serialized))


_DRAW = """stored => {
  const area = document.getElementById('report');
  report.drawReport(area, JSON.parse(stored));
  return new XMLSerializer().serializeToString(area);
}"""
