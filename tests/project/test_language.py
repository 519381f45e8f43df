"""Language: pages and help use the terms of the field, one sentence per line, on pages of a readable length."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.paths import DOCS, ROOT
from support.vocabulary import WORDS, prose, wide_lines

LONGEST_PAGE = 200  # lines
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "tests/README.md")),
    *(DOCS / f"{name}.md" for name in ("README", "architecture", "generate", "glossary")),
]


def faults(text: str) -> list[str]:
    """Rejected words of a text with their lines and what to write instead."""
    return [
        f"line {number}: got {found!r}, expected {word.instead}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        for word in WORDS
        for found in word.found_in(line)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_uses_the_terms_of_the_field_on_short_lines(page: Path) -> None:
    text = page.read_text("utf-8")
    assert faults(prose(text)) == []
    assert wide_lines(text) == []
    assert len(text.splitlines()) <= LONGEST_PAGE


@pytest.mark.parametrize(
    "text",
    [
        "the guesses of mask slots",
        "there is room for a request",
        "2.5 tokens a step",
        "it writes the same text",
        "who is told of it",
        "a step takes so many rows",
        "on a processor",
        "look-up",
    ],
)
def test_a_rejected_word_is_found(text: str) -> None:
    assert len(faults(text)) == 1


@pytest.mark.parametrize("text", ["an array is updated in place", "Intel(R) Xeon(R) Processor", "`room` is a name"])
def test_literal_uses_are_no_fault(text: str) -> None:
    assert faults(prose(text)) == []
