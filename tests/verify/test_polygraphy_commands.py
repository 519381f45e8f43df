"""Polygraphy commands: they run as printed, pass on a correct bundle and fail on an injected fault."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import run
from spaceport.verify.polygraphy_commands import calls, commands_for
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
    assert "input_ids:[1,512]" in convert


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
