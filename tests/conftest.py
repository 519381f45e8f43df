"""Settings of the suite: tiers, no network, seeds, one thread per process; bundles that many tests need."""

import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from spaceport.runtime.backends.machine import cpu_class, cpu_name
from support.exported import bundle_in
from support.paths import DEMO, TINY
from support.tiers import OnChange, forbid_torch, needs_torch

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
    parser.addoption("--unchanged", action="store_true", help="Run also what has passed and has not changed since.")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts `make test &` so, and interrupts are tested
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("fast"):
        forbid_torch()


@pytest.hookimpl(trylast=True)  # after the marks are chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files with slow tests first; leave out what the fast tier does not run."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if config.getoption("fast"):
        left_out = {item for item in items if needs_torch(item) or item.get_closest_marker("slow")}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])
    config.pluginmanager.register(OnChange(items, config.getoption("unchanged")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the CPU, on which it depends what the tests have shown."""
    terminalreporter.write_line(f"CPU: {cpu_name()}, {cpu_class()}")


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


# Bundles are read-only: a test that changes one changes a copy.


@pytest.fixture(scope="session")
def tiny_bundle() -> Path:
    """The tiny trained checkpoint as a bundle with the scatter lowering."""
    return bundle_in(TINY, "float32")


@pytest.fixture(scope="session")
def demo_bundle() -> Path:
    """The demo model, which forks, as a bundle."""
    return bundle_in(DEMO, "float32")


@pytest.fixture(scope="session")
def tiny_append_bundle() -> Path:
    """The tiny trained checkpoint with the append lowering."""
    return bundle_in(TINY, "float32", "append")


@pytest.fixture(scope="session")
def half_bundle() -> Path:
    """The tiny trained checkpoint in float16."""
    return bundle_in(TINY, "float16")


@pytest.fixture(scope="session")
def tiny_int8_bundle() -> Path:
    """The tiny trained checkpoint in int8."""
    return bundle_in(TINY, "int8")


@pytest.fixture(scope="session")
def demo_int8_bundle() -> Path:
    """The demo model in int8."""
    return bundle_in(DEMO, "int8")


# Formats and lowerings of bundles on which speculative output has to equal plain output.
_FLOAT = (pytest.param(("float32", "scatter"), id="scatter"), pytest.param(("float32", "append"), id="append"))
_INT8 = ("int8", "scatter")


@pytest.fixture(scope="session", params=(*_FLOAT, pytest.param(_INT8, id="int8")))
def any_tiny_bundle(request: pytest.FixtureRequest) -> Path:
    """The tiny trained checkpoint with each format and lowering in turn."""
    return bundle_in(TINY, *request.param)


@pytest.fixture(scope="session", params=(*_FLOAT, pytest.param(_INT8, id="int8", marks=pytest.mark.nightly)))
def any_demo_bundle(request: pytest.FixtureRequest) -> Path:
    """The demo model with each format and lowering in turn."""
    return bundle_in(DEMO, *request.param)
