"""GPU, load and start benchmarks: variants that are measured or fail, requests, and files in the page cache."""

from __future__ import annotations

import dataclasses
import mmap
import sys
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.backends import device
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import EngineFault
from spaceport.tools.bench import gpu, load
from spaceport.tools.bench.checkpoint import make_checkpoint
from spaceport.tools.bench.engines import EngineMeasurement, EngineVariant
from spaceport.tools.bench.gpu_page import GpuPage, MeasuredModel, markdown, table
from spaceport.tools.bench.outside import RoundCost
from spaceport.tools.bench.start.page_cache import cached_share, drop, read
from spaceport.tools.bench.steps import StepCost
from spaceport.tools.cli.bench.gpu import run_command


@pytest.mark.nightly
def test_every_variant_that_can_run_is_measured_and_the_others_have_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU instead of a GPU: the same bundles and calls."""

    def failing(*arguments: object) -> EngineMeasurement:
        raise EngineFault("the engine failed")

    make_checkpoint(tmp_path / "tiny", "tiny", dtype="float16")
    backends = ("onnxruntime", "tensorrt-rtx")
    options = gpu.GpuBenchOptions(tmp_path, backends, flavours=(), rows=(1, 4), rounds=2, requests=2, length=96)
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
    monkeypatch.setattr(gpu, "measure", failing)
    model = gpu.measure_model(options, options.work / "tiny", run_command, lambda what: None)
    assert (model.failed["onnxruntime"], model.measured) == ("the engine failed", [])

    if sys.platform == "linux" and device.no_gpu() is not None:  # a build that fails is reported with its error
        bundle = gpu.bundle_of(options, options.work / "tiny", "append")
        building = dataclasses.replace(options, flavours=("tensorrt-rtx",))
        outcomes = gpu.build(building, bundle, run_command, lambda what: None)
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
    assert table(("a", "b"), [("x\ny", "z")]) == "| a | b |\n| --- | --- |\n| x y | z |"


def test_load_repeats_the_prompts_of_a_checkpoint_in_order() -> None:
    load_requests = load.prompt_requests(["a", "b"], 3, Decoding(max_tokens=5))
    assert [request.prompt for request in load_requests] == ["a", "b", "a"]
    lengths = [len(request.prompt) for request in load.random_requests(50, 10, Decoding())]
    assert min(lengths) >= 5
    assert max(lengths) <= 15
    assert len(set(lengths)) > 3


def test_a_folder_that_was_read_is_in_memory_and_a_mapped_file_cannot_be_dropped(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(bytes(1 << 20))
    (tmp_path / "empty").touch()
    read(tmp_path)
    assert cached_share(tmp_path / "inner" / "file") == 1.0
    assert cached_share(tmp_path / "empty") == 0.0
    file = tmp_path / "inner" / "file"
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # now all pages are in use
        with pytest.raises(
            OptionFault, match="stays in the page cache, so reading it from its disk cannot be measured"
        ):
            drop(tmp_path)
        assert cached_share(file) == 1.0
