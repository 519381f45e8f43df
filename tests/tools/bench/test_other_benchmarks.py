"""GPU, load and start benchmarks, and the best drafts for step costs and acceptance rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from spaceport.runtime.backends.machine import no_gpu
from spaceport.runtime.costs import StepCosts, relative_costs
from spaceport.tools.bench import gpu
from spaceport.tools.bench.checkpoint import make_checkpoint
from spaceport.tools.bench.gpu import EngineVariant, GpuResults
from spaceport.tools.cli.bench.gpu import run_command
from spaceport.tools.cli.plan import drafts_of, drafts_of_heads

# Seconds per step by rows, of a 1.2B float32 model.
LARGE = StepCosts(0, ((1, 1.0), (2, 1.13), (4, 1.22), (9, 1.64), (16, 2.45), (36, 5.0), (64, 8.6)), relative=True)


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


def test_a_request_that_shares_a_step_with_others_gets_fewer_rows() -> None:
    alone, shared = (drafts_of(relative_costs(0.2), (0.6,), 5, requests, 64) for requests in (1, 8))
    assert alone.speedup > shared.speedup
    assert alone.steps[-1].rows > shared.steps[-1].rows


def test_expensive_rows_alternate_between_drafting_and_verifying() -> None:
    found = drafts_of(LARGE, (0.79,), 5, 1, 256)
    assert found.speedup == pytest.approx(1.659, abs=0.01)
    assert found.steps[0].masks in ((4,), (5,))  # the fifth one is worth almost nothing
    assert len(found.steps[5].masks) - 1 == 5
    assert sum(found.steps[5].masks) < 5


def test_nearly_free_rows_fill_the_step_and_drafts_that_do_not_pay_are_plain_steps() -> None:
    found = drafts_of(relative_costs(0.001), (0.79,), 5, 1, 256)
    assert min(found.steps[5].masks) == 5
    assert found.speedup > 3.3
    found = drafts_of(relative_costs(1.0), (0.3,), 3, 1, 64)
    assert (found.speedup, found.tokens_per_step) == (pytest.approx(1.0), pytest.approx(1.0))
    assert [step.rows for step in found.steps] == [1] * 4
    assert drafts_of(relative_costs(0.1), (0.9, 0.5), 4, 1, 64).acceptance == (0.9, 0.5, 0.5, 0.5)  # the last one


def test_speedup_is_tokens_per_step_divided_by_step_time() -> None:
    """With free rows every step takes the time of a plain one; a prediction counts as at most 97 % certain."""
    found = drafts_of(relative_costs(0.0), (1.0,), 2, 1, 64)
    assert found.tokens_per_step == pytest.approx(found.speedup, abs=0.01)
    assert found.speedup == pytest.approx(1 + 0.97 + 0.97**2, abs=0.01)


def test_heads_leave_all_their_tokens_to_every_step_and_take_no_rows() -> None:
    found = drafts_of_heads(LARGE, (0.9, 0.5, 0.1), 5, 1, 256)
    # 1 token in 1.0, 1.9 in 1.13, 2.35 in 1.175, 2.395 in 1.22, and less for more
    (step,) = found.steps
    assert (step.at_hand, len(step.masks) - 1, step.rows) == (5, 2, 3)
    assert (step.tokens, step.time) == (pytest.approx(2.35), pytest.approx(1.175))
    assert (found.tokens_per_step, found.speedup) == (pytest.approx(2.35), pytest.approx(2.35 / 1.175))
    assert found.acceptance == (0.9, 0.5, 0.1, 0.1, 0.1)
    found = drafts_of_heads(relative_costs(0.5), (0.2,), 3, 1, 64)
    assert (found.steps[0].rows, found.speedup) == (1, 1.0)
