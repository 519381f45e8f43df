"""Graph threads: whichever OS thread asks, captured graphs are of one, and end with the engine."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.on_device import DeviceEngine
from spaceport.runtime.backends.on_onnxruntime import open_session, session_options
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.engine import Batch, EngineFault
from support.replaying import ReplayingSession

STEP = Batch(
    0,
    np.full((1, 1), 5, np.int64),
    np.zeros((1, 1), np.int64),
    np.zeros((1, 1), np.int64),
    np.tri(1, 64, dtype=np.bool_)[None, None],
    np.zeros((1, 1), np.int64),
)


def device_engine(path: Path) -> tuple[DeviceEngine, ReplayingSession]:
    bundle = open_bundle(path)
    session = ReplayingSession(open_session(bundle, session_options(1, "same"), ["CPUExecutionProvider"]))
    return DeviceEngine(session, bundle.manifest.signature, EngineOptions(512, 1), "cpu", "cpu", graphs=True), session


def test_what_one_os_thread_captured_is_played_for_all(tiny_bundle: Path) -> None:
    engine, session = device_engine(tiny_bundle)
    found = [engine.run(STEP).copy() for _ in range(6)]
    for _ in range(3):
        with ThreadPoolExecutor(1) as other:
            found.append(other.submit(engine.run, STEP).result().copy())
    assert len(session.captured) == 1
    assert session.replays == 9 - 3 - 1
    assert all(np.array_equal(logits, found[0]) for logits in found)


def test_the_thread_ends_with_the_engine(tiny_bundle: Path) -> None:
    before = {*threading.enumerate()}
    engine, _ = device_engine(tiny_bundle)
    engine.run(STEP)
    (thread,) = {thread for thread in threading.enumerate() if thread.name.startswith("spaceport-graphs")} - before
    engine.close()
    assert not thread.is_alive()
    with pytest.raises(EngineFault, match="the engine is closed"):
        engine.run(STEP)


def test_an_engine_that_nobody_closed_is_let_go_of(tiny_bundle: Path) -> None:
    engine, session = device_engine(tiny_bundle)
    engine.run(STEP)
    weights = weakref.ref(session)
    del engine, session
    gc.collect()
    assert weights() is None
