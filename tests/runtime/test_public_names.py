"""The public API: what it exports, and what `help()` says about it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import pytest

import spaceport.runtime
from spaceport.runtime import Runtime, SpaceportError
from support.paths import DOCS

PAGES = [DOCS / f"{name}.md" for name in ("api", "decoding", "embedding", "logprobs", "sampling", "trace")]
EXAMPLES = [path for path in sorted((DOCS / "examples").rglob("*.py")) if "09_custom_backend" not in path.parts]
DOCUMENTED = [
    value
    for name in spaceport.runtime.__all__
    if inspect.isclass(value := getattr(spaceport.runtime, name)) and is_dataclass(value) and name != "Trace"
]


def entries(docstring: str | None) -> dict[str, str]:
    """The options or fields that a docstring lists, each with its description."""
    return dict(re.findall(r"^ *- `(\w+)`: (.+)$", docstring or "", re.MULTILINE))


def classes_of_the_runtime() -> set[str]:
    """Names of all public classes in the runtime's modules that import on every machine."""
    skipped = ("on_", "torch_device", "captured", "staging", "integer_kernels")
    modules = [
        import_module(module.name)
        for module in walk_packages(spaceport.runtime.__path__, "spaceport.runtime.")
        if not module.name.rpartition(".")[2].startswith(skipped)
    ]
    found = (name for module in modules for name, value in vars(module).items() if inspect.isclass(value))
    return {name for name in found if not name.startswith("_")}


def test_every_exported_name_exists_and_the_list_is_sorted() -> None:
    assert sorted(set(spaceport.runtime.__all__)) == spaceport.runtime.__all__
    assert all(hasattr(spaceport.runtime, name) for name in spaceport.runtime.__all__)


def test_every_exported_error_is_a_spaceport_error() -> None:
    exported = [getattr(spaceport.runtime, name) for name in spaceport.runtime.__all__]
    errors = [value for value in exported if inspect.isclass(value) and issubclass(value, Exception)]
    assert len(errors) == 14
    assert [error for error in errors if not issubclass(error, SpaceportError)] == []


def test_every_exported_name_has_an_entry_in_the_api_reference() -> None:
    shown = re.findall(r"^::: spaceport\.runtime\.(\w+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(spaceport.runtime.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_class_that_a_page_names_is_exported(page: Path) -> None:
    code = re.findall(r"`([A-Z]\w+)[`.(]", page.read_text("utf-8"))
    assert {name for name in code if name in classes_of_the_runtime()} <= set(spaceport.runtime.__all__)


@pytest.mark.parametrize("file", [*PAGES, *EXAMPLES], ids=lambda file: f"{file.parent.name}/{file.name}")
def test_programs_of_users_import_from_the_public_package_alone(file: Path) -> None:
    imports = re.findall(r"^from (spaceport\.(?:runtime|graphs)[\w.]*) import", file.read_text("utf-8"), re.MULTILINE)
    assert set(imports) <= {"spaceport.runtime"}


@pytest.mark.parametrize("documented", DOCUMENTED, ids=lambda documented: documented.__name__)
def test_help_describes_every_field(documented: Any) -> None:
    described = entries(inspect.getdoc(documented))
    assert set(described) == {field.name for field in fields(documented) if field.init}


@pytest.mark.parametrize("name", ["Decoding", "Sampling"])
def test_help_describes_the_default_of_every_option(name: str) -> None:
    documentation = inspect.getdoc(getattr(spaceport.runtime, name)) or ""
    for described in re.split(r"^ *- ", documentation, flags=re.MULTILINE)[1:]:
        assert "default" in described


def test_help_describes_every_parameter_of_open() -> None:
    parameters = [name for name in inspect.signature(Runtime.open).parameters if name != "cls"]
    assert list(entries(inspect.getdoc(Runtime.open))) == parameters


@pytest.mark.parametrize("name", spaceport.runtime.__all__)
def test_every_public_class_and_method_has_a_docstring(name: str) -> None:
    value = getattr(spaceport.runtime, name)
    if not inspect.isclass(value):
        return
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")  # the signature that dataclasses write where there is no docstring
    methods = [own for own in vars(value).values() if inspect.isfunction(own) and not own.__name__.startswith("_")]
    assert [own.__name__ for own in methods if not own.__doc__] == []
