"""Imports: they run one way, between the layers of the package and to the libraries that each may use."""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from support.paths import PARTS, ROOT

# Folders of the checkout that are in no wheel: they import the package, which imports none of them.
CHECKOUT_ONLY = ("benchmarks", "recipes")

# Package -> what it may import of the project beside itself, lowest first: a row names earlier rows only. The longest
# row that a module is in counts.
_MODEL = ("graphs", "exporter", "runtime")
LAYERS = {
    "kernels": (),
    "graphs.contract": (),
    "graphs": (),
    "exporter": ("kernels", "graphs"),
    "runtime.engine": ("graphs.contract",),
    "runtime.opened_files": ("graphs.contract",),
    "runtime.memory": (),
    "runtime.bundle": ("graphs.contract", "runtime.opened_files", "runtime.memory"),
    "runtime.costs": (),
    "runtime.backends": (
        *("kernels", "graphs.contract", "runtime.engine", "runtime.bundle", "runtime.costs"),
        *("runtime.opened_files", "runtime.memory"),
    ),
    "runtime.decode": ("graphs.contract", "runtime.engine", "runtime.costs"),
    "runtime.isolation": ("graphs.contract",),
    "runtime.sampling": ("runtime.isolation", "graphs.contract", "runtime.engine", "runtime.decode"),
    "runtime.decoding": ("graphs.contract", "runtime.engine", "runtime.decode", "runtime.sampling"),
    "runtime.text": ("runtime.isolation", "graphs.contract", "runtime.bundle", "runtime.decode", "runtime.sampling"),
    "runtime.isolated_jobs": ("runtime.sampling", "runtime.text"),
    "runtime.limits": ("graphs.contract", "runtime.sampling", "runtime.decoding", "runtime.text"),
    "runtime.tool_calls": ("graphs.contract", "runtime.sampling", "runtime.limits", "runtime.text"),
    "runtime.trace": ("graphs.contract", "runtime.decode", "runtime.text"),
    "runtime.scheduling": (
        "runtime.isolation",
        *("graphs.contract", "runtime.engine", "runtime.bundle", "runtime.costs", "runtime.decode"),
        *("runtime.sampling", "runtime.decoding", "runtime.limits", "runtime.text", "runtime.trace"),
    ),
    "runtime.comparison": (
        *("graphs.contract", "runtime.decode", "runtime.sampling", "runtime.decoding", "runtime.text"),
        "runtime.scheduling",
    ),
    "runtime.session": (
        *("graphs.contract", "runtime.engine", "runtime.bundle", "runtime.backends", "runtime.decode"),
        *("runtime.costs", "runtime.sampling", "runtime.decoding", "runtime.limits", "runtime.text", "runtime.trace"),
        "runtime.scheduling",
    ),
    "runtime": ("graphs.contract",),
    "verify": ("kernels", *_MODEL),
    "training": (*_MODEL, "verify"),
    "serving.page": (),
    "serving": (*_MODEL, "serving.page"),
    "tools.demo": _MODEL,
    "tools.report": (*_MODEL, "serving.page"),
    "tools.adopt": (*_MODEL, "training"),
    "tools.exporting": (*_MODEL, "verify", "training", "tools.adopt"),
    "tools.terminal": _MODEL,
    "tools.bench": (*_MODEL, "verify", "tools.demo", "tools.report", "tools.terminal"),
    "tools.cli": (
        *(*_MODEL, "kernels", "verify", "training", "serving"),
        *("tools.adopt", "tools.bench", "tools.demo", "tools.exporting", "tools.report", "tools.terminal"),
    ),
    "tools.replicas": (*_MODEL, "serving", "tools.cli"),
}

# Which libraries these modules may import. The longest entry counts; None = any.
LIBRARIES = {
    "spaceport": None,
    "spaceport.runtime": {"numpy", "tokenizers", "jinja2"},
    "spaceport.runtime.backends": None,
    "spaceport.runtime.sampling.grammar": {"numpy", "tokenizers", "llguidance"},  # an optional extra
    "spaceport.graphs.contract": {"numpy"},
}

Sources = dict[str, str]  # dotted module -> its source


