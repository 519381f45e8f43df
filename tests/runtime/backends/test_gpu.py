"""On a GPU: engines and ONNX Runtime write exact texts, in place, with CUDA graphs as without. Skipped where there is none."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.quiet import quiet_libraries
from spaceport.exporter.tensorrt.to_tensorrt import open_library
from spaceport.graphs.contract.manifest import LIBRARIES, Flavour
from spaceport.runtime import Decoding, Runtime
from spaceport.runtime.backends import open_engine, require_module
from spaceport.runtime.backends.captured import Captured
from spaceport.runtime.backends.device import gpu, no_gpu
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.on_device import DeviceEngine
from spaceport.runtime.backends.torch_device import Cuda
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.engine import Batch
from spaceport.runtime.scheduling.capacity import capacity_for
from spaceport.tools.bench.steps import chain_batch
from spaceport.tools.cli import run
from spaceport.tools.demo.prompts import prompts_of
from support.paths import DEMO, TINY

REASON = no_gpu()
LENGTH = 512

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=f"{REASON}")]


@pytest.fixture(scope="module", params=["tensorrt", "tensorrt-rtx"])
def flavour(request: pytest.FixtureRequest) -> Flavour:
    found: Flavour = request.param
    if find_spec(LIBRARIES[found]) is None:
        pytest.skip(f"{found} is not installed")
    library, here = open_library(found), gpu().target
    if library.targets and here not in library.targets:
        pytest.skip(f"{library.name} has no kernels for {here}, only for {', '.join(library.targets)}")
    return found


@pytest.fixture(scope="module", params=["float16", "bfloat16", "float32"])
def built(request: pytest.FixtureRequest, flavour: Flavour, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with an engine for the GPU that is here."""
    quiet_libraries()
    bundle = tmp_path_factory.mktemp("gpu") / f"demo-{request.param}"
    export(DEMO, bundle, ExportOptions(lowering="append", dtype=request.param))
    asked = ["--backend", flavour, "--max-requests", "4", "--max-seq-len", str(LENGTH)]
    assert run(["build", str(bundle), *asked]) == 0
    return bundle


def test_the_best_backend_is_the_engine(built: Path, flavour: Flavour) -> None:
    with Runtime.open(built, max_seq_len=LENGTH) as opened:
        assert opened.engine.device.startswith("cuda:0")
        assert flavour.split("-")[0] in opened.engine.device


def test_engines_agree_with_pytorch(built: Path) -> None:
    assert run(["check", str(built), str(DEMO)]) == 0


def test_drafted_texts_are_plain_texts(built: Path, flavour: Flavour, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"text" if isinstance(prompt, str) else "messages": prompt} for prompt in prompts_of(DEMO).values()]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    assert run(["audit", str(built), str(prompts), "--backend", flavour]) == 0


def test_cuda_graphs_compute_what_the_plain_path_does(built: Path, flavour: Flavour) -> None:
    """To the bit where they are the same kernels; TensorRT-RTX compiles those of a shape at once only to capture them."""
    bundle = open_bundle(built)
    with_graphs, without = (
        open_engine(bundle, flavour, EngineOptions(1152, 2, graphs=graphs)) for graphs in (True, False)
    )
    dice = np.random.default_rng(0)
    for rows in (40, 1, 9, 36, 1, 9, 36, 1, 36, 9, 9, 36, 1, 1, 64, 1, 9):
        batch = chain_batch(with_graphs, rows, 64, dice)
        got, expected = with_graphs.run(batch), without.run(batch)
        if flavour == "tensorrt":
            assert np.array_equal(got, expected)
        assert np.abs(got - expected).max() < 1e-2 * np.abs(expected).max()
    with_graphs.close()
    without.close()


@pytest.fixture
def gpu_bundle(tiny_bundle: Path) -> Bundle:
    """A bundle for an onnxruntime that runs on the GPU; elsewhere the test is skipped."""
    try:
        require_module("onnxruntime-cuda")
    except RuntimeError as reason:
        pytest.skip(str(reason))
    return open_bundle(tiny_bundle)


@pytest.mark.parametrize("graphs", [True, False])
def test_completions_of_onnxruntime_on_a_gpu_are_those_on_the_cpu(gpu_bundle: Bundle, graphs: bool) -> None:
    capacity, prompts = capacity_for(gpu_bundle.manifest, 192), json.loads((TINY / "prompts.json").read_text("utf-8"))
    engine, plain = (
        open_engine(gpu_bundle, backend, EngineOptions(capacity, 3, graphs=graphs))
        for backend in ("onnxruntime-cuda", "onnxruntime")
    )
    assert engine.notes == ()
    assert engine.device.startswith("cuda:0 (NVIDIA ")
    with Runtime(gpu_bundle, engine, 192) as ours, Runtime(gpu_bundle, plain, 192) as theirs:
        for _ in range(2):  # the second time captured graphs are replayed
            found = [
                [
                    runtime.stream([*prompts.values()][number % 3], Decoding(max_tokens=60, mask_slots=number))
                    for number in range(5)
                ]
                for runtime in (ours, theirs)
            ]
            first, second = ([stream.completion().tokens for stream in streams] for streams in found)
            assert first == second


def test_a_request_that_is_cleared_in_onnxruntime_on_a_gpu_holds_zeros(gpu_bundle: Bundle) -> None:
    engine = open_engine(gpu_bundle, "onnxruntime-cuda", EngineOptions(capacity_for(gpu_bundle.manifest, 192), 3))
    assert isinstance(engine, DeviceEngine)
    ids = np.full((1, 1), 5, np.int64)
    mask = np.isin(np.arange(64), (3, 7))[None, None, None]  # itself, and a slot that was written long ago
    row = Batch(1, ids, ids, np.full((1, 1), 3, np.int64), mask, np.zeros((1, 1), np.int64))
    clean = engine.run(row).copy()
    size = engine._kv.tensor_size_in_bytes()
    engine._kv.update_inplace(np.full(size, 0xFF, np.uint8))  # not a number in any type
    assert np.isnan(engine.run(row)).all()
    engine.clear(1)
    assert np.allclose(engine.run(row), clean, atol=1e-5)


needs_torch = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA here")


@needs_torch
def test_graphs_of_one_thread_are_played_on_another() -> None:
    """In a call as an engine makes it: rows to the device, work on what is there, the result back."""
    device, dice = Cuda(), np.random.default_rng(0)
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

    for number in range(60):
        size, value = int(dice.choice((1, 9, 36, 700))), int(dice.integers(100))
        with ThreadPoolExecutor(1) as other:
            got = step(size, value) if number % 3 else other.submit(step, size, value).result()
        assert torch.equal(got, torch.full((size,), 2.0 * value + size))
    assert len(captured) == 4
