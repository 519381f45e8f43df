"""Lifetime: what a TensorRT engine holds while it is open, and what it releases when it is closed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spaceport.runtime.bundle import BundleError
from spaceport.runtime.engine import EngineFault
from support.stand_in_tensorrt import StandInDevice, api_of, batch_of_rows, opened, opened_with, plan_of


def test_a_closed_engine_holds_no_memory(tiny_append_bundle: Path) -> None:
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    device = StandInDevice()
    engine: Any = opened(bundle, plan, device)
    for _ in range(3):
        engine.run(batch_of_rows(1))
    weights = weakref.ref(engine._engine)
    engine.close()
    gc.collect()
    assert weights() is None
    assert (device.waited, device.given_back) == (4, 1)
    held = [value for value in vars(engine).values() if isinstance(value, torch.Tensor)]
    assert len(held) > 3
    assert not any(tensor.untyped_storage().nbytes() for tensor in held)
    assert not engine._block.memory.size


def test_a_profile_that_is_refused_is_an_engine_fault(tiny_append_bundle: Path) -> None:
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    plan.switches = False
    with pytest.raises(
        EngineFault, match="tensorrt-rtx opens no context for profile 0: setOptimizationProfileAsync: no"
    ):
        opened(bundle, plan, StandInDevice())


class Refusing(StandInDevice):
    """A GPU that captures nothing."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_a_step_that_cannot_be_captured_is_an_engine_fault(tiny_append_bundle: Path) -> None:
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    engine = opened(bundle, plan, Refusing())
    engine.run(batch_of_rows(1))
    with pytest.raises(EngineFault, match=r"cannot be captured as a CUDA graph \(CUDA error: operation not permitted"):
        engine.run(batch_of_rows(1))


def test_each_of_several_engines_reports_its_own_failure(tiny_append_bundle: Path) -> None:
    """The library knows the logger of the first one only, and may send it messages when that one is closed."""
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    device = StandInDevice()
    api = api_of(plan, device)
    one = opened_with(api, bundle, plan, device)
    other = opened_with(api, bundle, plan, device)
    one.close()
    del one
    gc.collect()
    plan.fails = True
    for engine in (other, opened_with(api, bundle, plan, device)):
        with pytest.raises(EngineFault, match="enqueueV3: the GPU has caught fire"):
            engine.run(batch_of_rows(1))


@pytest.mark.parametrize(
    "said",
    [
        "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)",
        "[executionContext.cpp::ExecutionContext::470] Error Code 2: OutOfMemory (no further information)",
    ],
)
def test_a_full_gpu_is_distinguished_from_a_broken_engine(said: str, tiny_append_bundle: Path) -> None:
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    plan.opens, plan.why_not = False, said
    api = api_of(plan, StandInDevice())
    with pytest.raises(MemoryError):
        opened_with(api, bundle, plan, StandInDevice())
    plan.why_not = "the engine plan file is not compatible"
    with pytest.raises(BundleError, match="does not open: the engine plan file is not compatible: build it again"):
        opened_with(api, bundle, plan, StandInDevice())
