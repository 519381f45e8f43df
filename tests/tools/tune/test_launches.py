"""Launches: trainings that torchrun and accelerate start, with processes that are killed, hang, or see other files."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import FAULT, INPUT, OK
from support.killed import kill
from support.launched import float32_tiny, free_port, launched, machines

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

# Two samples for one process and three for the other; gradients accumulate; the last batch of an epoch has four samples
OPTIONS = "--objective both --batch-size 5 --micro-batch-size 2 --anchors 3 --log-every 1 --save-every 4 --epochs 99"
STEPS = 32
LAUNCHERS = {
    "torchrun": "torchrun --standalone --nproc-per-node 2 --no-python spaceport",
    "accelerate": "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 --no_python spaceport",
    "restarts": "torchrun --standalone --nproc-per-node 2 --max-restarts 3 --no-python spaceport",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and nine lists and texts of different sizes."""
    found = tmp_path_factory.mktemp("launches")
    float32_tiny(found / "checkpoint")
    items = [("Red", "fire"), ("Green", "grass"), ("Blue", "the sea")]
    answer = "Three:\n\n" + "\n".join(f"{n}. {name}: the colour of {of}" for n, (name, of) in enumerate(items, 1))
    lines = [{"prompt": f"Which {number}?", "response": answer} for number in range(4)]
    texts = [{"text": f"import json\n\nanswer = {number}\n" * (1 + number)} for number in range(5)]
    (found / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *texts]))
    return found


def arguments(folder: Path, target: str, *more: str, steps: int = STEPS) -> list[str]:
    """Arguments of `spaceport`; the target is relative to the working folder of each process."""
    data = str(folder / "data.jsonl")
    options = [*OPTIONS.split(), "--max-steps", str(steps), "--learning-rate", "1e-3", *more]
    return ["tune", str(folder / "checkpoint"), target, data, "--validation", data, *options]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The result of two processes that nothing happens to."""
    with launched([*LAUNCHERS["torchrun"].split(), *arguments(folder, "whole")], folder / "whole.log") as launch:
        assert launch.code() == OK, launch.text
    return folder / "whole"


def losses(target: Path) -> list[list[float]]:
    return [json.loads(line)["losses"] for line in (target / "metrics.jsonl").read_text().splitlines()]


def same_training(one: Path, two: Path) -> bool:
    """Whether two trainings measured the same losses and have the same weights, bit by bit."""
    first, second = (load_file(each / "model.safetensors") for each in (one, two))
    equal = all(torch.equal(first[name], second[name]) for name in first)
    return equal and losses(one) == losses(two)


def last_state(target: Path) -> int:
    """The step of the last saved state; 0 without one."""
    states = target.with_name(f"{target.name}.training").glob("step-*[0-9]")
    return max((int(state.name[5:]) for state in states), default=0)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launched_processes_have_the_losses_of_one(launcher: str, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "two"
    assert run(arguments(folder, str(tmp_path / "one"), steps=15)) == OK
    command = [*LAUNCHERS[launcher].split(), *arguments(folder, str(target), steps=15)]
    with launched(command, tmp_path / "log") as launch:
        assert launch.code() == OK, launch.text
    assert "15 steps, 7.50 epochs, 2 processes" in launch.text
    one, two = losses(tmp_path / "one"), losses(target)
    assert len(one) == len(two) == 15 + 4
    for expected, found in zip(one, two, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_process_that_hangs_is_lost_after_the_timeout(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "tuned"
    command = ["spaceport", *arguments(folder, str(target), "--process-timeout", "4s")]
    with machines([command] * 2, tmp_path / "log", [tmp_path] * 2) as launches:
        launches[0].wait_for(lambda: last_state(target) >= 4)
        launches[1].send(signal.SIGSTOP)
        assert launches[0].code() == FAULT
    assert "another process has not answered for 4 s (--process-timeout): it hangs, or its" in launches[0].text
    assert "Traceback" not in launches[0].text


def test_a_process_that_never_starts_is_missed_after_the_timeout(folder: Path, tmp_path: Path) -> None:
    command = ["spaceport", *arguments(folder, str(tmp_path / "tuned"), "--process-timeout", "2s")]
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(free_port())
    with launched(command, tmp_path / "log", environment=environment) as launch:
        assert launch.code() == FAULT
    assert "2 processes expected, and not all have connected to 127.0.0.1:" in launch.text
    assert "Traceback" not in launch.text


def test_torchrun_restarts_killed_processes_and_the_weights_stay_the_same(
    folder: Path, whole: Path, tmp_path: Path
) -> None:
    target = tmp_path / "tuned"
    command = [*LAUNCHERS["restarts"].split(), *arguments(folder, str(target), "--auto-resume")]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with launched(command, tmp_path / "log", environment=environment) as launch:
        for victim, step in ((1, 8), (0, 20)):
            launch.wait_for(lambda step=step: last_state(target) >= step)
            launch.wait_for(lambda: len(launch.ranks()) == 2)
            process = launch.ranks()[victim]
            kill(process)
            launch.wait_for(lambda victim=victim, gone=process: launch.ranks().get(victim, gone) != gone)
        assert launch.code() == OK, launch.text
    assert same_training(target, whole)
    assert len(re.findall(r", (\d+) done, 2 processes", launch.text)) == 2


def test_an_interrupt_of_torchrun_saves_the_state(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "tuned"
    options = ["--max-steps", "2000", "--epochs", "9999", "--save-every", "1000"]
    with launched(
        [*LAUNCHERS["torchrun"].split(), *arguments(folder, str(target), *options)], tmp_path / "log"
    ) as launch:
        launch.wait_for(lambda: "step 1/2000" in launch.text)
        launch.send(signal.SIGINT)
        assert launch.code() != OK
    assert "interrupted: finishing this step and saving the state for --resume" in launch.text
    assert 0 < last_state(target) < 1000


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_and_machines_without_a_common_file_system_resume_from_copies(
    victim: int, folder: Path, whole: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for each in folders:
        each.mkdir()
    command = ["spaceport", *arguments(folder, "tuned")]
    with machines([command] * 2, tmp_path / "first", folders) as launches:
        launches[0].wait_for(lambda: last_state(folders[0] / "tuned") >= 8)
        launches[victim].send(signal.SIGKILL)
        codes = [launch.code() for launch in launches]
    assert (codes[victim], codes[1 - victim]) == (-signal.SIGKILL, FAULT)
    saved = last_state(folders[0] / "tuned")
    message = rf"spaceport: rank {1 - victim}: lost another process, whose messages say why; "
    message += rf"the state after step {saved} is saved: .* --resume" if victim else "no state is saved yet"
    assert re.match(message, launches[1 - victim].text.splitlines()[-1])
    assert "Traceback" not in launches[1 - victim].text
    with machines([[*command, "--resume"]] * 2, tmp_path / "second", folders) as launches:
        assert [launch.code() for launch in launches] == [INPUT, INPUT]
    expected = rf"saved state: step {saved} \(\w+\) on rank 0, none on rank 1\): TUNED.training must"
    assert re.search(expected, launches[0].text)
    shutil.rmtree(folders[1] / "tuned.training", ignore_errors=True)
    shutil.copytree(folders[0] / "tuned.training", folders[1] / "tuned.training")
    with machines([[*command, "--resume"]] * 2, tmp_path / "third", folders) as launches:
        assert [launch.code() for launch in launches] == [OK, OK]
    assert same_training(folders[0] / "tuned", whole)
    assert [path.name for path in folders[0].iterdir()] == ["tuned"]
    assert list(folders[1].iterdir()) == []
