"""Files, modules and definitions that the pages name are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from spaceport.runtime.backends import BACKENDS
from support.paths import DOCS, ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "THREATS.md", "CHANGELOG.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
    *sorted(DOCS.rglob("*.md")),
]
FOLDERS = "graphs|exporter|runtime|tools|tests|docs|src|\\.github"

# `runtime/decode/step.py:step`, `tools/cli/`, also inside a command or a block of code
PATH = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*[\w/])(?::([A-Za-z_][\w.]*\w))?")
MODULE = re.compile(r"(?<![\w.])spaceport(?:\.[A-Za-z_]\w*)+")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def text_of(page: Path) -> str:
    """What a page says; of the changelog only what is not released yet."""
    text = page.read_text("utf-8")
    return re.split(r"^## ", text, flags=re.MULTILINE)[1] if page.name == "CHANGELOG.md" else text


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


def is_there(module: str) -> bool:
    """Whether a dotted name is a module of the package, or a name in one."""
    parts = module.split(".")[1:]
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        if (file := path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).exists():
            return end == len(parts) or definition(file, parts[end]) is not None
    return False


def missing(text: str, folder: Path) -> list[str]:
    """What a text in a folder names that is not there."""
    found = [module for module in MODULE.findall(text) if not is_there(module)]
    found += [target for target in LINK.findall(text) if not (folder / target).exists()]
    for path, name in PATH.findall(text):
        file = ROOT / path
        if not file.exists() or (name and definition(file, name) is None):
            found.append(f"{path}:{name}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    assert missing(text_of(page), page.parent) == []


@pytest.mark.parametrize(
    "text",
    [
        "see `runtime/decode/gone.py`",
        "see `runtime/decode/step.py:gone`",
        "see `runtime/decode/request.py:Request.gone`",
        "run `pytest tests/gone/test_slots.py -k share`",
        "a folder `tools/gone/`",
        "`python -m spaceport.tools.gone`",
        "`spaceport.runtime.Gone`",
        "[a page](gone.md#heading)",
        "```\npython docs/gone.py\n```",
    ],
)
def test_what_is_not_there_is_found(text: str) -> None:
    assert len(missing(text, DOCS)) == 1


def answer(question: str) -> ast.AST:
    """The definition that the page on the architecture gives as the first answer to a question."""
    page = (DOCS / "architecture.md").read_text("utf-8")
    (row,) = re.findall(rf"^\| {re.escape(question)} \| (.+) \|$", page, re.MULTILINE)
    path, name = PATH.findall(row)[0]
    found = definition(ROOT / path, name)
    assert found is not None
    return found


def calls_in(node: ast.AST) -> set[str]:
    """The last parts of the names that are called inside a definition."""
    called = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in called}


@pytest.mark.parametrize(
    ("question", "called"),
    [
        ("Where is a rejected row's slot released?", "release"),
        ("Where is it decided whether a draft token is accepted?", "token"),
        ("Where does a thread fork?", "share"),
    ],
)
def test_the_function_that_answers_a_question_does_what_is_asked_for(question: str, called: str) -> None:
    assert called in calls_in(answer(question))


def paragraph(title: str) -> str:
    page = (DOCS / "architecture.md").read_text("utf-8")
    return page[page.index(f"**{title}**") :].split("\n\n", 1)[0]


def test_a_backend_is_added_where_the_page_says() -> None:
    text = paragraph("Add a backend.")
    assert "`runtime/backends/__init__.py:BACKENDS`" in text
    assert "a function `open_engine`" in text
    for backend in BACKENDS.values():
        assert definition(ROOT / "runtime" / "backends" / f"{backend.opener}.py", "open_engine") is not None
    assert import_module("spaceport.runtime.backends").require.__module__ == "spaceport.runtime.backends"


def test_a_draft_source_is_added_where_the_page_says() -> None:
    file = "runtime/decode/drafter.py"
    interface, chooser = [name for path, name in PATH.findall(paragraph("Add a draft source.")) if path == file]
    protocol, chosen = definition(ROOT / file, interface), definition(ROOT / file, chooser)
    assert isinstance(protocol, ast.ClassDef)
    assert chosen is not None
    methods = {name for node in protocol.body for name in names_of(node)}
    for drafter in calls_in(chosen):
        assert all(definition(ROOT / file, f"{drafter}.{method}") is not None for method in methods)