@dataclass(frozen=True)
class Import:
    """One imported module, and where it is written; a relative one keeps its dots."""

    importer: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"

    @property
    def library(self) -> str:
        return self.target.partition(".")[0]


def sources_under(folder: Path, name: str) -> Sources:
    """The Python files below a folder as dotted modules below a name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).with_suffix("").parts
        found[".".join((name, *inside)).removesuffix(".__init__")] = path.read_text("utf-8")
    return found


def imports(sources: Sources) -> Iterator[Import]:
    """Every import of the sources, also inside functions; `from a import b` is a.b where that is one of them."""
    for importer, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (Import(importer, node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = "." * node.level + (node.module or "")
                named = [f"{origin}.{alias.name}" for alias in node.names]
                yield from (Import(importer, node.lineno, name if name in sources else origin) for name in named)


@pytest.fixture(scope="module")
def project() -> Sources:
    """The modules of the package."""
    found = {"spaceport": (ROOT / "src/spaceport/__init__.py").read_text("utf-8")}
    for part in PARTS:
        found |= sources_under(ROOT / part, f"spaceport.{part}")
    return found


@pytest.fixture(scope="module")
def found(project: Sources) -> list[Import]:
    """The imports of the package."""
    return [*imports(project)]


def innermost(module: str, packages: Iterable[str]) -> str | None:
    """The longest of these packages that a module is in."""
    return max((name for name in packages if f"{module}.".startswith(f"{name}.")), key=len, default=None)


def layer_of(module: str) -> str | None:
    """The row of LAYERS that a module is in, such as runtime for spaceport.runtime.decode.sequence."""
    return innermost(module.removeprefix("spaceport."), LAYERS)


def upward(one: Import) -> bool:
    """Whether a module imports what stands beside or above its layer; spaceport itself, the version, is everybody's."""
    if one.library != "spaceport" or one.target == "spaceport":
        return False
    layer = layer_of(one.importer)
    allowed = () if layer is None else (layer, *LAYERS[layer])
    return innermost(one.target.removeprefix("spaceport."), allowed) is None


def foreign(one: Import) -> bool:
    """Whether a module imports a library that it may not."""
    if one.library in ("", "spaceport") or one.library in sys.stdlib_module_names:
        return False
    allowed = LIBRARIES[innermost(one.importer, LIBRARIES) or ""]
    return allowed is not None and one.library not in allowed


def second_copy(one: Import) -> bool:
    """Whether an import is not written as `spaceport.…`: it would load a module a second time, under another name."""
    return one.target.startswith(".") or one.library in PARTS


@pytest.mark.parametrize("folder", CHECKOUT_ONLY)
def test_the_package_does_not_import_what_is_in_no_wheel(folder: str, found: list[Import]) -> None:
    assert [str(one) for one in found if one.library == folder] == []


@pytest.mark.parametrize("folder", [*CHECKOUT_ONLY, "tests"])
def test_what_is_in_no_wheel_imports_no_second_copy(folder: str) -> None:
    own = [*imports(sources_under(ROOT / folder, folder))]
    assert own
    assert [str(one) for one in own if second_copy(one)] == []


def test_every_module_is_in_a_layer_and_imports_lower_layers_only(project: Sources, found: list[Import]) -> None:
    bare = {"spaceport", "spaceport.tools"}  # packages that hold the others and import nothing
    assert [module for module in project if module not in bare and layer_of(module) is None] == []
    rows = list(LAYERS)
    assert [(row, package) for row in rows for package in LAYERS[row] if package not in rows[: rows.index(row)]] == []
    rules = (upward, foreign, second_copy)
    assert [f"{one} ({rule.__name__})" for one in found for rule in rules if rule(one)] == []


def test_no_modules_import_each_other(project: Sources, found: list[Import]) -> None:
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for one in found:
        if one.target in project:
            sorter.add(one.importer, one.target)
    sorter.prepare()  # raises CycleError, which names them


def test_the_drawing_of_the_packages_is_that_of_their_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "drawing"))
    drawn = import_module("packages")
    assert sorted(drawn.PACKAGES) == sorted(PARTS)
    page = drawn.PAGE.read_text("utf-8")
    assert drawn.updated(page) == page, "run python docs/drawing/packages.py"
