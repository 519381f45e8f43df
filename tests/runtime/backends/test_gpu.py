"""On a GPU: engines and ONNX Runtime write exact texts, in place, with CUDA graphs as without.

The tests of ONNX Runtime also run without a GPU, where the CPU takes its place."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from spaceport.exporter.checkpoint import quiet_libraries
from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.tensorrt.to_tensorrt import open_library
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.manifest import LIBRARIES, Flavour
from spaceport.graphs.contract.signature import Precision
from spaceport.runtime import Decoding, Runtime
from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.machine import gpu, no_gpu
from spaceport.runtime.backends.on_cuda import DeviceEngine
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.engine import EngineOptions
from spaceport.tools.bench.steps import chain_batch
from spaceport.tools.cli import run
from spaceport.tools.demo.prompts import prompts_of
from support.exported import bundle_of
from support.paths import DEMO, TINY
from support.small_bundle import forking_copy
from support.stand_in_driver import engine_on_cpu

LENGTH = 512
CPU, CUDA = "onnxruntime", "onnxruntime-cuda"
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(no_gpu() is not None, reason="no NVIDIA GPU"))
BACKENDS = (CPU, pytest.param(CUDA, marks=ON_GPU))
PROMPTS: list[str] = [*json.loads((TINY / "prompts.json").read_text("utf-8")).values()]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=ON_GPU) for name in ("tensorrt", "tensorrt-rtx")])
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
    export(DEMO, bundle, ExportOptions(FORMATS[request.param], "append"))
    asked = ["--backend", flavour, "--max-requests", "4", "--max-seq-len", str(LENGTH)]
    assert run(["build", str(bundle), *asked]) == 0
    return bundle


def require_exact(bundle: Path, backend: str, folder: Path, *options: str) -> None:
    """A bundle's logits are PyTorch's, and its drafted texts are the plain ones."""
    prompts = folder / "prompts.jsonl"
    lines = [{"text" if isinstance(prompt, str) else "messages": prompt} for prompt in prompts_of(DEMO).values()]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    assert run(["check", str(bundle), str(DEMO), "--backend", backend]) == 0
    assert run(["audit", str(bundle), str(prompts), "--backend", backend, *options]) == 0


def test_engines_agree_with_pytorch_and_draft_plain_texts(built: Path, flavour: Flavour, tmp_path: Path) -> None:
    require_exact(built, flavour, tmp_path)


def test_cuda_graphs_compute_what_the_plain_path_does(built: Path, flavour: Flavour) -> None:
    """To the bit where they are the same kernels; TensorRT-RTX compiles those of a shape at once only to capture them."""
    require_same_with_graphs(open_bundle(built), flavour, 0.0 if flavour == "tensorrt" else 1e-2)


def require_same_with_graphs(bundle: Bundle, backend: str, within: float) -> None:
    engines = [opened(bundle, backend, EngineOptions(1152, 2, graphs=graphs)) for graphs in (True, False)]
    dice = np.random.default_rng(0)
    for rows in (40, 1, 9, 36, 1, 9, 36, 1, 36, 9, 9, 36, 1, 1, 64, 1, 9):
        batch = chain_batch(engines[0], rows, 64, dice)
        got, expected = (engine.run(batch) for engine in engines)
        assert np.abs(got - expected).max() <= within * np.abs(expected).max()
    for engine in engines:
        engine.close()


def opened(bundle: Bundle, backend: str, options: EngineOptions) -> DeviceEngine:
    """An engine of ONNX Runtime on the GPU, or its stand-in; or one of TensorRT."""
    engine = engine_on_cpu(bundle, options) if backend == CPU else open_engine(bundle, backend, options)
    assert engine.notes == ()
    return engine  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(CPU, "float16", marks=pytest.mark.nightly),
        *(pytest.param(CUDA, dtype, marks=ON_GPU) for dtype in ("float16", "bfloat16")),
    ],
)
def test_a_bundle_agrees_with_pytorch_and_drafts_plain_texts(backend: str, dtype: Precision, tmp_path: Path) -> None:
    require_exact(bundle_of(DEMO, ExportOptions(FORMATS[dtype])), backend, tmp_path, "--max-tokens", "48")


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafted_forked_and_eight_texts_at_once_are_the_plain_ones_of_the_cpu(
    backend: str, tiny_bundle: Path, tmp_path: Path
) -> None:
    bundle = forking_copy(tiny_bundle, tmp_path / "bundle")
    with (
        Runtime.open(bundle, backend=backend, max_seq_len=192, max_requests=8, step_costs="free") as runtime,
        Runtime.open(bundle, backend=CPU, max_seq_len=192, threads=1, step_costs="free") as cpu,
    ):
        assert runtime.notes == ()
        for fork in (False, True):
            plain = [
                cpu.generate(prompt, Decoding(max_tokens=40, mask_slots=0, lookup=0, fork=fork)).tokens
                for prompt in PROMPTS
            ]
            for _ in range(2):  # the second time, captured graphs are replayed
                streams = [
                    runtime.stream(PROMPTS[number % 3], Decoding(max_tokens=40, mask_slots=number % 6, fork=fork))
                    for number in range(8)
                ]
                found = [stream.completion().tokens for stream in streams]
                assert found == [plain[number % 3] for number in range(8)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_cuda_graphs_of_onnxruntime_compute_what_the_plain_path_does(backend: str, half_bundle: Path) -> None:
    require_same_with_graphs(open_bundle(half_bundle), backend, 0.0)


def copied_bytes(trace: Path) -> Counter[str]:
    """Bytes that a trace of torch's profiler has copied between the host and the GPU, by direction."""
    copied = Counter[str]()
    for event in json.loads(trace.read_text("utf-8"))["traceEvents"]:
        if event.get("cat") == "gpu_memcpy":
            copied[event["name"].split()[1]] += event["args"]["bytes"]
    return copied


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hundred_steps_write_in_place_and_copy_inputs_and_chosen_tokens_only(
    backend: str, half_bundle: Path, tmp_path: Path
) -> None:
    engine = opened(open_bundle(half_bundle), backend, EngineOptions(1152, 2))
    dice = np.random.default_rng(0)
    for rows in (64, 9, 9, 9, 9):  # the last one is captured
        engine.select(chain_batch(engine, rows, 256, dice))
    places = [engine._address(buffer, 0) for buffer in range(2 * engine.signature.layers)]
    with profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]) as profiler:
        for _ in range(100):
            engine.select(chain_batch(engine, 9, 256, dice))
            outputs = engine._binding.get_outputs_as_ortvaluevector()
            assert [output.data_ptr() for output in outputs][1:] == places
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    copied = copied_bytes(tmp_path / "trace.json")
    assert (backend == CUDA) == bool(copied)
    inputs = 100 * max(size for use, size in engine._memory if use == "rows")
    assert copied["HtoD"] <= 2 * inputs  # also addresses and strides of a few operators
    assert copied["DtoH"] <= 100 * 9 * 4 * 64  # a few best tokens of each row
    assert copied["DtoD"] < 100 * engine._request_bytes
    engine.close()
