"""Tuning mistakes: errors are one line and early, and no progress is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, INTERRUPTED, OK, USAGE
from spaceport.tools.tune.job import TrainingCallbacks, TuningJob
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.tuning import tune
from support.families import REFUSED, build
from support.paths import TESTS, TINY

pytestmark = pytest.mark.slow

PROGRAM = "from spaceport.tools.cli import main; main()"
# Runs a command; after a number of training steps no file can grow beyond a size. argv: steps, bytes, arguments.
FULL = """
import resource, signal, sys
from spaceport.tools.cli import run
from spaceport.tools.tune.training import Training
steps, size = int(sys.argv[1]), int(sys.argv[2])
run_step = Training.run_step
def limited(self):
    run_step(self)
    if self.step == steps:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
Training.run_step = limited
sys.exit(run(sys.argv[3:]))
"""
QUICK = ["--batch-size", "2", "--max-steps", "4", "--epochs", "9", "--anchors", "2", "--log-every", "1"]

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return written(tmp_path / "data.jsonl", ({"prompt": f"Say {number}.", "response": "Yes."} for number in range(4)))


def written(file: Path, lines: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


def tuned(*arguments: object) -> int:
    return run(["tune", *map(str, arguments)])


def refused_with(capfd: Capture, code: int, message: str, *arguments: object) -> None:
    """Check the exit code and the last line on stderr, and that stdout is empty."""
    assert tuned(*arguments) == code
    output, errors = capfd.readouterr()
    assert output == ""
    assert re.search(message, errors.splitlines()[-1]), errors
    assert "Traceback" not in errors


def kept(target: Path) -> list[str]:
    return sorted(path.name for path in target.with_name(target.name + ".training").glob("step-*"))


def test_invalid_data_is_refused_with_its_line(data: Path, tmp_path: Path, capfd: Capture) -> None:
    target = tmp_path / "tuned"
    empty = written(tmp_path / "empty.jsonl", [])
    refused_with(capfd, INPUT, "empty.jsonl: contains no conversation", TINY, target, empty)
    refused_with(capfd, INPUT, "nowhere.jsonl: no such file", TINY, target, data, tmp_path / "nowhere.jsonl")
    refused_with(
        capfd, INPUT, "nowhere.jsonl: no such file", TINY, target, data, "--validation", tmp_path / "nowhere.jsonl"
    )
    wrong = written(tmp_path / "wrong.jsonl", [{"text": "a"}, {"question": "a"}])
    refused_with(capfd, INPUT, 'wrong.jsonl line 2: holds "question": expected one of', TINY, target, wrong)
    mute = written(tmp_path / "mute.jsonl", [{"messages": [{"role": "user", "content": "Hello"}]}])
    refused_with(capfd, INPUT, "mute.jsonl line 1: no assistant turn in messages", TINY, target, mute)
    long = written(tmp_path / "long.jsonl", [{"prompt": "Say it. " * 30, "response": "Yes."}, {"text": "[M]"}])
    refused_with(capfd, INPUT, "no training samples: every sample was dropped", TINY, target, long, "--cutoff", 20)
    refused_with(
        capfd,
        INPUT,
        "no validation samples: every sample was dropped",
        TINY,
        target,
        data,
        "--validation",
        long,
        "--cutoff",
        20,
    )
    assert not (tmp_path / "tuned").exists()
    assert not (tmp_path / "tuned.training").exists()


def test_messages_need_a_chat_template(tmp_path: Path, capfd: Capture) -> None:
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint")
    (checkpoint / "chat_template.jinja").unlink()
    turns = [{"role": role, "content": "Yes."} for role in ("system", "user", "assistant")]
    chat = written(tmp_path / "chat.jsonl", [{"text": "a"}, {"messages": turns}])
    refused_with(
        capfd,
        INPUT,
        "chat.jsonl line 2: has messages, but the tokenizer has no chat template",
        checkpoint,
        tmp_path / "x",
        chat,
    )


def test_an_unwritable_target_is_refused_before_data_is_read(data: Path, tmp_path: Path, capfd: Capture) -> None:
    nowhere = tmp_path / "nowhere.jsonl"
    mine = shutil.copytree(TINY, tmp_path / "mine")
    refused_with(capfd, INPUT, "mine: a checkpoint exists there: replace it with --overwrite", TINY, mine, nowhere)
    refused_with(capfd, USAGE, "mine: is the checkpoint to tune", mine, mine, nowhere, "--overwrite")
    refused_with(capfd, INPUT, "tests: contains files but no checkpoint", TINY, TESTS, nowhere, "--overwrite")
    refused_with(capfd, INPUT, "no such folder: create it first", TINY, tmp_path / "a" / "b", nowhere)


def test_invalid_options_are_refused(data: Path, tmp_path: Path, capfd: Capture) -> None:
    order = (TINY, tmp_path / "tuned", data)
    refused_with(capfd, USAGE, "--cutoff is 1025: expected 8 to 1024", *order, "--cutoff", 1025)
    refused_with(
        capfd, USAGE, "gated-lora with --objective apar", *order, "--method", "gated-lora", "--objective", "apar"
    )
    refused_with(
        capfd,
        USAGE,
        "--target w1: .*expected one of down_proj, gate_proj",
        *order,
        "--method",
        "lora",
        "--target",
        "w1",
    )
    refused_with(capfd, USAGE, "--target has no effect with --method full", *order, "--target", "w1")
    refused_with(
        capfd, USAGE, "--rank has no effect with --method embeddings", *order, "--method", "embeddings", "--rank", 16
    )
    refused_with(
        capfd, USAGE, "--anchors has no effect with --objective apar", *order, "--objective", "apar", "--anchors", 32
    )
    refused_with(capfd, INPUT, "adapters on w1: expected", *order, "--method", "gated-lora", "--target", "w1")
    refused_with(capfd, USAGE, "special tokens '', .*: expected non-empty names", *order, "--mask-token", "")
    refused_with(capfd, USAGE, "--fork-token has no effect with --objective sar", *order, "--fork-token", "<f>")
    refused_with(
        capfd, USAGE, "special token <m> would not be used", *order, "--mask-token", "<m>"
    )  # the checkpoint has one
    refused_with(capfd, INPUT, "'json' is an ordinary token", *order, "--objective", "apar", "--fork-token", "json")
    refused_with(capfd, USAGE, "--save-every is 0: expected at least 1", *order, "--save-every", 0)
    refused_with(capfd, USAGE, "--alpha is 0.0: expected more than 0", *order, "--method", "lora", "--alpha", 0)
    assert not (tmp_path / "tuned.training").exists()


@pytest.mark.parametrize("refused", [case for case in REFUSED if case.family.name in ("t5", "mamba", "bloom")], ids=str)
def test_unsupported_families_are_refused(refused: Any, data: Path, tmp_path: Path, capfd: Capture) -> None:
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("model*", "*config.json"))
    build(refused.family).save_pretrained(checkpoint)
    capfd.readouterr()
    refused_with(capfd, INPUT, refused.reason, checkpoint, tmp_path / "tuned", data)
    if refused.family.name == "t5":  # its configuration says so: the data are not read
        refused_with(capfd, INPUT, refused.reason, checkpoint, tmp_path / "tuned", tmp_path / "nowhere.jsonl")


def test_a_resume_with_other_inputs_or_settings_is_refused(data: Path, tmp_path: Path, capfd: Capture) -> None:
    order: list[object] = [TINY, tmp_path / "tuned", data, *QUICK]
    refused_with(capfd, INPUT, "tuned.training: no training to resume: start it without --resume", *order, "--resume")
    settings = TrainingSettings(batch_size=2, max_steps=4, epochs=9, anchors=2)  # those of QUICK
    with pytest.raises(KeyboardInterrupt):
        tune(
            TuningJob(TINY, tmp_path / "tuned", (data,), settings, log_every=1),
            TrainingCallbacks(should_stop=lambda: True),
        )
    assert kept(tmp_path / "tuned") == ["step-00000001"]
    capfd.readouterr()
    refused_with(capfd, INPUT, "holds an unfinished training for this target: continue it with --resume", *order)
    refused_with(
        capfd,
        INPUT,
        r"\(batch_size: 2 before, 3 now; learning_rate: 5e-05 before, 0.1 now\)",
        *order,
        "--resume",
        "--batch-size",
        3,
        "--learning-rate",
        0.1,
    )
    refused_with(capfd, INPUT, r"\(bf16: False before, True now\)", *order, "--resume", "--bf16")
    refused_with(capfd, INPUT, r"\(self-distill: False before, True now\)", *order, "--resume", "--self-distill")
    data.write_text(data.read_text() + '{"text": "More."}\n')
    refused_with(capfd, INPUT, r"\(data: data.jsonl \w+ before, data.jsonl \w+ now\)", *order, "--resume")
    assert kept(tmp_path / "tuned") == ["step-00000001"]


def test_a_diverged_training_keeps_its_last_state_and_can_be_restarted(
    data: Path, tmp_path: Path, capfd: Capture
) -> None:
    order: list[object] = [TINY, tmp_path / "tuned", data, *QUICK, "--max-steps", 40]
    message = r"is (nan|inf) after \d+ steps: expected a finite number; lower --learning-rate \(now 1e\+30\)$"
    refused_with(capfd, INPUT, message, *order, "--learning-rate", 1e30)
    assert kept(tmp_path / "tuned") == []
    refused_with(capfd, INPUT, message, *order, "--learning-rate", 1e30, "--save-every", 1, "--log-every", 40)
    assert len(kept(tmp_path / "tuned")) == 1
    assert kept(tmp_path / "tuned") < ["step-00000010"]
    assert not (tmp_path / "tuned").exists()


@pytest.mark.nightly
def test_a_full_disk_leaves_the_last_state_for_a_resume(data: Path, tmp_path: Path) -> None:
    order = ["tune", str(TINY), str(tmp_path / "tuned"), str(data), *QUICK, "--save-every", "1"]
    for steps, extra in (("2", []), ("1", ["--resume"])):  # a state of the second step; then none that is finished
        done = subprocess.run(
            [sys.executable, "-c", FULL, steps, "500000", *order, *extra], capture_output=True, text=True, check=False
        )
        if extra:
            break
        assert done.returncode == INPUT, done.stderr
        message = r"cannot write the state after step 2 \(.+\): the state after step 1 is available; free disk"
        assert re.search(message, done.stderr.splitlines()[-1]), done.stderr
        assert kept(tmp_path / "tuned") == ["step-00000001"]
    assert done.returncode == OK, done.stderr
    assert not (tmp_path / "tuned.training").exists()
    assert (tmp_path / "tuned" / "model.safetensors").exists()


def test_a_full_disk_at_the_final_write_loses_nothing(data: Path, tmp_path: Path) -> None:
    order = ["tune", str(TINY), str(tmp_path / "tuned"), str(data), *QUICK]
    program = FULL.replace("Training.run_step = limited", "").replace(
        "sys.exit",
        """
