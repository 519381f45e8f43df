"""Packaging: imports run one way, the runtime needs no heavy library, and what is built holds every file."""

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import spaceport
from support.paths import ROOT

PARTS = ("exporter", "graphs", "runtime", "tools")

# Package -> what it may import of the project beside itself, lowest first: a row names earlier rows only. The longest
# row that a module is in counts.
_MODEL = ("graphs", "exporter", "runtime")
LAYERS = {
    "graphs.contract": (),
    "graphs": (),
    "exporter": ("graphs",),
    "runtime.engine": ("graphs.contract",),
    "runtime.opened_files": ("graphs.contract",),
    "runtime.signed_manifest": ("graphs.contract", "runtime.opened_files"),
    "runtime.bundle": ("graphs.contract", "runtime.opened_files", "runtime.signed_manifest"),
    "runtime.costs": (),
    "runtime.selection": ("graphs.contract", "runtime.engine"),
    "runtime.backends": (
        *("graphs.contract", "runtime.engine", "runtime.selection", "runtime.bundle", "runtime.costs"),
        "runtime.opened_files",
    ),
    "runtime.decode": ("graphs.contract", "runtime.engine", "runtime.selection", "runtime.costs"),
    "runtime.isolation": ("graphs.contract",),
    "runtime.sampling": ("runtime.isolation", "graphs.contract", "runtime.selection", "runtime.decode"),
    "runtime.decoding": ("graphs.contract", "runtime.engine", "runtime.decode", "runtime.sampling"),
    "runtime.text": ("runtime.isolation", "graphs.contract", "runtime.bundle", "runtime.decode", "runtime.sampling"),
    "runtime.isolated_jobs": ("runtime.sampling", "runtime.text"),
    "runtime.limits": ("graphs.contract", "runtime.sampling", "runtime.decoding", "runtime.text"),
    "runtime.tool_calls": ("graphs.contract", "runtime.sampling", "runtime.limits"),
    "runtime.trace": ("graphs.contract", "runtime.decode", "runtime.text"),
    "runtime.scheduling": (
        "runtime.isolation",
        *("graphs.contract", "runtime.engine", "runtime.bundle", "runtime.costs", "runtime.decode"),
        *("runtime.sampling", "runtime.decoding", "runtime.limits", "runtime.text", "runtime.trace"),
    ),
    "runtime.opening": ("runtime.bundle", "runtime.backends"),
    "runtime.session": (
        "runtime.opening",
        *("graphs.contract", "runtime.engine", "runtime.bundle", "runtime.backends", "runtime.decode"),
        *("runtime.costs", "runtime.sampling", "runtime.decoding", "runtime.limits", "runtime.text", "runtime.trace"),
        "runtime.scheduling",
    ),
    "runtime": ("graphs.contract",),
    "tools.reference": _MODEL,
    "tools.demo": _MODEL,
    "tools.page": (),
    "tools.report": (*_MODEL, "tools.page"),
    "tools.tune": (*_MODEL, "tools.reference"),
    "tools.distill": (*_MODEL, "tools.tune"),
    "tools.adopt": (*_MODEL, "tools.tune"),
    "tools.terminal": (*_MODEL, "tools.distill", "tools.tune"),
    "tools.chat": (*_MODEL, "tools.terminal"),
    "tools.verify": (*_MODEL, "tools.reference", "tools.tune"),
    "tools.bench": (*_MODEL, "tools.demo", "tools.report", "tools.verify"),
    "tools.serve": (*_MODEL, "tools.page"),
    "tools.fetch": _MODEL,
    "tools.cli": (
        *_MODEL,
        "tools.serve",
        "tools.chat",
        "tools.fetch",
        *("tools.adopt", "tools.bench", "tools.demo", "tools.distill", "tools.reference", "tools.report"),
        *("tools.terminal", "tools.tune", "tools.verify"),
    ),
    "tools.replicas": (*_MODEL, "tools.serve", "tools.cli"),
    # Not in the wheel: nothing imports it.
    "tools.demo_recipe": (
        *_MODEL,
        "tools.cli",
        "tools.demo",
        "tools.reference",
        "tools.terminal",
        "tools.tune",
        "tools.verify",
    ),
}

