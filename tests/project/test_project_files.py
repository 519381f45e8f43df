"""The files around the code: hooks, issue forms, policies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from spaceport.graphs.contract.manifest import SCHEMA
from spaceport.tools.cli import exit_codes
from support.paths import DOCS, ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def column(page: str, heading: str) -> list[str]:
    """The first column of the first table below a heading."""
    table = page[page.index(heading) :].split("|---", 1)[1].split("\n\n", 1)[0]
    return [row.split("|")[1].strip() for row in table.splitlines()[1:]]


def test_the_hooks_run_the_pinned_tools_and_fetch_nothing() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    checks = re.findall(r"-m ((?:ruff|mypy)[^\n]*)", (ROOT / "Makefile").read_text("utf-8"))
    hooks = [hook["entry"].removeprefix(".venv/bin/python -m ") for hook in repository["hooks"]]
    assert {hook.split(" --")[0] for hook in hooks} == {re.split(r" --| \.", check)[0] for check in checks}


@pytest.mark.parametrize("form", [form for form in FORMS if form.stem != "config"], ids=lambda form: form.stem)
def test_an_issue_form_is_one_that_can_be_shown(form: Path) -> None:
    form_data = read(form)
    assert set(form_data) == {"name", "description", "labels", "body"}
    identifiers = [field["id"] for field in form_data["body"] if field["type"] != "markdown"]
    assert len(set(identifiers)) == len(identifiers) > 1
    for field in form_data["body"]:
        assert field["type"] in FIELDS
        assert field["attributes"].get("label") or field["attributes"].get("value")
    assert any(field.get("validations", {}).get("required") for field in form_data["body"])


def test_the_policies_name_every_exit_code_and_every_schema() -> None:
    page = (DOCS / "policies.md").read_text("utf-8")
    codes = {code for name, code in vars(exit_codes).items() if name.isupper()}
    assert {int(code) for code in column(page, "## Exit codes")} == codes
    assert [int(schema) for schema in column(page, "## The manifest schema")] == list(range(1, SCHEMA + 1))