import spaceport.tools.tune.tuning as tuning
write = tuning.write_checkpoint
def limit(*arguments):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    write(*arguments)
tuning.write_checkpoint = limit
sys.exit""",
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "0", "300000", *order], capture_output=True, text=True, check=False
    )
    assert done.returncode == INPUT, done.stderr
    assert re.search(
        "tuned: cannot be written .*: the training state is saved; free disk space .* --resume",
        done.stderr.splitlines()[-1],
    )
    assert not (tmp_path / "tuned").exists()
    assert kept(tmp_path / "tuned") == ["step-00000004"]
    assert run([*order, "--resume"]) == OK
    assert (tmp_path / "tuned" / "config.json").exists()


def started(order: list[str], until: Path) -> subprocess.Popen[str]:
    """A tuning in a separate process that has saved a state."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *order], stderr=subprocess.PIPE, text=True, env=environment
    )
    while process.poll() is None and not list(until.glob("step-*[0-9]")):
        time.sleep(0.02)
    return process


def test_a_killed_and_interrupted_training_equals_an_uninterrupted_one(data: Path, tmp_path: Path) -> None:
    steps = ["--max-steps", "60", "--epochs", "99", "--save-every", "2"]
    folder = tmp_path / "tuned.training"
    order = ["tune", str(TINY), str(tmp_path / "tuned"), str(data), *QUICK, *steps]
    process = started(order, folder)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    process = started([*order, "--resume"], folder)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    if process.returncode != OK:  # it may have been at its end
        assert process.returncode == INTERRUPTED, errors
        assert not (tmp_path / "tuned").exists()
        assert run([*order, "--resume"]) == OK
    assert tuned(TINY, tmp_path / "whole", data, *QUICK, *steps) == OK
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("tuned", "whole"))
    assert all((one[name] == two[name]).all() for name in one)
    lines = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("tuned", "whole")
    ]
    assert [line["losses"] for line in lines[0]] == [line["losses"] for line in lines[1]]
    assert {path.name for path in tmp_path.iterdir()} == {"data.jsonl", "tuned", "whole"}


