"""Findings: each defect that a campaign has found is guarded by a test that exists and is not skipped."""

from __future__ import annotations

import ast
import re

from support.paths import DOCS, ROOT

_ROW = re.compile(r"^\| (\d+) \| .+ \| `(tests/\S+\.py)`: `(test_\w+)` \|$", re.MULTILINE)


def test_each_finding_has_a_regression_test() -> None:
    rows = _ROW.findall((DOCS / "reliability.md").read_text("utf-8"))
    assert [int(number) for number, _, _ in rows] == list(range(1, 15))
    for number, file, name in rows:
        found = [
            node
            for node in ast.parse((ROOT / file).read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        assert len(found) == 1, f"finding {number}: {file} has no test {name}"
        decorators = " ".join(ast.unparse(decorator) for decorator in found[0].decorator_list)
        assert "skip" not in decorators, f"finding {number}: {name} is skipped"