# Which libraries these modules may import. The longest entry counts; None = any.
LIBRARIES = {
    "spaceport": None,
    "spaceport.runtime": {"numpy", "tokenizers", "jinja2"},
    "spaceport.runtime.backends": None,
    "spaceport.runtime.sampling.vocabulary": {"numpy", "tokenizers", "llguidance"},  # an optional extra
    "spaceport.graphs.contract": {"numpy"},
    "spaceport.graphs.contract.ed25519": {"cryptography"},  # an optional extra
}

# The recipe of the demo model, and files for containers and clusters: in the checkout and the sdist, not in the wheel.
CHECKOUT_ONLY = ("spaceport/tools/demo_recipe/", "spaceport/tools/deploy/")

HEAVY = (
    *("cryptography", "llguidance"),
    *("onnx", "onnx_graphsurgeon", "onnxruntime", "onnxscript", "polygraphy"),
    *("tensorrt", "tensorrt_rtx", "torch", "transformers"),
)

# The only modules that may need a heavy library in order to be imported: open_engine() imports one of them.
NEEDS = {
    "spaceport.runtime.backends.on_torch": {"torch"},
    "spaceport.runtime.backends.integer_kernels": {"onnxruntime"},
    "spaceport.runtime.backends.products": {"onnxruntime"},
    "spaceport.runtime.backends.on_onnxruntime": {"onnxruntime"},
    "spaceport.runtime.backends.on_device": {"onnxruntime"},
    "spaceport.runtime.backends.on_cuda": {"onnxruntime"},
    "spaceport.runtime.backends.torch_device": {"torch"},
    "spaceport.runtime.backends.on_tensorrt": {"tensorrt", "tensorrt_rtx", "torch"},
}

# argv: where spaceport is to come from, libraries to hide, modules to import. Prints what each module lacked.
IMPORT_ALL = """
import importlib, json, sys
folder, hidden, modules = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])

class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

sys.meta_path.insert(0, Hide)
sys.path.insert(0, folder)
import spaceport
assert spaceport.__file__.startswith(folder), spaceport.__file__
lacking = {}
for module in modules:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        lacking[module] = error.name
print(json.dumps(lacking))
"""

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
    """The row of LAYERS that a module is in, such as runtime for spaceport.runtime.decode.slots."""
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


def test_imports_run_one_way() -> None:
    assert faults(project()) == []


