"""Tuning mistakes: errors are one line and early, and no progress is lost."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file

from spaceport.tools.cli import INPUT, INTERRUPTED, OK, USAGE, run
from spaceport.tools.tune import tuning
from spaceport.tools.tune.job import TrainingCallbacks, TuningJob, identity_of
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.state_folder import signed
from spaceport.tools.tune.training import Training
from support.paths import TESTS, TINY

pytestmark = pytest.mark.slow

QUICK = ["--batch-size", "2", "--max-steps", "4", "--epochs", "9", "--anchors", "2", "--log-every", "1"]
SETTINGS = TrainingSettings(batch_size=2, max_steps=4, epochs=9, anchors=2)  # those of QUICK

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


def states(target: Path) -> list[str]:
    return sorted(path.name for path in target.with_name(target.name + ".training").glob("step-*"))


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return all((first[name] == second[name]).all() for name in first)


# Refused before the first step


def test_invalid_data_is_refused_with_its_line(data: Path, tmp_path: Path, capfd: Capture) -> None:
    target, nowhere = tmp_path / "tuned", tmp_path / "nowhere.jsonl"
    wrong = written(tmp_path / "wrong.jsonl", [{"text": "a"}, {"question": "a"}])
    long = written(tmp_path / "long.jsonl", [{"prompt": "Say it. " * 30, "response": "Yes."}, {"text": "[M]"}])
    validation = [data, "--validation"]
    mistakes: list[tuple[str, list[object]]] = [
        ("nowhere.jsonl: no such file", [data, nowhere]),
        ("nowhere.jsonl: no such file", [*validation, nowhere]),
        ('wrong.jsonl line 2: holds "question": expected one of', [wrong]),
        ("no training samples: every sample was dropped", [long, "--cutoff", 20]),
        ("no validation samples: every sample was dropped", [*validation, long, "--cutoff", 20]),
    ]
    for message, arguments in mistakes:
        refused_with(capfd, INPUT, message, TINY, target, *arguments)
    assert not target.exists()
    assert not (tmp_path / "tuned.training").exists()


def test_an_unwritable_target_is_refused_before_data_is_read(data: Path, tmp_path: Path, capfd: Capture) -> None:
    nowhere = tmp_path / "nowhere.jsonl"
    mine = shutil.copytree(TINY, tmp_path / "mine")
    refused_with(capfd, INPUT, "mine: a checkpoint exists there: replace it with --overwrite", TINY, mine, nowhere)
    refused_with(capfd, USAGE, "mine: is the checkpoint to tune", mine, mine, nowhere, "--overwrite")
    refused_with(capfd, INPUT, "tests: contains files but no checkpoint", TINY, TESTS, nowhere, "--overwrite")
    refused_with(capfd, INPUT, "no such folder: create it first", TINY, tmp_path / "a" / "b", nowhere)
    inside = shutil.copytree(TINY, tmp_path / "run" / "checkpoint-5")
    for file in (TINY / "config.json", data):
        shutil.copy(file, tmp_path / "run")
    message = r"run: contains the input .*checkpoint-5, which would be overwritten: choose another folder"
    refused_with(capfd, USAGE, message, inside, tmp_path / "run", data, "--overwrite")


OPTIONS = [
    (USAGE, "--cutoff is 1025: expected 8 to 1024", "--cutoff 1025"),
    (USAGE, "gated-lora with --objective apar", "--method gated-lora --objective apar"),
    (USAGE, "--target w1: .*expected one of down_proj, gate_proj", "--method lora --target w1"),
    (USAGE, "--anchors has no effect with --objective apar", "--objective apar --anchors 32"),
    (INPUT, "adapters on w1: expected", "--method gated-lora --target w1"),
    (USAGE, "special token <m> would not be used", "--mask-token <m>"),  # the checkpoint has one
    (INPUT, "'json' is an ordinary token", "--objective apar --fork-token json"),
    (USAGE, "--alpha is 0.0: expected more than 0", "--method lora --alpha 0"),
    (USAGE, "'soon': expected hours, minutes and seconds such as 1h30m, 100m or 90s", "--time-budget soon"),
    (USAGE, "special tokens '', .*: expected non-empty names", "--mask-token="),
    (USAGE, "--bundle has no effect without --self-distill", "--bundle nowhere"),
    (USAGE, "--auto-resume", "--auto-resume --resume"),  # which a restart would misread
]


@pytest.mark.parametrize(("code", "message", "options"), OPTIONS)
def test_invalid_options_are_refused(
    code: int, message: str, options: str, data: Path, tmp_path: Path, capfd: Capture
) -> None:
    refused_with(capfd, code, message, TINY, tmp_path / "tuned", data, *options.split())
    assert not (tmp_path / "tuned.training").exists()


def test_a_resume_with_other_inputs_or_settings_is_refused(data: Path, tmp_path: Path, capfd: Capture) -> None:
    order: list[object] = [TINY, tmp_path / "tuned", data, *QUICK]
    refused_with(capfd, INPUT, "tuned.training: no training to resume: start it without --resume", *order, "--resume")
    job = TuningJob(TINY, tmp_path / "tuned", (data,), SETTINGS, log_every=1)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(job, TrainingCallbacks(should_stop=lambda: True))
    capfd.readouterr()
    refused_with(capfd, INPUT, "holds an unfinished training for this target: continue it with --resume", *order)
    changed = r"\(batch_size: 2 before, 3 now; learning_rate: 5e-05 before, 0.1 now\)"
    for message, options in (
        (changed, "--batch-size 3 --learning-rate 0.1"),
        (r"\(bf16: False before, True now\)", "--bf16"),
        (r"\(self-distill: False before, True now\)", "--self-distill"),
    ):
        refused_with(capfd, INPUT, message, *order, "--resume", *options.split())
    data.write_text(data.read_text() + '{"text": "More."}\n')
    refused_with(capfd, INPUT, r"\(data: data.jsonl \w+ before, data.jsonl \w+ now\)", *order, "--resume")
    assert states(tmp_path / "tuned") == ["step-00000001"]


def progress_with(state: Path, **entries: Any) -> None:
    """Change a state's progress, with a right digest."""
    progress = json.loads((state / "progress.json").read_text())
    del progress["sha256"]
    (state / "progress.json").write_text(signed({**progress, **entries}))