def test_results_are_available_as_json_and_for_tensorboard(data: Path, tmp_path: Path, capfd: Capture) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    extra = ["--json", "--tensorboard", tmp_path / "events", "--validation", data, "--mask-slots", 2]
    assert tuned(TINY, tmp_path / "tuned", data, *QUICK, *extra) == OK
    output, errors = capfd.readouterr()
    found = json.loads(output)
    assert found["samples"] == {"unforked": 4}
    assert found["settings"]["mask_slots"] == 2
    assert found["settings"]["cutoff"] == 1024
    assert len(found["training"]["losses"]) == len(found["validation"]["losses"]) == 3
    assert "[RANK 0]" not in errors
    assert "Warning" not in errors
    assert re.search(
        r"step 4/4  loss \d+\.\d+  accuracy \d+%  mask slots \d+% \d+%  [\d,]+ rows/s  0:00:00 left, ends \d\d:\d\d",
        errors,
    )
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    names = {
        f"{kind}/{what}/{target}"
        for kind in ("training", "validation")
        for what in ("loss", "accuracy")
        for target in ("next_token", "mask_slot_1", "mask_slot_2")
    }
    assert set(events.Tags()["scalars"]) == {*names, "training/learning_rate", "training/tokens_per_second"}
    values = [(event.step, event.value) for event in events.Scalars("training/loss/next_token")]
    assert [step for step, _ in values] == [1, 2, 3, 4]
    assert values[-1][1] == pytest.approx(found["training"]["losses"][0])
