"""Imports: they run one way, between the layers of the package and to the libraries that each may use."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
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


def library(module: str) -> str:
    return module.partition(".")[0]


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
        return library(self.target)


def sources_under(folder: Path, name: str) -> Sources:
    """The Python files below a folder as dotted modules below a name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).with_suffix("").parts
        found[".".join((name, *inside)).removesuffix(".__init__")] = path.read_text("utf-8")
    return found


def project() -> Sources:
    """The modules of the package."""
    found = {"spaceport": (ROOT / "src/spaceport/__init__.py").read_text("utf-8")}
    for part in PARTS:
        found |= sources_under(ROOT / part, f"spaceport.{part}")
    return found


@cache
def import_statements(source: str) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file, also inside functions."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(sources: Sources, known: Sources) -> Iterator[Import]:
    """Every import of the sources, also inside functions; `from a import b` is a.b where that is a known module."""
    for importer, source in sources.items():
        for node in import_statements(source):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(importer, node.lineno, alias.name)
            else:
                origin = "." * node.level + (node.module or "")
                for alias in node.names:
                    full = f"{origin}.{alias.name}"
                    yield Import(importer, node.lineno, full if full in known else origin)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def layer_of(module: str) -> str | None:
    """The row of LAYERS that a module is in, such as runtime for spaceport.runtime.decode.sequence."""
    rows = [row for row in LAYERS if within(module, (f"spaceport.{row}",))]
    return max(rows, key=len, default=None)


def upward(found: Import) -> bool:
    """Whether a module imports what stands beside or above its layer; spaceport itself, the version, is everybody's."""
    if found.library != "spaceport" or found.target == "spaceport":
        return False
    layer = layer_of(found.importer)
    allowed = () if layer is None else (layer, *LAYERS[layer])
    return not within(found.target, tuple(f"spaceport.{package}" for package in allowed))


def foreign(found: Import) -> bool:
    """Whether a module imports a library that it may not."""
    if found.library in ("", "spaceport") or found.library in sys.stdlib_module_names:
        return False
    packages = [package for package in LIBRARIES if within(found.importer, (package,))]
    allowed = LIBRARIES[max(packages, key=len)]
    return allowed is not None and found.library not in allowed


def second_copy(found: Import) -> bool:
    """Whether an import is not written as `spaceport.…`: it would load a module a second time, under another name."""
    return found.target.startswith(".") or found.library in PARTS


def cycle(sources: Sources) -> list[str]:
    """Some modules that import each other in a ring, or none."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for found in imports(sources, sources):
        if found.target in sources:
            sorter.add(found.importer, found.target)
    try:
        sorter.prepare()
    except CycleError as error:
        ring: list[str] = error.args[1]
        return ring
    return []


def faults(sources: Sources) -> list[str]:
    """Every import of the package that breaks a rule."""
    rules = (upward, foreign, second_copy)
    return [f"{found} ({rule.__name__})" for found in imports(sources, sources) for rule in rules if rule(found)]


@pytest.mark.parametrize("folder", CHECKOUT_ONLY)
def test_the_package_does_not_import_what_is_in_no_wheel(folder: str) -> None:
    sources = project()
    assert [str(found) for found in imports(sources, sources) if found.library == folder] == []
    own = sources_under(ROOT / folder, folder)
    assert [str(found) for found in imports(own, own) if second_copy(found)] == []


def test_every_module_is_in_a_layer_and_imports_lower_layers_only() -> None:
    bare = {"spaceport", "spaceport.tools"}  # packages that hold the others and import nothing
    assert [module for module in project() if module not in bare and layer_of(module) is None] == []
    rows = list(LAYERS)
    assert [(row, package) for row in rows for package in LAYERS[row] if package not in rows[: rows.index(row)]] == []
    assert faults(project()) == []


def test_the_tests_import_no_second_copy() -> None:
    tests = sources_under(ROOT / "tests", "tests")
    assert "tests.project.test_imports" in tests
    assert [str(found) for found in imports(tests, tests) if second_copy(found)] == []


def test_no_modules_import_each_other() -> None:
    assert cycle(project()) == []


def test_the_drawing_of_the_packages_is_that_of_their_imports() -> None:
    spec = importlib.util.spec_from_file_location("drawn_packages", ROOT / "docs" / "drawing" / "packages.py")
    assert spec is not None
    assert spec.loader is not None
    drawn = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawn)
    assert sorted(drawn.PACKAGES) == sorted(PARTS)
    page = drawn.PAGE.read_text("utf-8")
    assert drawn.updated(page) == page, "run python docs/drawing/packages.py"
