"""Markdown of answers in a real Chromium: nothing is lost, nothing is executed, and streams look like whole texts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from spaceport.serving.page.modules import import_map, style
from support.browser import open_browser

_BLANK = """<!doctype html><meta charset="utf-8"><style>{style}</style><script type="importmap">{modules}</script>
<div id="answer" class="generated"></div>
<script type="module">import * as markdown from 'markdown.js'; Object.assign(window, {{ markdown }});</script>"""
# Pieces are drawn as `u`, their further parts as `s`; the parts are counted.
_DRAW = """pieces => {
  const area = document.getElementById('answer');
  area.replaceChildren();
  const text = new markdown.MarkdownText(area);
  let parts = 0;
  for (const piece of pieces) {
    text.add({ text: piece, draw: (parent, part, isRest) => {
      const element = document.createElement(isRest ? 's' : 'u');
      element.textContent = part;
      parent.append(element);
      parts += 1;
      return element;
    } });
    text.draw();
  }
  return { text: area.textContent, parts, html: area.innerHTML, shown: area.innerText };
}"""
_PARTS = (
    *("\n", "\n\n", "```", "```python\n", "\n```\n", "~~~", "    ", "  "),
    *("# ", "### ", "- ", "* ", "12. ", "> ", "| a | b |"),
    *("**", "*", "__", "_", "`", "``", "\\", "\\*", "[text](https://a.example/x_y)", "<img src=x onerror=alert(1)>"),
    *("word", " two words ", "é", "😀", "---", "***", "2*3*4", "__init__", "\t", "&lt;", "javascript:alert(1)"),
)
_ELEMENTS = {"DIV", "SPAN", "PRE", "CODE", "STRONG", "EM", "BUTTON", "U", "S", "H3", "H4", "H5", "H6"}


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with open_browser() as browser:
        page = browser.new_page()
        page.set_content(_BLANK.format(style=style("colours", "style", "page"), modules=import_map("markdown.js")))
        page.wait_for_function("window.markdown")
        yield page


def drawn(page: Any, *pieces: str) -> Any:
    return page.evaluate(_DRAW, list(pieces))


@pytest.mark.slow
def test_any_text_is_kept_without_foreign_elements_and_pieces_look_like_the_whole(page: Any) -> None:
    draw = random.Random(59)
    for _ in range(300):
        parts = [draw.choice(_PARTS) for _ in range(draw.randint(1, 24))]
        text = "".join(parts)
        cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), 7)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True) if start < end]
        streamed = drawn(page, *pieces)
        elements = page.evaluate("[...document.querySelectorAll('#answer *')].map(element => element.tagName)")
        whole = drawn(page, text)
        assert streamed["text"] == whole["text"] == text, json.dumps(text)
        assert streamed["shown"] == whole["shown"], json.dumps(text)
        assert set(elements) <= _ELEMENTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "selector", "expected"),
    [
        ("# Title\ntext", "h3", ["Title\n"]),
        ("- one\n  - two\n", ".bullet", ["one\n", "two\n"]),
        ("1. one\n2. two", ".item", ["1. one\n", "2. two"]),
        ("a **bold `x` one** and *slanted*, 2 * 3 * 4", "strong, em, code", ["bold ", "x", "x", " one", "slanted"]),
        ("call `f(*a, **b)` and ``a`b``", "code", ["f(*a, **b)", "a`b"]),
        ("the name __init__ and snake_case_names", "strong, em", []),
        ("a \\*star\\*", "div", ["a *star*"]),
        ("```python\nx = `1`  # **no**\n# no\n```\nafter", "pre", ["x = `1`  # **no**\n# no\n"]),
        ("- x\n  ```\n  if a:\n      b\n  ```\n", "pre", ["if a:\n    b\n"]),
        ("````\n```\n````\n", "pre", ["```\n"]),
        ("```\nopen", "pre", ["open"]),
        ("[x](https://a.example)", "a", []),
        ("> said", ".quote", ["said"]),
        ("| a |\n", ".cells", ["| a |\n"]),
    ],
)
def test_markup_becomes_elements(page: Any, text: str, selector: str, expected: list[str]) -> None:
    drawn(page, text)
    unmarked = """selector => [...document.querySelectorAll(selector)].filter(element => element.id !== 'answer').map(element => {
      const copy = element.cloneNode(true);
      for (const markup of copy.querySelectorAll('.markup')) markup.remove();
      return copy.textContent;
    })"""
    assert page.evaluate(unmarked, f"#answer :is({selector})") == expected


@pytest.mark.slow
def test_the_button_of_a_code_block_copies_its_text(page: Any) -> None:
    drawn(page, "Try:\n\n  ```python\n  def f():\n      return 1\n  ```\n")
    assert page.evaluate("getComputedStyle(document.querySelector('#answer pre code')).fontFamily").endswith(
        "monospace"
    )
    assert page.evaluate(
        """async () => {
          let copied = '';
          Object.defineProperty(navigator, 'clipboard', { configurable: true, value: { writeText: async text => { copied = text; } } });
          document.querySelector('#answer .copy').click();
          await new Promise(resolve => setTimeout(resolve));
          return [copied, document.querySelector('#answer .copy').dataset.label];
        }"""
    ) == ["def f():\n    return 1\n", "Copied"]


@pytest.mark.slow
def test_streams_draw_complete_lines_once(page: Any) -> None:
    line = [*"some **bold** word with `code`", "\n"]
    short, long = (drawn(page, *line * count)["parts"] for count in (20, 200))
    assert long <= 10.5 * short
    words = ["word "] * 4000  # one line
    assert drawn(page, *words)["parts"] < 402 * 400 / 2 + len(words)
