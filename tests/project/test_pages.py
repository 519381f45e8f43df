"""Pages: they are short, lead to each other, and name only files, modules and definitions that exist."""

from __future__ import annotations

import ast
import re
from datetime import date
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import spaceport.runtime
from support.paths import DOCS, ROOT

LONGEST_PAGE = 200  # lines
LONGEST_LINE = 120  # columns, outside tables, code and links
NAMES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "tests/README.md", "tests/attack/README.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / ".github").rglob("*.md")), *sorted(DOCS.rglob("*.md"))]
FOLDERS = "benchmarks|deploy|docs|exporter|graphs|recipes|runtime|serving|src|tests|tools|training|verify|\\.github"

# `runtime/decode/step.py:step`, `tools/cli/`, also inside a command or a block of code
PATH = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*[\w/])(?::([A-Za-z_][\w.]*\w))?")
MODULE = re.compile(r"(?<![\w.])spaceport(?:\.[A-Za-z_]\w*)+")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def long_lines(markdown: str) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(`+)(.+?)\1|\]\([^)\s]+\)|<a id=[^>]+></a>|https?://\S+", "`", text)
    return [line for line in text.splitlines() if len(line) > LONGEST_LINE and not line.startswith("|")]


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def names_of(node: ast.stmt) -> set[str]:
    """What a statement defines or imports."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def definition(file: Path, name: str) -> ast.AST | None:
    """The function, class, assignment or import of a dotted name in a file."""
    found: ast.AST | None = tree_of(file)
    for part in name.split("."):
        found = next((node for node in getattr(found, "body", ()) if part in names_of(node)), None)
    return found


def exists(module: str) -> bool:
    """Whether a dotted name is a module of the package, or a name in one."""
    parts = module.split(".")[1:]
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        if (file := path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).exists():
            return end == len(parts) or definition(file, parts[end]) is not None
    return False


def missing(text: str, folder: Path) -> list[str]:
    """What a text in a folder names that does not exist."""
    found = [module for module in MODULE.findall(text) if not exists(module)]
    found += [target for target in LINK.findall(text) if not (folder / target).exists()]
    for path, name in PATH.findall(text):
        file = ROOT / path
        if not file.exists() or (name and definition(file, name) is None):
            found.append(f"{path}:{name}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_short_and_what_it_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    assert long_lines(text) == []
    assert len(text.splitlines()) <= LONGEST_PAGE
    assert missing(text, page.parent) == []


def test_every_page_is_reached_from_the_index() -> None:
    reached = new = {(DOCS / "README.md").resolve()}
    while new:
        links = {(page.parent / target).resolve() for page in new for target in LINK.findall(page.read_text("utf-8"))}
        new = {page for page in links if page.suffix == ".md"} - reached
        reached = reached | new
    assert {page.relative_to(DOCS) for page in DOCS.rglob("*.md") if page.resolve() not in reached} == set()


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that writes measured tables into the pages."""
    monkeypatch.syspath_prepend(str(DOCS / "drawing"))
    return import_module("tables")


def test_the_tables_of_the_pages_are_those_of_the_results_and_say_where_they_come_from(tables: ModuleType) -> None:
    shown = []
    for page in PAGES:
        text = page.read_text("utf-8")
        assert tables.with_tables(text) == text, f"{page.name}: run: make tables"
        shown += tables.tables_in(text)
    assert sorted(shown) == sorted(file.stem for file in tables.RESULTS.iterdir())
    for name in shown:
        result = tables.read_result(tables.RESULTS / f"{name}.json")
        assert result.title, name
        assert result.machine, name
        assert re.fullmatch("[0-9a-f]{7,40}", result.commit), name
        date.fromisoformat(result.date)


def test_the_figures_of_the_readme_are_those_of_a_result(tables: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    modes = tables.read_result(tables.RESULTS / "coder_drafts.json")
    rows = {row[0].strip("*"): row for row in modes.rows}
    of = modes.columns.index("time per token relative to the fastest other runtime")
    plain, drafted = (float(rows[f"int4, {mode}"][of]) for mode in ("plain", "default drafts"))
    assert f"**{drafted:.2f} of the time** of the fastest other" in readme
    assert f"{float(rows['int4, default drafts'][1]):.0f} tokens/s in the format `int4`" in readme
    speedup = float(re.findall(r"\*\*([\d.]+) times as fast\*\*", readme)[0])
    assert speedup == pytest.approx(plain / drafted, abs=0.02)
    stored, same_file = (float(rows[name][of]) for name in ("stored, default drafts", "llama.cpp, the file itself"))
    share = float(re.findall(r"\*\*([\d.]+) of the time\*\* of llama.cpp with that file", readme)[0])
    assert share == pytest.approx(stored / same_file, abs=0.01)


def test_the_reference_has_every_public_name() -> None:
    shown = re.findall(r"^::: spaceport\.runtime\.(\w+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(spaceport.runtime.__all__)


def test_a_built_page_that_loads_over_a_network_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    loads_of = import_module("offline").loads_of
    for page in (
        '<script src="//far.example/a.js"></script>',
        '<link rel="stylesheet" href="https://far.example/a.css">',
        '<img alt="" src="a.png" srcset="a.png 1x, HTTP://far.example/b.png 2x">',
        '<p style="background: url(https://far.example/a.png)">',
        "<style>@import 'https://far.example/a.css';</style>",
        '<svg><image xlink:href="https://far.example/a.png"/></svg>',
    ):
        assert len(loads_of(f"<html><head>{page}</head></html>")) == 1, page
    local = """<link rel="stylesheet" href="assets/a.css"><link rel="canonical" href="https://far.example/a">
    <script src="a.js"></script><script>var link = "https://far.example"</script><a href="https://far.example">read</a>
    <svg xmlns="http://www.w3.org/2000/svg"><use href="#shape"/></svg><code>url(https://far.example)</code>"""
    assert loads_of(local) == []
