"""Steps: figures of random models that are inflated where they run, within a budget, as decoding runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.runtime.engine import Batch, EngineOptions
from spaceport.tools.bench.random_weights import CONFIG_FILE, inflate
from spaceport.tools.bench.skeleton import write_skeleton
from spaceport.tools.bench.steps import (
    Budget,
    EngineSteps,
    StepCost,
    StepOptions,
    step_costs,
    steps_report,
    weight_bytes,
)
from spaceport.tools.cli import OK, run
from support.cache import EXPORTER, built
from support.hash_engine import HashEngine, Language
from support.stand_in_driver import engine_on_cpu

Capture = pytest.CaptureFixture[str]


class IdleEngine(HashEngine):
    """An engine that computes nothing."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.calls += 1
        return np.zeros((1, 1, 1), np.float32)


@pytest.fixture(scope="module")
def skeleton() -> Path:
    def make(target: Path) -> None:
        write_skeleton("tiny", target, "float32", "plain")

    return built("skeleton", ("tiny", "float32"), make, [*EXPORTER, "tools/bench/skeleton.py"])


def test_a_skeleton_has_the_graph_of_the_real_model_without_its_weights(skeleton: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(skeleton / CONFIG_FILE)
    model = AutoModelForCausalLM.from_config(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    manifest = inflate(skeleton, tmp_path / "bundle")
    assert (manifest.parameters, weight_bytes(manifest)) == (matrices, 4 * matrices)
    assert sum(file.stat().st_size for file in skeleton.iterdir()) < 100_000
    assert manifest.graph_bytes < 4 * matrices, "weights of one shape share a part of the file"
    assert read_manifest(tmp_path / "bundle") == manifest


@pytest.mark.slow
def test_steps_of_a_skeleton_its_replay_and_transformers_are_measured_and_saved(
    skeleton: Path, tmp_path: Path, capfd: Capture
) -> None:
    saved, asked = tmp_path / "steps.json", ["bench", "steps", str(skeleton), "--rows", "1,4", "--context", "16"]
    options = ["--rounds", "2", "--replay", "0.79,0.79,0.79", "--transformers", "--save", str(saved), "--json"]
    assert run([*asked, *options]) == OK
    data = json.loads(capfd.readouterr().out)
    assert json.loads(saved.read_text("utf-8")) == data
    (backend,) = data["backends"]
    assert [step["rows"] for step in backend["steps"]] == [1, 4]
    assert backend["share"] is None, "only devices have a bandwidth of their own"
    assert [loop["mask_slots"] for loop in backend["loops"]] == [0, 5]
    steps = {mode["mode"]: mode["tokens_per_step"] for mode in backend["replay"]}
    assert steps["plain"] == 1
    assert steps["fixed 5"] > 1.8, "of three depths that are right four times in five"
    assert [*data["transformers"]] == ["static cache"]


def test_the_budget_ends_rounds_and_leaves_figures_out(skeleton: Path, tmp_path: Path, capfd: Capture) -> None:
    engine, clock = IdleEngine(Language(1), 512, 1), iter(range(1000))
    step_costs(engine, StepOptions(rows=(1, 2), rounds=30), Budget(2.5, lambda: float(next(clock))))
    assert engine.calls == 2 * (3 + 5), "three rounds to warm up, three in any case, and two before the budget ends"
    asked = ["bench", "steps", str(skeleton), "--rows", "1", "--context", "16", "--budget", "1s", "--json"]
    assert run([*asked, "--replay", "0.5", "--rounds", "9"]) == OK
    (backend,) = json.loads(capfd.readouterr().out)["backends"]
    assert "replay" in backend["left_out"]
    assert not backend["replay"]
    with pytest.raises(OptionFault, match="--budget is 0: expected more than 0 seconds"):
        StepOptions(budget=0.0)


def test_steps_select_tokens_on_the_device_as_decoding_does(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on_cpu(open_bundle(tiny_bundle), EngineOptions(512, 1))

    def refuse(batch: Batch) -> None:
        raise AssertionError("all logits are copied")

    monkeypatch.setattr(engine, "run", refuse)
    assert len(step_costs(engine, StepOptions(rows=(1, 9), rounds=1), Budget(60))) == 2
    found = EngineSteps("onnxruntime-cuda", True, "cuda:0", (), 13_000_000_000, bandwidth=3.25e12)
    assert found.share is None
    found.steps.append(StepCost(1, 5.0, 1.0))
    assert found.share == pytest.approx(0.8)
    (line,) = steps_report([found], StepOptions(rows=(1,))).conclusions
    assert line.endswith("a step of 1 rows reads the weights with 0.80 of the device's bandwidth")


@pytest.mark.slow
def test_steps_are_timed_on_each_backend_and_while_decoding(tiny_bundle: Path, capfd: Capture) -> None:
    asked = ["bench", "steps", str(tiny_bundle)]
    options = "--rows 1,4 --rounds 2 --context 20 --threads 1 --backend auto --backend onnxruntime --without-graphs"
    assert run([*asked, *options.split(), "--json"]) == OK
    found = json.loads(capfd.readouterr().out)["backends"]
    assert [(one["backend"], one["graphs"], one["device"]) for one in found] == [("onnxruntime", False, "cpu")] * 2
    for one in found:
        first, second = one["steps"]
        assert (first["rows"], first["ratio"], second["rows"]) == (1, 1.0, 4)
        assert [loop["mask_slots"] for loop in one["loops"]] == [0, 5]
        assert all(loop["engine_milliseconds"] > 0 < loop["outside_milliseconds"] for loop in one["loops"])
    assert run([*asked, *options.split()[:8]]) == OK
    out = capfd.readouterr().out
    assert "### Milliseconds of a step after 20 tokens, by number of rows (ratio to the first)" in out
    assert re.search(r"^\| onnxruntime \| [\d.]+ \(1\.00\) \| [\d.]+ \([\d.]+\) \| cpu \|$", out, re.MULTILINE)
