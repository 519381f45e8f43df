"""Measures on the machine with the GPU, in the root of the checkout: `python3 FOLDER/there.py measure|train [--seconds N]`.

It needs the standard library only. The packages of FOLDER are unpacked first, where they hide those of the machine. Each
command has a process, a limit and a file of output of its own in $OUT, so that one that hangs or crashes ends alone."""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

PACKED = Path(__file__).resolve().parent
WORK = Path(os.environ.get("WORK", "/tmp/spaceport"))
OUT = Path(os.environ.get("OUT", WORK / "out"))
PACKAGES = "packages.tar.xz"
TRAINING = (
    "--method gated-lora --adapter-only --bf16 --mask-slots 4 --correction-rank 64 --drop-rate 0.3 --anchors 128 --rank 32 "
    "--alpha 64 --target o_proj --target down_proj --cutoff 640 --epochs 12 --batch-size 16 --micro-batch-size 8 "
    "--learning-rate 1e-3"
)


def commands(stage: str, model: str, backend: str) -> dict[str, tuple[int, str]]:
    """The commands of a stage by name, each with the most seconds that it takes."""
    random, demo, prompts = PACKED / f"{model}.random", WORK / "demo.bundle", PACKED / "prompts.jsonl"
    if stage == "train":
        base = PACKED / "model.gguf"
        data = " ".join(str(file) for file in sorted(PACKED.glob("answers*.jsonl")))
        return {"tune": (600, f"spaceport tune {base} {OUT / 'adapter'} {data} {TRAINING} --time-budget 9m")}
    cuda = f"--backend {backend}"
    replay = "--without-graphs --replay 0.79,0.79,0.79,0.79,0.79 --transformers"
    return {
        "doctor": (40, "spaceport doctor"),
        "export": (60, f"spaceport export tools/demo/model {demo} --format float16"),
        "generate": (40, f"spaceport generate {demo} 'import os' {cuda} --max-tokens 64"),
        "steps": (250, f"spaceport bench steps {random} {cuda} {replay} --budget 4m --save {OUT / 'steps.json'}"),
        "audit": (90, f"spaceport audit {demo} {prompts} {cuda} --max-tokens 64"),
        "tests": (150, "pytest -q -W default -p no:cacheprovider -m gpu tests/runtime/backends/test_gpu.py"),
    }


def install() -> dict[str, str]:
    """Unpack the packages and lay out the checkout's own; returns the environment of the commands."""
    site, package = WORK / "site", WORK / "package" / "spaceport"
    if not site.exists():
        with tarfile.open(PACKED / PACKAGES) as packages:
            packages.extractall(site)
    package.mkdir(parents=True, exist_ok=True)
    root = Path.cwd()
    (names,) = re.findall(r"^PARTS = (\(.*\))$", (root / "setup.py").read_text("utf-8"), re.MULTILINE)
    for folder in (*(root / name for name in ast.literal_eval(names)), *(root / "src" / "spaceport").iterdir()):
        if not (package / folder.name).exists():
            (package / folder.name).symlink_to(folder)
    path = ":".join(map(str, (site, package.parent, root / "tests", root)))
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, "XDG_CACHE_HOME": str(WORK / "cache")}


def run(name: str, command: str, seconds: float, environment: dict[str, str]) -> str:
    """Run a command for at most as long; its output goes to a file. Returns how it ended."""
    started = time.monotonic()
    words = [sys.executable, "-m", *shlex.split(command)]
    with (OUT / f"{name}.txt").open("w") as output:
        child = subprocess.Popen(words, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            ending = f"exit code {child.wait(seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            ending = "ended at its limit"
    return f"{ending}, {time.monotonic() - started:.0f} s"


def main() -> None:
    """Run the commands of a stage as far as the time allows, and print the end of what each prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("measure", "train"))
    parser.add_argument("--seconds", type=float, default=540, help="time for all commands")
    parser.add_argument("--patience", type=float, default=1, help="factor of each command's limit, on a slower machine")
    parser.add_argument("--model", default="7b", help="random model that is timed")
    parser.add_argument("--backend", default="onnxruntime-cuda")
    parser.add_argument("--only", action="append", help="run this command only; repeatable")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    OUT.mkdir(parents=True, exist_ok=True)
    environment = install()
    for name, (most, command) in commands(given.stage, given.model, given.backend).items():
        left = end - time.monotonic()
        if given.only and name not in given.only:
            continue
        ending = run(name, command, min(given.patience * most, left), environment) if left > 0 else "no time left"
        print(f"== {name}: {ending}", flush=True)
        if (OUT / f"{name}.txt").exists():
            print((OUT / f"{name}.txt").read_text("utf-8", "replace")[-1500:], flush=True)


if __name__ == "__main__":
    main()
