"""Packaging: the runtime needs no heavy library, types are right, and what is built holds every file."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import spaceport
from spaceport.kernels.build import SOURCES, TARGETS, compiler, library_name, zig
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import MISSING
from support.cache import cache_folder
from support.paths import PARTS, ROOT, TINY, package

OFFLINE = os.environ | {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

# In the checkout and the sdist, not in the wheel.
CHECKOUT_ONLY = {"benchmarks/__main__.py", "recipes/__main__.py", "deploy/Containerfile"}

# Data that the program reads; the chat model's adapter and curves of trainings are in the checkout alone.
DATA = (
    "serving/page/static/",
    "tools/demo/coder/prompts.json",
    "tools/demo/data/",
    "tools/demo/model/",
    "tools/report/",
)

HEAVY = (
    *("llguidance",),
    *("onnx", "onnx_graphsurgeon", "onnxruntime", "onnxscript", "polygraphy"),
    *("tensorrt", "tensorrt_rtx", "torch", "transformers"),
)

# The only modules that may need a heavy library in order to be imported: open_engine() imports one of them.
NEEDS = {
    "spaceport.runtime.backends.on_torch": {"torch"},
    "spaceport.runtime.backends.on_onnxruntime": {"onnxruntime"},
    "spaceport.runtime.backends.on_cuda": {"onnxruntime"},
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


def started(
    command: Sequence[object], cwd: Path, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """A finished command."""
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def run(command: Sequence[object], cwd: Path, environment: Mapping[str, str] = os.environ) -> str:
    """What a command prints; its errors are the message when it fails."""
    done = started(command, cwd, environment)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-1000:]
    return done.stdout


def lacking(folder: Path, cwd: Path) -> dict[str, str]:
    """Modules of the runtime and the command line in a folder that need a heavy library: module -> library."""
    files = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "runtime").rglob("*.py"))]
    modules = [f"spaceport.{'.'.join(file.parts)}".removesuffix(".__init__") for file in files]
    arguments = (folder, json.dumps(HEAVY), json.dumps([*modules, "spaceport.tools.cli", *HEAVY]))
    found: dict[str, str] = json.loads(run((sys.executable, "-I", "-c", IMPORT_ALL, *arguments), cwd))
    assert [module for module in HEAVY if found.pop(module, None) != module] == [], "these were to be hidden"
    return {
        module: missing
        for module, missing in found.items()
        if missing.partition(".")[0] not in NEEDS.get(module, set())
    }


def test_runtime_and_command_line_import_without_heavy_libraries(tmp_path: Path) -> None:
    assert lacking(package(), tmp_path) == {}


def test_every_public_name_is_typed_where_it_is_imported_from_when_it_is_used() -> None:
    code = """
import ast, sys, spaceport
assert not {"numpy", "torch", "onnxruntime", "spaceport.runtime"} & set(sys.modules), "imported too early"
from spaceport import Decoding, Runtime
from spaceport.runtime import session
assert Runtime is session.Runtime and "torch" not in sys.modules

