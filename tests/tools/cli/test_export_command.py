"""`spaceport export`: published weights are adopted on the way, and --dry-run reports sizes without writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.checkpoint_source import quiet_libraries
from spaceport.runtime.engine import capacity_for
from spaceport.runtime.session import Runtime
from spaceport.tools.adopt.adopt import adopted_for_export
from spaceport.tools.adopt.given import AdoptionRequest, read_given
from spaceport.tools.cli import INPUT, OK, USAGE, run
from support.paths import TINY
from support.published import exact_model, write_checkpoint
from support.published_methods import METHODS, SLOTS, PublishedModel

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    quiet_libraries()


def published(name: str, folder: Path) -> PublishedModel:
    folder.mkdir()
    return METHODS[name](folder)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("name", ["uno", "medusa"])
def test_an_export_adopts_published_weights_as_adopt_does(name: str, tmp_path: Path) -> None:
    model = published(name, tmp_path / "models")
    work = tmp_path / "work"
    work.mkdir()
    assert run(["adopt", str(model.base), str(model.weights), str(tmp_path / "adapter"), *model.options]) == OK
    given = read_given(model.base, model.weights, AdoptionRequest(max_mask_slots=SLOTS))
    with adopted_for_export(given, work / "bundle", False, lambda name: None) as folder:
        assert folder is not None
        assert contents(folder) == contents(tmp_path / "adapter")
    assert names(work) == set()


def test_a_dry_run_counts_the_weights_that_drafts_add(tmp_path: Path, capsys: Capture) -> None:
    def sizes(model: PublishedModel, *options: object) -> dict[str, Any]:
        export = ["export", str(model.base), str(tmp_path / "bundle"), "--dry-run", "--json", *map(str, options)]
        assert run(export) == OK
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found | {"machine": 0}

    model, own = published("medusa", tmp_path / "models"), tmp_path / "models" / "own"
    assert model.weights is not None
    assert run(["adopt", str(model.base), str(model.weights), str(own)]) == OK
    capsys.readouterr()
    plain, drafting = sizes(model), sizes(model, "--adapter", model.weights)
    assert drafting == sizes(model, "--adapter", model.weights / "medusa_lm_head.pt")
    assert drafting | {"published": None} == sizes(model, "--adapter", own)
    hidden, vocab = 32, 640
    assert drafting["parameters"] - plain["parameters"] == SLOTS * (hidden * hidden + hidden + hidden * vocab)
    assert (drafting["signature"]["lines"] - 1, plain["published"]) == (SLOTS, None)
    assert names(tmp_path) == {"models"}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--adapter uno --opset 7", USAGE, "opset"),  # an error after the adoption
        ("--adapter uno --fork-token 5", USAGE, "--fork-token has no effect with published weights: name both tokens"),
        ("--adapter uno --mask-token 638", USAGE, "--mask-token has no effect: UNO has random tokens instead"),
        ("--adapter own --method uno", USAGE, "--method has no effect with an adapter folder: the folder says how it"),
        ("--method uno", INPUT, "config.json names no mask token"),
        ("--method medusa", INPUT, "has nothing of --method medusa: expected medusa_lm_head.safetensors or"),
        ("--gpu-memory 24GB", USAGE, "--gpu-memory has no effect without --dry-run: add --dry-run"),
        ("--dry-run --gpu-memory 24XB", USAGE, "expected a size above 0 such as 24GB"),
    ],
)
def test_options_that_do_not_fit_are_refused_and_leave_nothing(
    options: str, code: int, message: str, tmp_path: Path, capsys: Capture
) -> None:
    model = published("uno", tmp_path / "models")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "base.json").write_text("{}")
    paths = {name: str(tmp_path / name) for name in ("own", "models", "nowhere")} | {"uno": str(model.weights)}
    words = options.split()
    if "--adapter" in words:
        words[1] = paths[words[1]]
    assert run(["export", str(model.base), str(tmp_path / "bundle"), *words]) == code
    assert message in capsys.readouterr().err
    assert names(tmp_path) == {"models", "own"}


def test_heads_and_adapters_inside_the_checkpoint_are_used_if_named_and_not_left_out_in_silence(
    tmp_path: Path, capsys: Capture
) -> None:
    whole = write_checkpoint(tmp_path / "whole", exact_model(), medusa_num_heads=SLOTS)
    assert run(["export", str(whole), str(tmp_path / "bundle"), "--opset", "7"]) == USAGE
    assert "the checkpoint's heads are not used: add --method medusa" in capsys.readouterr().err
    model = published("nemotron", tmp_path / "models")
    export = ["export", str(model.base), str(tmp_path / "bundle"), "--opset", "7"]
    assert run([*export, "--method", "nemotron"]) == USAGE
    assert "adopting Nemotron-Labs-Diffusion" in capsys.readouterr().err
    assert run(export) == USAGE
    assert f"{model.weights} is not used: add --adapter {model.weights} to draft with it" in capsys.readouterr().err
    assert names(tmp_path) == {"models", "whole"}


def dry_run(capsys: Capture, *options: object) -> str:
    assert run(["export", str(TINY), "nowhere", "--dry-run", *map(str, options)]) == OK
    assert not Path("nowhere").exists()
    return capsys.readouterr().out


def test_a_dry_run_predicts_the_cache_that_the_runtime_allocates(tiny_bundle: Path, capsys: Capture) -> None:
    limits = ("--max-seq-len", 100, "--max-requests", 3)
    found = json.loads(dry_run(capsys, "--json", *limits))
    with Runtime.open(tiny_bundle, backend="onnxruntime", max_seq_len=100, max_requests=3) as runtime:
        manifest = runtime.bundle.manifest
        slots = capacity_for(manifest, 100)
        assert found["run"]["kv"] == manifest.signature.kv_bytes(3, slots) == slots * 3 * found["run"]["kv_slot"]
        assert found["run"]["kv"] == runtime.engine._kv.nbytes  # type: ignore[attr-defined]
        assert found["parameters"] == manifest.parameters


def test_a_gpu_fits_exactly_what_the_runtime_needs(capsys: Capture) -> None:
    need = json.loads(dry_run(capsys, "--json"))["run"]["total"]
    for memory, fits in ((need / 1e6, True), ((need - 1) / 1e6, False)):
        found = dry_run(capsys, "--json", "--gpu-memory", f"{memory:.6f}MB")
        assert json.loads(found)["fits"]["gpu"] is fits
    assert "runtime on the GPU" in dry_run(capsys, "--gpu-memory", "24GB")


def test_weights_that_a_cpu_dequantizes_are_counted_as_float32(capsys: Capture) -> None:
    for activations, dequantized in (("float", True), ("int8x2", False)):
        options = ("--weights", "int8", "--activations", activations)
        found = json.loads(dry_run(capsys, *options, "--json"))
        weights = found["run"]["weights"]
        assert found["run"]["cpu_weights"] == (4 * found["parameters"] if dequantized else weights)
        assert found["run"]["cpu_total"] - found["run"]["total"] == found["run"]["cpu_weights"] - weights
        shown = dry_run(capsys, *options)
        assert ("in all on a CPU: weights as float32" in shown) == dequantized
