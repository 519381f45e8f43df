"""The page on GPUs: what it asks for in a quarter of an hour on a GPU is rehearsed without one."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.gpu_machine.__main__ import write
from benchmarks.gpu_machine.there import PACKAGES, TRAINING
from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.formats import FORMATS
from spaceport.tools.cli import OK, run
from stand_in_cuda.libraries import SITE
from stand_in_cuda.libraries import environment as stand_in_environment
from support.exported import bundle_of
from support.gguf_files import random_model, write_gguf
from support.paths import DEMO, DOCS, ROOT, package
from support.programs import Missing


def commands(name: str) -> list[str]:
    """The commands of the block that has a command of Spaceport."""
    blocks = re.findall(r"^```console\n(.*?)^```$", (DOCS / "gpus.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if f"$ spaceport {name} " in block)
    return [line.removeprefix("$ ") for line in str(found).splitlines()]


def follow(command: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a command of the page in a folder."""
    command = command.replace("spaceport ", f"{sys.executable} -m spaceport ", 1)
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["onnxruntime", "onnxruntime-cuda"])
def test_a_quarter_of_an_hour_on_a_gpu_is_rehearsed_without_one(backend: str, tmp_path: Path) -> None:
    """With a small model; on CUDA with kernels that do nothing, where no value and no time means anything."""
    environment = {**os.environ, "PYTHONPATH": str(package()), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    if backend == "onnxruntime-cuda":
        try:
            environment = stand_in_environment(tmp_path / "cache")
        except Missing as reason:
            pytest.skip(str(reason))
    (tmp_path / "my.bundle").symlink_to(bundle_of(DEMO, ExportOptions(FORMATS["float16"])))
    (tmp_path / "prompts.jsonl").write_text('{"text": "import os"}\n')
    write, tests, steps, audit = commands("bench random")
    assert tests.split()[-3:-1] == ["-m", "gpu"]
    assert (ROOT / tests.split()[-1]).is_file()
    follow(write.replace("7b", "tiny"), tmp_path, environment)
    follow(steps.replace("7b", "tiny").replace("onnxruntime-cuda", backend), tmp_path, environment)
    measured = json.loads((tmp_path / "steps.json").read_text("utf-8"))
    engines = [one["graphs"] for one in measured["backends"]]
    assert engines == ([True, False] if backend == "onnxruntime-cuda" else [False])
    assert (measured["backends"][0]["share"] is not None) == (backend == "onnxruntime-cuda")
    assert all(one["notes"] == one["left_out"] == [] for one in measured["backends"])
    assert [mode["mode"] for mode in measured["backends"][0]["replay"]] == ["plain", "masks", "fixed 5"]
    assert [*measured["transformers"]] == ["static cache"]
    follow(audit.replace("onnxruntime-cuda", backend), tmp_path, environment)


@pytest.mark.slow
def test_a_training_on_a_gpu_is_rehearsed_with_twenty_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_gguf(tmp_path / "coder.gguf", random_model("qwen2"))
    monkeypatch.chdir(tmp_path)
    split, join, tune = commands("tune")
    (tmp_path / "WORK").mkdir()
    for name in ("train", "sampled"):
        lines = [{"prompt": f"Count to {n}.", "response": " ".join(map(str, range(n)))} for n in range(9, 17)]
        (tmp_path / "WORK" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for command in (split.replace("56M", "100K"), join):
        subprocess.run(command, shell=True, check=True)
    assert len([*tmp_path.glob("coder.gguf.*")]) > 1
    assert filecmp.cmp(base, tmp_path / "whole.gguf", shallow=False)
    small = tune.replace("--cutoff 640", "--cutoff 128").replace("--batch-size 16", "--batch-size 4")
    small = small.removesuffix(" --time-budget 9m")  # a busy CPU would not reach the second measurement
    assert run([*shlex.split(small)[1:], "--max-steps", "20", "--log-every", "10"]) == OK
    measured = [json.loads(line) for line in (tmp_path / "adapter" / "metrics.jsonl").read_text("utf-8").splitlines()]
    first, last = (one["losses"][1] for one in measured)
    assert last < first


@pytest.mark.slow
@pytest.mark.nightly
def test_what_is_packed_for_a_machine_without_a_network_measures_there(tmp_path: Path) -> None:
    """With the kernels of one GPU in the library, which the stand-in does not call."""
    try:
        environment = stand_in_environment(tmp_path / "cache")
    except Missing as reason:
        pytest.skip(str(reason))
    shutil.copytree(SITE / "onnxruntime", tmp_path / "site" / "onnxruntime")
    write(tmp_path / "packed", tmp_path / "site", 90, "tiny", 0)
    packages = tmp_path / "packed" / PACKAGES
    assert packages.stat().st_size < sum(file.stat().st_size for file in SITE.rglob("*")) / 3
    own = {"PYTHONPATH": "", "WORK": str(tmp_path / "work"), "OUT": str(tmp_path / "out")}
    options = "measure --model tiny --only export --only generate --only steps --patience 9 --seconds 3000"
    script = (sys.executable, tmp_path / "packed" / "there.py", *options.split())
    done = subprocess.run(
        [*map(str, script)], cwd=ROOT, env={**environment, **own}, capture_output=True, text=True, check=True
    )
    endings = re.findall(r"^== (\w+): exit code (\d+),", done.stdout, re.MULTILINE)
    assert endings == [("export", "0"), ("generate", "0"), ("steps", "0")], done.stdout
    assert len(json.loads((tmp_path / "out" / "steps.json").read_text("utf-8"))["backends"]) == 2


def test_the_training_there_is_that_of_the_page() -> None:
    (*_, tune) = commands("tune")
    assert TRAINING in tune
