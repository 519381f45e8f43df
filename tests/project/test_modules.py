"""Modules: each has a test file of its name, or a row in tests/README.md that names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from support.paths import ROOT, TESTS

ROW = re.compile(r"^\| `([\w/]+(?:/|\.py))` \| (.+) \|$", re.MULTILINE)
TABLE = ROW.findall((TESTS / "README.md").read_text("utf-8"))  # file or folder, the cell beside it


def modules() -> dict[str, Path]:
    """The files that hold code, and the test file of their name."""
    found = {}
    for part in ("exporter", "graphs", "runtime", "tools"):
        for path in sorted((ROOT / part).rglob("*.py")):
            file = path.relative_to(ROOT)
            name = file.parent.name if file.name == "__init__.py" else file.stem
            if name == file.stem or len(ast.parse(path.read_text("utf-8")).body) > 1:  # more than a docstring
                found[file.as_posix()] = TESTS / file.parent / f"test_{name}.py"
    return found


def covers(row: str, module: str) -> bool:
    return module == row or (row.endswith("/") and module.startswith(row))


def test_every_module_has_tests_that_can_be_found() -> None:
    lacking = [
        f"{module}: expected {own.relative_to(ROOT)} or a row in tests/README.md"
        for module, own in modules().items()
        if not own.is_file() and not any(covers(row, module) for row, _ in TABLE)
    ]
    assert lacking == []


def test_every_row_names_modules_and_test_files_that_exist() -> None:
    for row, cell in TABLE:
        assert any(covers(row, module) for module in modules()), f"{row}: no such module"
        folder, files = TESTS, re.findall(r"`([^`]+)`", cell)
        assert files, f"{row}: expected a test file"
        for file in files:
            folder = (ROOT / file).parent if "/" in file else folder  # a bare name is beside the one before
            assert (folder / Path(file).name).is_file(), f"{row}: {file} is not there"


def test_the_rows_are_sorted_and_each_module_has_one() -> None:
    names = [row for row, _ in TABLE]
    assert names
    assert names == sorted(set(names))
