"""Tables of measurements: docs/results/*.json, written between the markers of the pages.

`<!-- table: NAME -->` and `<!-- end -->` mark the place of docs/results/NAME.json in a page. `make tables` runs this.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?[\d.,]+( %| [kMG]B)?( / [\d.]+)*( \(.+\))?")


@dataclass(frozen=True)
class Result:
    """One measured table, with what was run, when and where."""

    title: str
    columns: list[str]
    rows: list[list[str]]  # cells as they are shown; empty: not measured
    command: str  # prints the figures; empty: they have no command of their own
    machine: str  # class of CPU, cores, and what else ran
    versions: str  # of the measured packages; empty: not known
    commit: str  # that put the figures into the documentation
    date: str


def read_result(file: Path) -> Result:
    """The table of a JSON file."""
    result = Result(**json.loads(file.read_text("utf-8")))
    widths = {len(row) for row in result.rows}
    if widths != {len(result.columns)}:
        raise ValueError(f"{file.name}: got rows of {sorted(widths)} cells, expected {len(result.columns)}")
    return result


def markdown_of(result: Result) -> str:
    """A table as Markdown, below its title and where its figures come from."""
    columns = list(zip(*result.rows, strict=True))
    numeric = [all(_NUMBER.fullmatch(cell) for cell in cells if cell) for cells in columns]
    rule = "|".join("---:" if right else "---" for right in numeric)
    head, *rows = (
        "".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in [result.columns, *result.rows]
    )
    source = [f"`{result.command}`"] if result.command else []
    source += [text for text in (result.machine, result.versions, f"{result.date}, `{result.commit}`") if text]
    table = "\n".join([head, f"|{rule}|", *rows])
    caption = wrap(f"**{result.title}.** {'; '.join(source)}.", 118, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*caption, "", table, "", ""])


def with_tables(page: str) -> str:
    """A page with the current tables between its markers."""
    return _BLOCK.sub(
        lambda block: f"{block[1]}{markdown_of(read_result(RESULTS / f'{block[2]}.json'))}{block[3]}", page
    )


def tables_in(page: str) -> list[str]:
    """Names of the tables that a page shows."""
    return [name for _, name, _ in _BLOCK.findall(page)]


def main() -> None:
    """Write all tables."""
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page = file.read_text("utf-8")
        if (written := with_tables(page)) != page:
            file.write_text(written, "utf-8")
            print(f"{file.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()
