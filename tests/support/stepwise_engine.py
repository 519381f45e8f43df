"""Stepwise engine: a fake engine that runs a step on command, for tests of what happens between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Semaphore, Thread

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.engine import Batch, EngineFault
from spaceport.runtime.session import Runtime
from support.hash_engine import HashEngine, Language
from support.hash_runtime import hash_runtime

_PATIENCE = 60.0  # seconds after which a test fails
_ALL = 10**4  # steps; releasing a semaphore takes a microsecond for each


@dataclass
class StepwiseEngine(HashEngine):
    """An engine that waits in each step until the test allows it."""

    asked: Semaphore = field(default_factory=lambda: Semaphore(0))
    leave: Semaphore = field(default_factory=lambda: Semaphore(0))
    broken: bool = False  # whether its steps fail

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.asked.release()
        assert self.leave.acquire(timeout=_PATIENCE)
        if self.broken:
            raise EngineFault("the fake engine failed")
        return super().run(batch)

    def wait(self) -> None:
        """Wait until the next step is requested."""
        assert self.asked.acquire(timeout=_PATIENCE)

    def step(self) -> None:
        """Run the requested step, and wait until the next one is requested."""
        self.leave.release()
        self.wait()

    def go(self) -> None:
        """Run all further steps."""
        self.leave.release(_ALL)


def stepwise_runtime(language: Language, requests: int = 1) -> tuple[Runtime, StepwiseEngine]:
    """A runtime over a stepwise engine."""
    with hash_runtime(language) as like:
        engine = StepwiseEngine(language, like.engine.capacity, requests)
        return Runtime(like.bundle, engine, like.max_seq_len), engine


def close_between_steps(runtime: Runtime, engine: StepwiseEngine) -> None:
    """Close a runtime whose engine waits in a step, with no more steps than that needs."""
    closing = Thread(target=runtime.close)
    closing.start()
    while closing.is_alive():
        engine.leave.release()
        closing.join(0.1)