def aged(state: Path) -> None:
    """Make a state one of an earlier version, which has no digests."""
    progress = json.loads((state / "progress.json").read_text())
    kept = {name: progress[name] for name in ("step", "tokens", "seconds", "pending_sums")}
    (state / "progress.json").write_text(json.dumps(kept))


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def shortened(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("model.safetensors is not as it was written", lambda state: flipped(state / "model.safetensors")),
    ("optimizer.bin is not as it was written", lambda state: shortened(state / "optimizer.bin")),
    ("random_states_0.pkl is not as it was written", lambda state: (state / "random_states_0.pkl").unlink()),
    ("metrics.jsonl is not as it was written", lambda state: flipped(state.parent / "metrics.jsonl")),
    ("progress.json: not valid JSON", lambda state: (state / "progress.json").unlink()),
    (
        "progress.json has another digest than when it was written",
        lambda state: (state / "progress.json").write_text((state / "progress.json").read_text().replace("1", "2", 1)),
    ),
    ("step in progress.json is 2, which is not possible", lambda state: progress_with(state, step=2)),
    ("tokens in progress.json is 1000", lambda state: progress_with(state, tokens=10**30)),
    ("seconds in progress.json is inf", lambda state: progress_with(state, seconds=float("inf"))),
    ("pending_sums in progress.json is ", lambda state: progress_with(state, pending_sums=[[0.0] * 99])),
    ("metrics in progress.json is 3", lambda state: progress_with(state, metrics=3)),
    ("names '../../data.jsonl', which is outside", lambda state: progress_with(state, files={"../../data.jsonl": ""})),
    ("step in progress.json is 1", lambda state: state.rename(state.with_name("step-99999999"))),
    ("is damaged", lambda state: (aged(state), shortened(state / "optimizer.bin"))),
    ("settings.json has no identity", lambda state: (state.parent / "settings.json").write_text('{"schema": 2}')),
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and the state of a training after one step."""
    folder = tmp_path_factory.mktemp("stopped")
    data = written(folder / "data.jsonl", ({"prompt": f"Say {number}.", "response": "Yes."} for number in range(4)))
    job = TuningJob(TINY, folder / "tuned", (data,), SETTINGS, log_every=1)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(job, TrainingCallbacks(should_stop=lambda: True))
    return folder


@pytest.mark.parametrize(("message", "damage"), DAMAGE, ids=[message for message, _ in DAMAGE])
def test_a_damaged_state_is_refused(
    message: str, damage: Callable[[Path], object], stopped: Path, tmp_path: Path, capfd: Capture
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "copy")
    damage(folder / "tuned.training" / "step-00000001")
    refused_with(capfd, INPUT, re.escape(message), TINY, folder / "tuned", folder / "data.jsonl", *QUICK, "--resume")
    assert not (folder / "tuned").exists()


def test_a_state_of_an_earlier_version_is_continued(stopped: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stopped, tmp_path / "copy")
    aged(folder / "tuned.training" / "step-00000001")
    order = [TINY, folder / "tuned", folder / "data.jsonl", *QUICK]
    assert tuned(*order, "--resume") == tuned(TINY, folder / "whole", *order[2:]) == OK
    assert same_weights(folder / "tuned", folder / "whole")
    assert len((folder / "tuned" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_changed_template_or_end_token_prevents_a_resume(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "base")
    job = TuningJob(tmp_path / "base", tmp_path / "tuned", (), TrainingSettings())
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        before = identity_of(job)
        with (tmp_path / "base" / name).open("a") as file:
            file.write("\n")
        assert identity_of(job) != before


# Ended too early


def test_a_diverged_training_keeps_its_last_state_and_can_be_restarted(
    data: Path, tmp_path: Path, capfd: Capture
) -> None:
    order: list[object] = [TINY, tmp_path / "tuned", data, *QUICK, "--max-steps", 40, "--learning-rate", 1e30]
    message = r"is (nan|inf) after \d+ steps: expected a finite number; lower --learning-rate \(now 1e\+30\)$"
    refused_with(capfd, INPUT, message, *order)
    assert states(tmp_path / "tuned") == []
    refused_with(capfd, INPUT, message, *order, "--save-every", 1, "--log-every", 40)
    assert len(states(tmp_path / "tuned")) == 1
    assert states(tmp_path / "tuned") < ["step-00000010"]
    assert not (tmp_path / "tuned").exists()


def test_a_failed_write_leaves_a_state_from_which_a_resume_gives_the_same_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    order: list[object] = [TINY, tmp_path / "tuned", data, *QUICK, "--save-every", 1]
    save_state = Accelerator.save_state

    def full(accelerator: Accelerator, folder: str) -> str:
        if "step-00000002" in folder:
            Path(folder).mkdir()
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\nframe #0")
        return save_state(accelerator, folder)

    def cut_off(*arguments: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "save_state", full)
        message = r"cannot write the state after step 2 \(.+\): the state after step 1 is available; free disk"
        refused_with(capfd, INPUT, message, *order)
    assert states(tmp_path / "tuned") == ["step-00000001"]
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "write_checkpoint", cut_off)
        message = (
            r"tuned: cannot be written \(.*No space left on device after .*\): the training state is saved; free disk "
            r"space .* --resume"
        )
        refused_with(capfd, INPUT, message, *order, "--resume")
    assert states(tmp_path / "tuned") == ["step-00000004"]
    assert not (tmp_path / "tuned").exists()
    assert tuned(*order, "--resume") == tuned(TINY, tmp_path / "whole", *order[2:]) == OK
    assert same_weights(tmp_path / "tuned", tmp_path / "whole")


def test_an_interrupt_ends_the_command_after_the_step_and_saves_the_state(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    run_step = Training.run_step

    def interrupted(training: Training) -> None:
        signal.raise_signal(signal.SIGINT)
        run_step(training)

    monkeypatch.setattr(Training, "run_step", interrupted)
    assert tuned(TINY, tmp_path / "tuned", data, *QUICK) == INTERRUPTED
    assert "interrupted: finishing this step and saving the state for --resume" in capfd.readouterr().err
    assert states(tmp_path / "tuned") == ["step-00000001"]


# Results of the command


def test_results_are_available_as_json_and_for_tensorboard(data: Path, tmp_path: Path, capfd: Capture) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    extra = ["--json", "--tensorboard", tmp_path / "events", "--validation", data, "--mask-slots", 2]
    assert tuned(TINY, tmp_path / "tuned", data, *QUICK, *extra) == OK
    output, errors = capfd.readouterr()
    found = json.loads(output)
    assert found["samples"] == {"unforked": 4}
    assert (found["settings"]["mask_slots"], found["settings"]["cutoff"]) == (2, 1024)
    assert len(found["training"]["losses"]) == len(found["validation"]["losses"]) == 3
    line = r"step 4/4  loss \d+\.\d+  accuracy \d+%  mask slots \d+% \d+%  [\d,]+ rows/s  0:00:00 left, ends \d\d:\d\d"
    assert re.search(line, errors)
    length = 1 + sum(found["validation"]["acceptance"])
    assert re.search(rf"step 4/4  validation .*  tokens per step {length:.2f}  ", errors)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    parts = product(("training", "validation"), ("loss", "accuracy"), ("next_token", "mask_slot_1", "mask_slot_2"))
    assert {"/".join(part) for part in parts} < set(events.Tags()["scalars"])
    last = events.Scalars("training/loss/next_token")[-1]
    assert (last.step, last.value) == (4, pytest.approx(found["training"]["losses"][0]))
