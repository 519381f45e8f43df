"""Copied slots: on every backend, a row sees the same behind rows that were copied as behind rows that were computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.on_device import DeviceEngine
from spaceport.runtime.backends.on_onnxruntime import open_engine, open_session, session_options
from spaceport.runtime.backends.on_tensorrt import copy_slots
from spaceport.runtime.backends.on_torch import TorchEngine
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.engine import Batch, Engine, slots_in_order

CAPACITY, LENGTH = 192, 70
TOKENS = np.random.default_rng(2).integers(8, 600, LENGTH + 1)
ORDER = np.arange(LENGTH)
MIXED = np.concatenate([np.arange(40), 40 + np.random.default_rng(3).permutation(50)[:30]])  # gaps behind slot 39


def onnxruntime_engine(bundle: Bundle, requests: int) -> Engine:
    return open_engine(bundle, EngineOptions(CAPACITY, requests))


def device_engine(bundle: Bundle, requests: int) -> Engine:
    session = open_session(bundle, session_options(1, "same"), ["CPUExecutionProvider"])
    return DeviceEngine(session, bundle.manifest.signature, EngineOptions(CAPACITY, requests), "cpu", "cpu")


def feed(engine: Engine, request: int, slots: NDArray[np.int64]) -> None:
    """Compute the rows of a prompt into these slots."""
    mask = np.zeros((1, 1, LENGTH, 128), np.bool_)
    for row in range(LENGTH):
        mask[0, 0, row, slots[: row + 1]] = True
    engine.run(Batch(request, TOKENS[None, :LENGTH], ORDER[None], slots[None], mask, np.array([[0]])))


def following(engine: Engine, request: int) -> NDArray[np.float32]:
    """The logits of the next row behind the lowest slots."""
    mask = (np.arange(128) <= LENGTH)[None, None, None]
    at = np.array([[LENGTH]])
    return engine.run(Batch(request, TOKENS[None, LENGTH:], at, at, mask, np.array([[0]]))).copy()


@pytest.mark.parametrize("open_with", [onnxruntime_engine, device_engine])
@pytest.mark.parametrize("slots", [ORDER, MIXED], ids=["in order", "with gaps"])
@pytest.mark.parametrize("requests", [1, 3])
def test_a_row_has_the_logits_that_it_has_behind_computed_rows(
    open_with: type, slots: NDArray[np.int64], requests: int, any_tiny_bundle: Path
) -> None:
    bundle = open_bundle(any_tiny_bundle)
    if open_with is device_engine and bundle.manifest.signature.lowering != "scatter":
        pytest.skip("scatter-lowered bundles only")
    if bundle.manifest.signature.lowering == "append" and slots is MIXED:
        pytest.skip("an append engine has no gaps between rows of one call")
    engine, fresh = open_with(bundle, requests), open_with(bundle, 1)
    # rows in other slots add up in another order; 8-bit activations make quantization steps of it
    within = 1e-3 if bundle.manifest.activations == "float" else 2e-2
    feed(fresh, 0, ORDER)
    expected = following(fresh, 0)
    for target in {0, requests - 1}:
        feed(engine, 0, slots)
        engine.copy(0, target, slots)
        assert np.abs(following(engine, target) - expected).max() <= (0 if slots is ORDER else within)


@pytest.mark.parametrize("target", [0, 1, 2])
def test_all_slots_are_read_before_any_is_written(target: int) -> None:
    slots = np.array([2, 0, 7, 1])
    signature = Signature(2, 3, 4, 50, "float32", "append")
    engine = TorchEngine(lambda: (), signature, 9, 3, "cpu")
    engine._kv[:] = torch.arange(engine._kv.numel()).reshape(engine._kv.shape)
    before, buffers = engine._kv.clone(), engine._kv.clone()
    engine.copy(0, target, slots)
    copy_slots(buffers, 0, target, slots)
    assert torch.equal(engine._kv, buffers)
    assert torch.equal(buffers[:, target, :, :4], before[:, 0][:, :, slots])
    assert torch.equal(buffers[:, target, :, 4:], before[:, target, :, 4:])
    untouched = [request for request in range(3) if request != target]
    assert torch.equal(buffers[:, untouched], before[:, untouched])


def test_slots_in_order_are_counted_from_the_first_one() -> None:
    found = [slots_in_order(np.array(slots, np.int64)) for slots in ([], [0, 1, 2], [0, 2, 1], [1, 0], [0, 1, 3])]
    assert found == [0, 3, 1, 0, 2]