@pytest.mark.parametrize(
    ("importer", "line", "rule"),
    [
        ("graphs.x", "from spaceport.exporter import bundle", "upward"),
        ("graphs.contract.signature", "import spaceport.runtime.decode.slots", "upward"),
        ("exporter.x", "from spaceport import runtime", "upward"),
        ("exporter.x", "def f():\n    from spaceport.tools import cli", "upward"),
        ("runtime.x", "from spaceport.graphs import attention", "upward"),
        ("runtime.x", "from spaceport.graphs.contract_of import y", "upward"),
        ("runtime.backends.x", "from spaceport.exporter.atomic_folder import y", "upward"),
        ("graphs.contract.x", "from spaceport.graphs.attention import y", "upward"),
        ("runtime.backends.x", "from spaceport.runtime.decode.request import Request", "upward"),
        ("runtime.decode.x", "from spaceport.runtime.sampling.choice import Greedy", "upward"),
        ("runtime.sampling.x", "from spaceport.runtime.text.piece import Piece", "upward"),
        ("runtime.scheduling.x", "from spaceport.runtime.backends import resolve", "upward"),
        ("tools.bench.load", "from spaceport.tools.cli.demo import prompts_of", "upward"),
        ("tools.bench.x", "def f():\n    from spaceport.tools import cli", "upward"),
        ("tools.terminal.x", "from spaceport.tools.cli.exit_codes import OK", "upward"),
        ("tools.tune.x", "from spaceport.tools.verify.accuracy import compare", "upward"),
        ("tools.report.x", "from spaceport.tools.terminal.screen import show_json", "upward"),
        ("tools.cli.x", "from spaceport.tools.demo_recipe.train import MODEL", "upward"),
        ("tools.reference", "from spaceport.tools.demo.prompts import MODEL", "upward"),
        ("tools.x", "from spaceport.exporter import bundle", "upward"),
        ("runtime.x", "import torch.nn", "foreign"),
        ("runtime.x", "import click", "foreign"),
        ("runtime.x", "def f():\n    from onnxruntime import InferenceSession", "foreign"),
        ("graphs.contract.signature", "import torch", "foreign"),
        ("graphs.contract.manifest", "from jinja2 import Template", "foreign"),
        ("tools.cli.x", "from runtime.slots import Slots", "second_copy"),
        ("tools.cli.x", "import graphs", "second_copy"),
        ("runtime.x", "from . import slots", "second_copy"),
        ("runtime.x", "from .slots import Slots", "second_copy"),
    ],
)
def test_a_wrong_import_is_found(importer: str, line: str, rule: str) -> None:
    planted = f"spaceport.{importer}"
    found = [fault for fault in faults(project() | {planted: line}) if fault.startswith(f"{planted}:")]
    assert len(found) == 1
    assert found[0].endswith(f"({rule})")


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("graphs.x", "import torch\nfrom spaceport.graphs.contract.signature import y"),
        ("exporter.x", "from spaceport.graphs import signature\nfrom spaceport.exporter.x import y"),
        (
            "runtime.x",
            "from spaceport.graphs.contract import signature\nfrom spaceport.graphs.contract.manifest import y\nimport numpy.typing",
        ),
        ("runtime.backends.x", "import torch, onnxruntime\nfrom spaceport.runtime.engine import Engine"),
        ("tools.tune.x", "from spaceport.exporter import bundle\nimport spaceport.runtime, click, torch"),
        ("tools.bench.x", "from spaceport.tools.demo.prompts import MODEL\nimport spaceport.tools.verify"),
        ("tools.cli.x", "from spaceport.tools.cli import run\nfrom spaceport.tools.bench import gpu"),
        ("runtime.x", "from spaceport import __version__\nimport json"),
    ],
)
def test_a_right_import_is_no_fault(importer: str, line: str) -> None:
    planted = f"spaceport.{importer}"
    sources = project() | {
        planted: line,
        "spaceport.graphs.contract.signature": "",
        "spaceport.graphs.contract.manifest": "",
    }
    assert [fault for fault in faults(sources) if fault.startswith(f"{planted}:")] == []


def test_every_module_is_in_a_layer() -> None:
    bare = {"spaceport", "spaceport.tools"}  # packages that hold the others and import nothing
    assert [module for module in project() if module not in bare and layer_of(module) is None] == []


def test_a_layer_imports_lower_layers_only() -> None:
    rows = list(LAYERS)
    assert [(row, package) for row in rows for package in LAYERS[row] if package not in rows[: rows.index(row)]] == []


def test_the_tests_import_no_second_copy() -> None:
    tests = sources_under(ROOT / "tests", "tests")
    assert "tests.project.test_packaging" in tests
    assert [str(found) for found in imports(tests, tests) if second_copy(found)] == []


def test_no_modules_import_each_other() -> None:
    assert cycle(project()) == []


def test_a_ring_of_imports_is_found() -> None:
    ring = {
        "spaceport.runtime.a": "from spaceport.runtime import b",
        "spaceport.runtime.b": "def f():\n    from spaceport.runtime.c import g",
        "spaceport.runtime.c": "import spaceport.runtime.a",
    }
    assert set(cycle(ring)) == set(ring)


def run(command: list[str], cwd: Path) -> str:
    """What a command prints; its errors are the message when it fails."""
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-1000:]
    return done.stdout


def lacking(folder: Path, cwd: Path) -> dict[str, str]:
    """Modules of the runtime and the command line in a folder that need a heavy library: module -> library."""
    modules = [module for module in project() if within(module, ("spaceport.runtime",))] + ["spaceport.tools.cli"]
    arguments = [str(folder), json.dumps(HEAVY), json.dumps([*modules, *HEAVY])]
    found: dict[str, str] = json.loads(run([sys.executable, "-I", "-c", IMPORT_ALL, *arguments], cwd))
    assert [module for module in HEAVY if found.pop(module, None) != module] == [], "these were to be hidden"
    return {module: missing for module, missing in found.items() if library(missing) not in NEEDS.get(module, set())}


