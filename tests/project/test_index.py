"""The index of docs/ and what it leads to."""

from __future__ import annotations

import re
from pathlib import Path

from support.paths import DOCS

INDEX = DOCS / "README.md"


def linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    return {(page.parent / target).resolve() for target in targets}


def test_every_page_is_reached_from_the_index() -> None:
    reached, new = {INDEX.resolve()}, {INDEX.resolve()}
    while new:
        found = {target for page in new for target in linked(page) if target.suffix == ".md"}
        new = found - reached
        reached |= new
    assert {page.relative_to(DOCS) for page in DOCS.rglob("*.md") if page.resolve() not in reached} == set()


def test_the_index_lists_every_page_itself() -> None:
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= {page.name for page in linked(INDEX)}


def test_every_decision_is_in_the_index_of_its_folder() -> None:
    rows = re.findall(
        r"^\| \[(\d{4})\]\((\S+)\) \| (.+) \| (\S+) \| (.+) \|$",
        (DOCS / "decisions" / "README.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert [row[1] for row in rows] == sorted(file.name for file in (DOCS / "decisions").glob("[0-9]*.md"))
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    for number, name, title, date, status in rows:
        page = (DOCS / "decisions" / name).read_text("utf-8")
        assert page.startswith(f"# {number}: {title}\n\nDate: {date}. Status: {status}.\n")
        assert re.findall(r"^## (.+)$", page, re.MULTILINE) == ["Context", "Decision", "Consequences"]
