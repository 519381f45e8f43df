"""The GPU's bench: it measures what it says on whatever is there, and one way that fails leaves the others."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from spaceport.runtime.backends import device
from spaceport.runtime.engine import Costs, EngineFault
from spaceport.tools.bench import gpu
from spaceport.tools.bench.checkpoint import make_checkpoint
from spaceport.tools.bench.engines import Measured, Way
from spaceport.tools.bench.gpu_page import Page, Shape, markdown, table
from spaceport.tools.bench.outside import Cost
from spaceport.tools.bench.steps import StepCost
from spaceport.tools.cli.bench.gpu import run_command


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> gpu.Plan:
    """On the processor, which takes the place of a GPU: the same bundles, the same calls."""
    work = tmp_path_factory.mktemp("bench")
    make_checkpoint(work / "tiny", "tiny", dtype="float16")
    return gpu.Plan(
        work, backends=("onnxruntime", "tensorrt-rtx"), flavours=(), rows=(1, 4), rounds=2, requests=2, length=96
    )


def test_every_way_that_can_be_run_is_measured_and_the_others_say_why_not(plan: gpu.Plan) -> None:
    said: list[str] = []
    shape = gpu.measure_shape(plan, plan.work / "tiny", run_command, said.append)
    (found,) = shape.measured
    assert (shape.name, shape.dtype, found.way) == ("tiny", "float16", Way("onnxruntime", False))
    assert [step.rows for step in found.steps] == [1, 4]
    assert next((cost.requests, round(cost.rows)) for cost in found.outside) == (1, 1)
    assert all(cost.milliseconds > 0 for cost in found.outside)
    if device.no_gpu() is not None:
        assert "needs an NVIDIA GPU" in shape.failed["tensorrt-rtx"]
    assert said == ["measuring tiny, onnxruntime"]
    page = markdown(Page({"GPU": "none"}, [shape]))
    assert "| onnxruntime |" in page
    assert "| tensorrt-rtx | " in page


def test_a_way_that_fails_leaves_the_others(plan: gpu.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def burnt(*arguments: object) -> Measured:
        raise EngineFault("it has caught fire")

    monkeypatch.setattr(gpu, "measure", burnt)
    shape = gpu.measure_shape(plan, plan.work / "tiny", run_command, lambda what: None)
    assert shape.failed["onnxruntime"] == "it has caught fire"
    assert not shape.measured


@pytest.mark.skipif(sys.platform != "linux", reason="tensorrt-rtx is there for Linux only")
def test_a_build_that_fails_tells_its_last_word(plan: gpu.Plan) -> None:
    if device.no_gpu() is None:
        pytest.skip("there is a GPU: the build does not fail")
    bundle = gpu.bundle_of(plan, plan.work / "tiny", "append")
    told = gpu.build(dataclasses.replace(plan, flavours=("tensorrt-rtx",)), bundle, run_command, lambda what: None)
    assert "exit code" in told["tensorrt-rtx"]
    assert "NVIDIA" in told["tensorrt-rtx"]


def test_the_page_has_a_line_for_each_way_and_each_note() -> None:
    way = Way("tensorrt", True)
    steps = (StepCost(1, 2.0, 1.0), StepCost(36, 2.5, 1.25))
    found = Measured(way, "cuda:0", steps, (Cost(1, 1.0, 9, 0.1, 0.2),), Costs(0.007, 140), ("a|note",))
    other = dataclasses.replace(found, way=Way("tensorrt", False), notes=(), outside=())
    shape = Shape("7b", 7_000_000_000, "float16", {"tensorrt": "60 s"}, [found, other], {"onnxruntime-cuda": "no"})
    lines = markdown(Page({"GPU": "one"}, [shape], [("audit", "lossless")])).splitlines()
    assert "## 7b: 7.00G weights, float16" in lines
    assert "| way | 1 | 36 |" in lines
    assert "| tensorrt, CUDA graphs | 2.00 (1.00) | 2.50 (1.25) |" in lines
    assert "| tensorrt, CUDA graphs | 0.10 | 0.0070 |" in lines
    assert "| tensorrt, no CUDA graphs |  | 0.0070 |" in lines
    assert r"| tensorrt, CUDA graphs | a\|note |" in lines
    assert "| onnxruntime-cuda | no |" in lines
    assert "| audit | lossless |" in lines


def test_a_table_is_one_line_a_row() -> None:
    assert table(("a", "b"), [("x\ny", "z")]) == "| a | b |\n| --- | --- |\n| x y | z |"
