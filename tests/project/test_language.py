"""Language: pages, help, comments and names use the terms of the field; pages have short lines and a readable length."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spaceport.tools.cli import cli
from support.paths import DOCS, ROOT, TESTS
from support.vocabulary import NAME_PARTS, WORDS, help_pages, names_in, parts_of, prose, wide_lines, written_in

LONGEST_PAGE = 200  # lines
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "THREATS.md", "CHANGELOG.md", "tests/README.md")
    ),
    *sorted(DOCS.rglob("*.md")),
]
FOLDERS = ("graphs", "exporter", "runtime", "tools", "tests", "docs")
LITERAL_FILES = {
    TESTS / "support" / "vocabulary.py",  # names the rejected words, as this file does
    Path(__file__),
    ROOT / "tools" / "demo_recipe" / "chat_prompts.py",  # prompts about rooms and places
}
LITERAL_NAMES = ("in_place", "post_processor")  # the latter is a name of the tokenizers library
SOURCES = [
    file
    for folder in FOLDERS
    for file in sorted((ROOT / folder).rglob("*.py"))
    if file not in LITERAL_FILES and "__pycache__" not in file.parts
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
    assert page.name == "CHANGELOG.md" or len(text.splitlines()) <= LONGEST_PAGE


def test_the_help_of_every_command_uses_the_terms_of_the_field() -> None:
    pages = dict(help_pages(cli, "spaceport"))
    assert len(pages) > 15
    assert {name: found for name, text in pages.items() if (found := faults(text))} == {}


def test_comments_docstrings_and_messages_use_the_terms_of_the_field() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {fault}"
        for file in SOURCES
        for number, text in written_in(file.read_text("utf-8"))
        for fault in faults(text)
    ]
    assert found == []


def test_names_in_the_code_use_the_terms_of_the_field() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: got {name}, expected {NAME_PARTS[part]}"
        for file in SOURCES
        for number, name in names_in(file.read_text("utf-8"))
        for part in parts_of(re.sub("|".join(LITERAL_NAMES), "", name))
        if part in NAME_PARTS
    ]
    assert found == []


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


def test_long_lines_are_found_outside_tables_code_and_links() -> None:
    long = "word " * 30
    assert wide_lines(f"{long}\n") == [long]
    assert wide_lines(f"| {long} |\n```\n{long}\n```\n[link](https://{'a' * 200})\n`{long}`\n") == []


def test_names_are_split_at_underscores_and_capitals() -> None:
    assert [parts_of(name) for name in ("free_rooms", "NullListener", "CPU_COSTS", "onHTTPError")] == [
        ["free", "rooms"],
        ["null", "listener"],
        ["cpu", "costs"],
        ["on", "http", "error"],
    ]
