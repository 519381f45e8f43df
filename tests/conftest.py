"""Settings of the suite: tiers, no network, seeds, one thread per process; bundles that many tests need."""

import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from spaceport.runtime.backends.cpus import cpu_class, cpu_name
from support.exported import exported_once
from support.paths import DEMO
from support.tiers import forbid_torch, imports_torch, needs_torch

# Read by torch, tokenizers and huggingface_hub when they are imported, hence here and not in a fixture.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: more threads cost more than they save

# Records of engines that the tests build and time are not stored with the user's.
_STATE = tempfile.TemporaryDirectory(prefix="spaceport-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name
os.environ["XDG_CACHE_HOME"] = _STATE.name

settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="Run only quick tests that need neither torch nor an exported bundle."
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts `make test &` so, and interrupts are tested
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("fast"):
        forbid_torch()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file that imports torch out of the fast tier without importing it."""
    is_test = collection_path.match("test_*.py")
    return True if config.getoption("fast") and is_test and imports_torch(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files with slow tests first; leave out of the fast tier what it does not run."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if config.getoption("fast"):
        left_out = {item for item in items if needs_torch(item) or item.get_closest_marker("slow")}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the CPU, on which it depends what the tests have shown."""
    kernels = ""
    if not config.getoption("fast"):
        from spaceport.runtime.backends.integer_kernels import is_exact

        kernels = "" if is_exact(setting=False) else "; onnxruntime runs kernels for AVX2 without VNNI"
    terminalreporter.write_line(f"CPU: {cpu_name()}, {cpu_class()}{kernels}")


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Remove what a test has set up to log, such as `spaceport serve` does in its process."""
    root, ours = logging.getLogger(), logging.getLogger("spaceport")
    handlers, levels = set(root.handlers), (root.level, ours.level)
    yield
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in handlers:
            root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny trained checkpoint as a bundle with the scatter lowering; a test that changes it changes a copy."""
    return exported_once(tmp_path_factory, "scatter")


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, which forks, as a bundle."""
    return exported_once(tmp_path_factory, "scatter", DEMO)


@pytest.fixture(scope="session")
def tiny_append_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny trained checkpoint with the append lowering."""
    return exported_once(tmp_path_factory, "append")


@pytest.fixture(scope="session")
def half_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny trained checkpoint in float16."""
    return exported_once(tmp_path_factory, "scatter", dtype="float16")


@pytest.fixture(scope="session")
def tiny_int8_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny trained checkpoint with int8 weights and integer products."""
    return exported_once(tmp_path_factory, "scatter", weights="int8")


@pytest.fixture(scope="session")
def demo_int8_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with int8 weights and integer products."""
    return exported_once(tmp_path_factory, "scatter", DEMO, weights="int8")


# Lowerings and weights of bundles on which speculative output has to equal plain output.
_FLOAT = (pytest.param(("scatter", "same"), id="scatter"), pytest.param(("append", "same"), id="append"))
_APPEND_INT8 = pytest.param(("append", "int8"), id="append int8", marks=pytest.mark.nightly)


@pytest.fixture(scope="session", params=(*_FLOAT, pytest.param(("scatter", "int8"), id="scatter int8"), _APPEND_INT8))
def any_tiny_bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny trained checkpoint with each lowering and kind of weights in turn."""
    lowering, weights = request.param
    return exported_once(tmp_path_factory, lowering, weights=weights)


@pytest.fixture(
    scope="session",
    params=(*_FLOAT, pytest.param(("scatter", "int8"), id="scatter int8", marks=pytest.mark.nightly), _APPEND_INT8),
)
def any_demo_bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with each lowering and kind of weights in turn."""
    lowering, weights = request.param
    return exported_once(tmp_path_factory, lowering, DEMO, weights=weights)
