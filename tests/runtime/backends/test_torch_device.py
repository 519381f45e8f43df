"""Torch's device: what a TensorRT engine asks of a GPU does there what it does on the CPU, by torch alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch

from spaceport.runtime.backends import MissingBackend, require_module, require_torch
from spaceport.runtime.backends.captured import Captured
from spaceport.runtime.backends.on_tensorrt import move_slots
from spaceport.runtime.backends.torch_device import Cuda

T = TypeVar("T")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA here")


def on_another_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has CUDA here")
def test_a_torch_without_cuda_raises_before_an_engine_is_opened() -> None:
    with pytest.raises(MissingBackend, match=r"backend tensorrt keeps its buffers in torch, and torch .* has no CUDA"):
        require_torch("tensorrt", "pip install it")
    pytest.importorskip("tensorrt_rtx")
    with pytest.raises(MissingBackend, match="backend tensorrt-rtx keeps its buffers in torch"):
        require_module("tensorrt-rtx")


def steps(device: Cuda) -> tuple[Callable[[int, int], torch.Tensor], Captured]:
    """A call as an engine makes it: rows to the device, work on what is there, the result back."""
    rows, taken = device.host(4096).view(torch.float32), device.host(4096).view(torch.float32)
    there, state = device.zeros((1024,), torch.float32), device.zeros((1024,), torch.float32)
    captured = Captured(device.capture)

    def work(size: int) -> None:
        torch.mul(there[:size], 2, out=state[:size])
        state[:size].add_(size)

    def step(size: int, value: int) -> torch.Tensor:
        rows[:size] = value
        with device.working():
            there[:size].copy_(rows[:size], non_blocking=True)
            captured.play(size, lambda: work(size), lambda: None)
            taken[:size].copy_(state[:size], non_blocking=True)
            device.wait()
        return taken[:size].clone()

    return step, captured


@pytest.mark.gpu
@needs_cuda
def test_graphs_of_one_thread_are_played_on_another() -> None:
    step, captured = steps(Cuda())
    dice = np.random.default_rng(0)
    for number in range(60):
        size, value = int(dice.choice((1, 9, 36, 700))), int(dice.integers(100))

        def run(size: int = size, value: int = value) -> torch.Tensor:
            return step(size, value)

        got = run() if number % 3 else on_another_thread(run)
        assert torch.equal(got, torch.full((size,), 2.0 * value + size))
    assert len(captured) == 4


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_moves_on_a_gpu_are_those_on_the_cpu(dtype: torch.dtype) -> None:
    device, dice = Cuda(), np.random.default_rng(1)
    here = torch.from_numpy(dice.random((6, 3, 2, 64, 8), np.float32)).to(dtype)
    there = device.zeros(here.shape, dtype)
    there.copy_(here)
    torch.cuda.synchronize()
    for _ in range(20):
        moves = [(dice.permutation(64)[:7], dice.permutation(64)[:7]) for _ in range(2)]
        move_slots(here, 1, moves)
        with device.working():
            move_slots(there, 1, moves)
    device.wait()
    assert torch.equal(there.cpu(), here)


@pytest.mark.gpu
@needs_cuda
def test_memory_that_is_let_go_of_is_there_for_others() -> None:
    device = Cuda()
    before = torch.cuda.mem_get_info()[0]
    held = device.zeros((1 << 30,), torch.uint8)
    device.wait()
    assert before - torch.cuda.mem_get_info()[0] >= 1 << 30
    del held
    device.release_cached()
    assert before - torch.cuda.mem_get_info()[0] < 1 << 28


@pytest.mark.gpu
@needs_cuda
def test_addresses_are_as_aligned_as_tensorrt_asks() -> None:
    device = Cuda()
    for size in (1, 3, 1000, 1 << 20):
        assert device.zeros((size,), torch.uint8).data_ptr() % 256 == 0
        assert device.host(size).is_pinned()
