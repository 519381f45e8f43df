"""The GPU's bench: it measures what it says on whatever is there, and one way that fails leaves the others."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from spaceport.runtime.backends import device
from spaceport.runtime.engine import EngineFault
from spaceport.tools.bench import gpu
from spaceport.tools.bench.checkpoint import make_checkpoint
from spaceport.tools.bench.engines import EngineMeasurement, EngineVariant
from spaceport.tools.bench.gpu_page import GpuPage, MeasuredModel, markdown, table
from spaceport.tools.bench.outside import RoundCost
from spaceport.tools.bench.steps import StepCost
from spaceport.tools.cli.bench.gpu import run_command


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> gpu.GpuBenchOptions:
    """On the processor, which takes the place of a GPU: the same bundles, the same calls."""
    work = tmp_path_factory.mktemp("bench")
    make_checkpoint(work / "tiny", "tiny", dtype="float16")
    return gpu.GpuBenchOptions(
        work, backends=("onnxruntime", "tensorrt-rtx"), flavours=(), rows=(1, 4), rounds=2, requests=2, length=96
    )


def test_every_way_that_can_be_run_is_measured_and_the_others_say_why_not(options: gpu.GpuBenchOptions) -> None:
    said: list[str] = []
    model = gpu.measure_model(options, options.work / "tiny", run_command, said.append)
    (found,) = model.measured
    assert (model.name, model.dtype, found.variant) == ("tiny", "float16", EngineVariant("onnxruntime", False))
    assert [step.rows for step in found.steps] == [1, 4]
    assert next((cost.requests, round(cost.rows)) for cost in found.outside) == (1, 1)
    assert all(cost.milliseconds > 0 for cost in found.outside)
    if device.no_gpu() is not None:
        assert "needs an NVIDIA GPU" in model.failed["tensorrt-rtx"]
    assert said == ["measuring tiny, onnxruntime"]
    page = markdown(GpuPage({"GPU": "none"}, [model]))
    assert "| onnxruntime |" in page
    assert "| tensorrt-rtx | " in page


def test_a_way_that_fails_leaves_the_others(options: gpu.GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def burnt(*arguments: object) -> EngineMeasurement:
        raise EngineFault("it has caught fire")

    monkeypatch.setattr(gpu, "measure", burnt)
    model = gpu.measure_model(options, options.work / "tiny", run_command, lambda what: None)
    assert model.failed["onnxruntime"] == "it has caught fire"
    assert not model.measured


@pytest.mark.skipif(sys.platform != "linux", reason="tensorrt-rtx is there for Linux only")
def test_a_build_that_fails_tells_its_last_word(options: gpu.GpuBenchOptions) -> None:
    if device.no_gpu() is None:
        pytest.skip("there is a GPU: the build does not fail")
    bundle = gpu.bundle_of(options, options.work / "tiny", "append")
    told = gpu.build(dataclasses.replace(options, flavours=("tensorrt-rtx",)), bundle, run_command, lambda what: None)
    assert "exit code" in told["tensorrt-rtx"]
    assert "NVIDIA" in told["tensorrt-rtx"]


def test_the_page_has_a_line_for_each_way_and_each_note() -> None:
    variant = EngineVariant("tensorrt", True)
    steps = (StepCost(1, 2.0, 1.0), StepCost(36, 2.5, 1.25))
    found = EngineMeasurement(variant, "cuda:0", steps, (RoundCost(1, 1.0, 9, 0.1, 0.2),), ("a|note",))
    other = dataclasses.replace(found, variant=EngineVariant("tensorrt", False), notes=(), outside=())
    model = MeasuredModel(
        "7b", 7_000_000_000, "float16", {"tensorrt": "60 s"}, [found, other], {"onnxruntime-cuda": "no"}
    )
    lines = markdown(GpuPage({"GPU": "one"}, [model], [("audit", "lossless")])).splitlines()
    assert "## 7b: 7.00G weights, float16" in lines
    assert "| way | 1 | 36 |" in lines
    assert "| tensorrt, CUDA graphs | 2.00 (1.00) | 2.50 (1.25) |" in lines
    assert "| tensorrt, CUDA graphs | 0.10 | 0.0071 |" in lines
    assert "| tensorrt, no CUDA graphs |  | 0.0071 |" in lines
    assert r"| tensorrt, CUDA graphs | a\|note |" in lines
    assert "| onnxruntime-cuda | no |" in lines
    assert "| audit | lossless |" in lines


def test_a_table_is_one_line_a_row() -> None:
    assert table(("a", "b"), [("x\ny", "z")]) == "| a | b |\n| --- | --- |\n| x y | z |"
