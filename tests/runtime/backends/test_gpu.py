"""On a GPU: engines and ONNX Runtime write exact texts, in place, with CUDA graphs as without. Skipped where there is none."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from spaceport.exporter.checkpoint_source import quiet_libraries
from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.tensorrt.to_tensorrt import open_library
from spaceport.graphs.contract.manifest import LIBRARIES, Flavour
from spaceport.runtime import Decoding, Runtime
from spaceport.runtime.backends import open_engine, require_module
from spaceport.runtime.backends.machine import gpu, no_gpu
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.engine import EngineOptions, capacity_for
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
