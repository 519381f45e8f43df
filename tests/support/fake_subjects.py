"""Fake subjects: what `bench compare` measures in tests, each a real process of the fake runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from spaceport.tools.bench.compare import CompareWorkload, WorkerPool
from spaceport.tools.bench.rivals import ComparedRuntime, Environments
from support.paths import TESTS

FAKE = f"{TESTS / 'support' / 'fake_runtime.py'}:FakeRunner"
WORKLOAD = CompareWorkload(
    context=8, tokens=3, rows=(1, 4), prefill=10, requests=2, request_context=4, request_tokens=5
)


def fake_subject(
    name: str, folder: Path, *, is_bundle: bool = False, step: float = 0.01, **options: Any
) -> ComparedRuntime:
    """A subject with the given step time."""
    model = folder / name
    model.mkdir(exist_ok=True)
    (model / "weights").write_bytes(b"12345")
    return ComparedRuntime(name, Path(sys.executable), FAKE, model, "fake", {"step": step, **options}, is_bundle)


def fake_pool(folder: Path) -> WorkerPool:
    """A pool without workers, whose calls are short."""
    return WorkerPool(WORKLOAD, 1, folder / "logs", lambda _: None, timeout=20.0, idle_limit=1.0)


def installed(work: Environments, name: str) -> None:
    """Make an environment look installed: its interpreter is this one."""
    if not work.python(name).exists():
        work.python(name).parent.mkdir(parents=True)
        work.python(name).symlink_to(Path(sys.executable))
        work.record_installed(name)