def test_runtime_and_command_line_import_without_heavy_libraries(tmp_path: Path) -> None:
    assert lacking(ROOT / "src", tmp_path) == {}


@dataclass(frozen=True)
class Built:
    """A wheel and an sdist, and the files that the sdist has to hold, such as spaceport/runtime/engine.py."""

    wheel: Path
    sdist: Path
    files: set[str]

    @property
    def wheel_files(self) -> set[str]:
        """The files that the wheel has to hold."""
        return {name for name in self.files if not name.startswith(CHECKOUT_ONLY)}


def tracked() -> list[str]:
    """The files of the checkout that git tracks or would track; without git, those of the package."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        links = [f"src/spaceport/{part}" for part in PARTS]
        paths = [path for part in PARTS for path in (ROOT / part).rglob("*") if "__pycache__" not in path.parts]
        names = [path.relative_to(ROOT).as_posix() for path in paths]
        names += [*links, "src/spaceport/__init__.py", "src/spaceport/py.typed"]
        names += ["LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"]
    else:
        git = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = run(git, ROOT).split("\0")
    return [name for name in names if (ROOT / name).is_file() or (ROOT / name).is_symlink()]


def packaged(names: list[str]) -> set[str]:
    """The files that the package is to hold: all Python, also what git ignores by mistake, and all data but prose."""
    python = {path.relative_to(ROOT).as_posix() for part in PARTS for path in (ROOT / part).rglob("*.py")}
    data = {name for name in names if name.startswith(tuple(f"{part}/" for part in PARTS)) and name[-3:] != ".md"}
    return {f"spaceport/{name}" for name in {"__init__.py", "py.typed"} | python | data}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    names = tracked()
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)], copy)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, sdist, packaged(names))


@pytest.mark.slow
def test_the_wheel_holds_every_file_and_nothing_else(built: Built) -> None:
    names = {name for name in zipfile.ZipFile(built.wheel).namelist() if ".dist-info/" not in name}
    assert built.wheel_files - names == set(), "ignored by git, or needs an __init__.py or an entry in package-data"
    assert names - built.wheel_files == set()
    assert [name for name in names if name.startswith(CHECKOUT_ONLY)] == []
    assert "spaceport/tools/demo/model/model.safetensors" in names


@pytest.mark.slow
def test_the_wheel_says_what_it_is(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        info = f"spaceport-{spaceport.__version__}.dist-info"
        metadata = wheel.read(f"{info}/METADATA").decode().splitlines()
        scripts = wheel.read(f"{info}/entry_points.txt").decode().splitlines()
        assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "License-Expression: Apache-2.0" in metadata
    assert "spaceport = spaceport.tools.cli:main" in scripts


@pytest.mark.slow
def test_the_sdist_holds_every_file(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    assert {f"src/{name}" for name in built.files} - names == set()
    assert {f"src/{CHECKOUT_ONLY[0]}train.py", f"src/{CHECKOUT_ONLY[1]}Containerfile"} <= names
    assert {"LICENSE", "pyproject.toml"} <= names
    assert [name for name in names if name.startswith("tests/")] == []


@pytest.mark.slow
def test_the_installed_wheel_runs_from_its_own_files(built: Built, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(tmp_path / "site")]
    run([*install, str(built.wheel)], tmp_path)
    assert lacking(tmp_path / "site", tmp_path) == {}


def test_the_editable_install_is_the_checkout(tmp_path: Path) -> None:
    try:
        version("spaceport")
    except PackageNotFoundError:
        pytest.skip("spaceport is on the path and not installed: make venv")
    where = "import spaceport, spaceport.runtime as r; print(spaceport.__file__, r.__file__, sep='\\n')"
    found = [Path(line).resolve() for line in run([sys.executable, "-I", "-c", where], tmp_path).splitlines()]
    assert found == [ROOT / "src/spaceport/__init__.py", ROOT / "runtime/__init__.py"]