stub = ast.parse(open(spaceport.__file__ + "i", encoding="utf-8").read())  # __init__.pyi beside __init__.py
typed = {alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
assert typed.pop(None) == "spaceport.runtime", "what is imported with a star"
assert {"export", "tune"} <= set(typed)
assert sorted(spaceport.__all__) == sorted([*spaceport.runtime.__all__, *typed])
assert set(spaceport.__all__) <= set(dir(spaceport))
assert {name: getattr(spaceport, name).__module__ for name in typed} == typed
try:
    spaceport.nothing
except AttributeError as error:
    print(error)
"""
    found = started((sys.executable, "-c", code), ROOT)
    assert (found.returncode, found.stdout) == (0, "module 'spaceport' has no attribute 'nothing'\n"), found.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_the_package_has_the_types_that_it_states() -> None:
    package()
    done = started((sys.executable, "-m", "mypy", "--cache-dir", cache_folder() / "mypy"), ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Built:
    """A wheel and an sdist, and the files of the package that both have to hold, such as spaceport/runtime/engine.py."""

    wheel: Path
    sdist: Path
    files: set[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    git = ("git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    names = [name for name in run(git, ROOT).split("\0") if (ROOT / name).is_file()]
    python = {path.relative_to(ROOT).as_posix() for part in PARTS for path in (ROOT / part).rglob("*.py")}
    data = {name for name in names if name.startswith(DATA)}
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    if (compiled := ROOT / "kernels" / library_name()).is_file():
        shutil.copy2(compiled, copy / "kernels")
    build = (sys.executable, "-m", "build", "--sdist", "--wheel", "--no-isolation", "--outdir", out, copy)
    run(build, copy, OFFLINE)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    files = {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"} | python | data
    return Built(wheel, sdist, {f"spaceport/{name}" for name in files})


def unpacked(sdist: Path, folder: Path) -> Path:
    """The folder of an unpacked sdist."""
    with tarfile.open(sdist) as opened:
        opened.extractall(folder, filter="data")
    (found,) = folder.glob("spaceport-*/")
    return found


@pytest.mark.slow
def test_the_wheel_holds_every_file_for_this_system_and_every_python(built: Built) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_") if compiler() else "any"
    assert built.wheel.name == f"spaceport-{spaceport.__version__}-py3-none-{platform}.whl"
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        info = f"spaceport-{spaceport.__version__}.dist-info"
        assert b"License-Expression: Apache-2.0" in wheel.read(f"{info}/METADATA").splitlines()
        assert "spaceport = spaceport.tools.cli:main" in wheel.read(f"{info}/entry_points.txt").decode().splitlines()
    assert built.files - names == set(), "ignored by git, or needs an __init__.py or an entry in package-data"
    assert names - built.files == ({f"spaceport/kernels/{library_name()}"} if compiler() else set())
    assert "spaceport/tools/demo/model/model.safetensors" in names


@pytest.mark.slow
def test_the_sdist_holds_every_file(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    assert {name.removeprefix("spaceport/") for name in built.files if name.count("/") > 1} - names == set()
    assert {"LICENSE", "pyproject.toml", "setup.py", "src/spaceport/__init__.py"} | CHECKOUT_ONLY <= names
    sources = {f"kernels/{path.name}" for path in [*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]}
    assert {name for name in names if name.startswith("kernels/") and not name.endswith(".py")} == sources
    assert [name for name in names if name.startswith("tests/")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compilers", "reason"),
    [
        ({}, r"no C\+\+ compiler found: install g\+\+ or clang, or pip install ziglang"),
        (
            {"c++": "echo 'choose.cpp:1: error: no such file' >&2; exit 1"},
            r"\S+/c\+\+ failed: choose.cpp:1: error: no such",
        ),
    ],
)
def test_an_installation_goes_on_without_native_operators(
    compilers: dict[str, str], reason: str, built: Built, tmp_path: Path
) -> None:
    folder = unpacked(built.sdist, tmp_path)
    for name, script in compilers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    # Python without the packages of this process, where ziglang may be one of them.
    backend = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    for name in ("setuptools", "_distutils_hack"):
        source = importlib.util.find_spec(name)
        assert source is not None
        assert source.origin is not None
        shutil.copytree(Path(source.origin).parent, tmp_path / "site" / name)
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path / "site")}
    done = started((sys.base_prefix + "/bin/python3", "-c", backend), folder, environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == f"spaceport-{spaceport.__version__}-py3-none-any.whl"
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("spaceport: ")]
    assert re.match(rf"spaceport: installed without native operators: {reason}", said)
    assert said.endswith("run with the standard operators of ONNX Runtime, which are slower.")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(zig() is None, reason="ziglang is not installed: pip install ziglang")
@pytest.mark.parametrize("system", TARGETS)
def test_a_wheel_for_another_system_has_its_library(system: str, built: Built, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path)
    run((*command, unpacked(built.sdist, tmp_path)), tmp_path, os.environ | {"SPACEPORT_BUILD_FOR": system})
    (wheel,) = tmp_path.glob("*.whl")
    target = TARGETS[system]
    assert wheel.name == f"spaceport-{spaceport.__version__}-py3-none-{target.wheel_tag}.whl"
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if "/spaceport_kernels." in name]
        library = opened.read(name)
    assert name == f"spaceport/kernels/{library_name(target.system)}"
    magic = {"Linux": b"\x7fELF", "Darwin": b"\xcf\xfa\xed\xfe", "Windows": b"MZ"}[target.system]
    assert library.startswith(magic)
    assert b"RegisterCustomOps" in library
    assert b"libstdc++" not in library


def test_a_system_without_wheels_is_an_error_that_names_those_with_wheels(tmp_path: Path) -> None:
    command = (sys.executable, ROOT / "setup.py", "--version")
    done = started(command, tmp_path, os.environ | {"SPACEPORT_BUILD_FOR": "solaris"})
    assert done.returncode != 0
    assert "SPACEPORT_BUILD_FOR is solaris, expected any or one of linux-x86_64, linux-aarch64" in done.stderr


@pytest.mark.slow
def test_the_installed_wheel_runs_from_its_own_files(built: Built, tmp_path: Path) -> None:
    install = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", tmp_path / "site")
    run((*install, built.wheel), tmp_path, OFFLINE)
    assert lacking(tmp_path / "site", tmp_path) == {}


@pytest.mark.slow
@pytest.mark.nightly
def test_the_wheel_generates_in_an_empty_environment(built: Built, tiny_bundle: Path, tmp_path: Path) -> None:
    """The only test that takes packages from pip's index, or from its cache."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "XDG_CACHE_HOME")  # but for the user's cache
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    programs = tmp_path / "venv" / "bin"
    run((sys.executable, "-m", "venv", programs.parent), tmp_path)
    pip = (programs / "pip", "--disable-pip-version-check", "--retries", "1", "-q")
    wanted = ("-c", ROOT / "constraints.txt", f"{built.wheel}[cpu]")
    installed = started((*pip, "install", *wanted), tmp_path, environment)
    if installed.returncode:
        probe = started(
            (*pip, "download", "--no-cache-dir", "--no-deps", "-d", tmp_path, "click"), tmp_path, environment
        )
        reason = (probe.stderr.strip().splitlines() or [""])[-1]
        if probe.returncode:
            pytest.skip(f"pip reaches no index, and its cache lacks packages: {reason}")
    assert installed.returncode == 0, installed.stderr[-4000:]
    program, prompt = programs / "spaceport", ("abc", "--max-tokens", "8")
    generated = started((program, "generate", tiny_bundle, *prompt), tmp_path, environment)
    assert (generated.returncode, generated.stderr) == (0, "")
    with Runtime.open(tiny_bundle) as runtime:
        assert generated.stdout == f"{runtime.generate('abc', Decoding(max_tokens=8)).text}\n"
    missing = started((program, "generate", TINY, *prompt), tmp_path, environment)
    assert missing.returncode == MISSING
    assert re.search(r"its export needs the package torch, which is not installed: pip .*\[export\]", missing.stderr)
