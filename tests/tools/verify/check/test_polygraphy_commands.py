"""Polygraphy commands: they run as printed, pass on a correct bundle and fail on an injected fault."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import run
from spaceport.tools.verify.check.polygraphy_commands import LOADER, commands_for
from spaceport.tools.verify.check.polygraphy_loader import calls
from support.paths import TINY
from support.small_bundle import RECORD


def paste(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line in a shell that finds the programs of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def printed(bundle: Path, capsys: pytest.CaptureFixture[str], *checkpoint: str) -> dict[str, str]:
    """The command lines that a check prints, by description."""
    assert run(["check", str(bundle), *checkpoint, "--print-polygraphy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {
        one.removeprefix("# "): two for one, two in pairwise(lines) if one.startswith("# ") and not two.startswith("#")
    }


def test_stock_polygraphy_runs_the_graph_on_the_shipped_loader(tiny_bundle: Path, tmp_path: Path) -> None:
    command = f"polygraphy run {tiny_bundle / 'model.onnx'} --onnxrt --data-loader-script {LOADER} --validate"
    done = paste(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert done.stdout.count("Output: logits is valid") == 4


def test_the_commands_for_tensorrt_parse_and_have_the_sizes_of_the_engine(
    tiny_append_bundle: Path, tmp_path: Path
) -> None:
    """For a half-precision bundle with an engine; its graph is the float32 one, with the same inputs."""
    opened = open_bundle(tiny_append_bundle)
    signature, record = (
        replace(opened.manifest.signature, dtype="float16"),
        replace(RECORD, graph=opened.manifest.graph),
    )
    manifest = replace(opened.manifest, signature=signature, engines={"sm89-0.engine": record})
    lines = {line.description: line.command for line in commands_for(replace(opened, manifest=manifest), TINY, 20.0)}
    built = lines["compare tensorrt-rtx (sm89) with PyTorch"]
    assert built.startswith("POLYGRAPHY_USE_TENSORRT_RTX=1 SPACEPORT_SLOTS=1024 SPACEPORT_REQUESTS=4 SPACEPORT_BUNDLE=")
    assert f"{tiny_append_bundle}/engines/sm89-0.engine" in built
    assert paste(f"{built} --gen-script run.py", tmp_path).returncode == 0
    script = (tmp_path / "run.py").read_text("utf-8")
    assert "TrtRunner(" in script
    assert "atol={'': 0.03, 'logits': 0.6}, check_error_stat={'': 'mean', 'logits': 'max'}" in script
    assert "give the graph KV buffers of 1024 slots" in lines
    convert = lines["build an engine with a profile for decode steps and one for prefill"]
    flags = convert[convert.index("--trt-min-shapes") :]
    assert paste(f"polygraphy run fixed-1024.onnx --trt {flags} --gen-script build.py", tmp_path).returncode == 0
    profiles = (tmp_path / "build.py").read_text("utf-8")
    assert profiles.count("Profile()") == 2
    for rows in (64, 512):
        assert f".add('input_ids', min=[1, 1], opt=[1, {rows}], max=[4, {rows}])" in profiles
    sizes = "min=[1, 2, 1024, 16], opt=[1, 2, 1024, 16], max=[4, 2, 1024, 16]"
    assert f".add('past_key_values.2.value', {sizes})" in profiles


def test_the_loader_respects_the_sizes_of_the_environment_variables(
    tiny_append_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = open_bundle(tiny_append_bundle).manifest
    past = manifest.signature.past[0].name
    assert [call[past].shape[0] for call in calls(manifest)] == [1, 1, 1, 2]
    monkeypatch.setenv("SPACEPORT_SLOTS", "256")
    monkeypatch.setenv("SPACEPORT_REQUESTS", "1")
    assert [call[past].shape for call in calls(manifest)] == [(1, 2, 256, 16)] * 3
    halves = replace(manifest, signature=replace(manifest.signature, dtype="bfloat16"))
    assert {call[past].dtype for call in calls(halves)} == {torch.bfloat16}
    monkeypatch.setenv("SPACEPORT_SLOTS", "64")
    with pytest.raises(SystemExit, match="SPACEPORT_SLOTS is 64: expected at least 128"):
        list(calls(manifest))
    monkeypatch.setenv("SPACEPORT_SLOTS", "many")
    with pytest.raises(SystemExit, match="SPACEPORT_SLOTS is 'many': expected a whole number"):
        list(calls(manifest))


def test_the_tolerance_follows_the_report_of_the_last_check(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle", ignore=shutil.ignore_patterns("accuracy.json"))
    assert "--atol 0.0001 logits:0.0001" in printed(bundle, capsys)["compare ONNX Runtime on a GPU with them"]
    graph = list(open_bundle(bundle).manifest.graph)
    report = {"passed": True, "graph": graph, "cases": [{"largest_logit": 2.0}, {"largest_logit": 21.5}]}
    (bundle / "accuracy.json").write_text(json.dumps(report), "utf-8")
    assert "--atol 0.0001 logits:0.00215 --rtol 0" in printed(bundle, capsys)["compare ONNX Runtime on a GPU with them"]
    for damaged in ([{"largest_logit": "2"}, 5, {}], {"largest_logit": 2.0}, None):
        (bundle / "accuracy.json").write_text(json.dumps({**report, "cases": damaged}), "utf-8")
        assert "--atol 0.0001 logits:0.0001" in printed(bundle, capsys)["compare ONNX Runtime on a GPU with them"]
