"""GPU benchmark: every variant is measured, and one that fails does not stop the others."""

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
    """The CPU instead of a GPU: the same bundles and calls."""
    work = tmp_path_factory.mktemp("bench")
    make_checkpoint(work / "tiny", "tiny", dtype="float16")
    return gpu.GpuBenchOptions(
        work, backends=("onnxruntime", "tensorrt-rtx"), flavours=(), rows=(1, 4), rounds=2, requests=2, length=96
    )


@pytest.mark.nightly
def test_every_variant_that_can_run_is_measured_and_the_others_have_reasons(options: gpu.GpuBenchOptions) -> None:
    messages: list[str] = []
    model = gpu.measure_model(options, options.work / "tiny", run_command, messages.append)
    (found,) = model.measured
    assert (model.name, model.dtype, found.variant) == ("tiny", "float16", EngineVariant("onnxruntime", False))
    assert [step.rows for step in found.steps] == [1, 4]
    assert next((cost.requests, round(cost.rows)) for cost in found.outside) == (1, 1)
    assert all(cost.milliseconds > 0 for cost in found.outside)
    if device.no_gpu() is not None:
        assert "needs an NVIDIA GPU" in model.failed["tensorrt-rtx"]
    assert messages == ["measuring tiny, onnxruntime"]
    page = markdown(GpuPage({"GPU": "none"}, [model]))
    assert "| onnxruntime |" in page
    assert "| tensorrt-rtx | " in page


def test_a_variant_that_fails_does_not_stop_the_others(
    options: gpu.GpuBenchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> EngineMeasurement:
        raise EngineFault("the engine failed")

    monkeypatch.setattr(gpu, "measure", failing)
    model = gpu.measure_model(options, options.work / "tiny", run_command, lambda what: None)
    assert model.failed["onnxruntime"] == "the engine failed"
    assert not model.measured


@pytest.mark.skipif(sys.platform != "linux", reason="tensorrt-rtx is there for Linux only")
def test_a_build_that_fails_is_reported_with_its_error(options: gpu.GpuBenchOptions) -> None:
    if device.no_gpu() is None:
        pytest.skip("there is a GPU: the build does not fail")
    bundle = gpu.bundle_of(options, options.work / "tiny", "append")
    outcomes = gpu.build(
        dataclasses.replace(options, flavours=("tensorrt-rtx",)), bundle, run_command, lambda what: None
    )
    assert "exit code" in outcomes["tensorrt-rtx"]
    assert "NVIDIA" in outcomes["tensorrt-rtx"]


def test_the_page_has_a_row_for_each_variant_and_each_note() -> None:
    variant = EngineVariant("tensorrt", True)
    steps = (StepCost(1, 2.0, 1.0), StepCost(36, 2.5, 1.25))
    found = EngineMeasurement(variant, "cuda:0", steps, (RoundCost(1, 1.0, 9, 0.1, 0.2),), ("a|note",))
    other = dataclasses.replace(found, variant=EngineVariant("tensorrt", False), notes=(), outside=())
    model = MeasuredModel(
        "7b", 7_000_000_000, "float16", {"tensorrt": "60 s"}, [found, other], {"onnxruntime-cuda": "no"}
    )
    lines = markdown(GpuPage({"GPU": "one"}, [model], [("audit", "lossless")])).splitlines()
    assert "## 7b: 7.00G weights, float16" in lines
    assert "| variant | 1 | 36 |" in lines
    assert "| tensorrt, CUDA graphs | 2.00 (1.00) | 2.50 (1.25) |" in lines
    assert "| tensorrt, CUDA graphs | 0.10 | 0.0071 |" in lines
    assert "| tensorrt, no CUDA graphs |  | 0.0071 |" in lines
    assert r"| tensorrt, CUDA graphs | a\|note |" in lines
    assert "| onnxruntime-cuda | no |" in lines
    assert "| audit | lossless |" in lines


def test_each_table_row_is_one_line() -> None:
    assert table(("a", "b"), [("x\ny", "z")]) == "| a | b |\n| --- | --- |\n| x y | z |"
