"""GPU, load and start benchmarks, and the best drafts for step costs and acceptance rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from spaceport.runtime.backends.machine import no_gpu
from spaceport.tools.bench import gpu
from spaceport.tools.bench.checkpoint import make_checkpoint
from spaceport.tools.bench.gpu import EngineVariant, GpuResults
from spaceport.tools.cli.bench.gpu import run_command


@pytest.mark.nightly
def test_every_variant_that_can_run_is_measured_and_the_others_have_reasons(tmp_path: Path) -> None:
    """On the CPU instead of a GPU: the same bundles and calls."""
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
    if no_gpu() is not None:
        assert "needs an NVIDIA GPU" in model.failed["tensorrt-rtx"]
    assert messages == ["measuring tiny, onnxruntime"]
    page = GpuResults({"GPU": "none"}, [model], [("a|udit", "loss\nless")]).report().markdown()
    assert "| onnxruntime |" in page
    assert r"| a\|udit | loss less |" in page
