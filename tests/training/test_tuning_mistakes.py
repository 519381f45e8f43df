"""Tuning mistakes: errors are one line and early, and no progress is lost."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file

from spaceport.tools.cli import INPUT, OK, USAGE, run
from spaceport.training import tuning
from spaceport.training.settings import TrainingSettings, TuningJob, TuningOutcome, facts_of
from support.paths import TINY
from support.tunings import stopped as stop

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
    inside = shutil.copytree(TINY, tmp_path / "run" / "checkpoint-5")
    shutil.copy(TINY / "config.json", tmp_path / "run")
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
    (USAGE, "--rank has no effect with --adapter: use those of the folder", "--method gated-lora --rank 4 --adapter x"),
    (USAGE, "--adapter has no effect with --method full: use --method gated-lora", "--adapter x"),
    (USAGE, "--adapter-only has no effect with --method full: use --method gated-lora", "--adapter-only"),
    (USAGE, "--alpha is 0.0: expected more than 0", "--method lora --alpha 0"),
    (USAGE, "'soon': expected hours, minutes and seconds such as 1h30m, 100m or 90s", "--time-budget soon"),
    (USAGE, "special tokens '', .*: expected non-empty names", "--mask-token="),
]


@pytest.mark.parametrize(("code", "message", "options"), OPTIONS)
def test_invalid_options_are_refused(
    code: int, message: str, options: str, data: Path, tmp_path: Path, capfd: Capture
) -> None:
    refused_with(capfd, code, message, TINY, tmp_path / "tuned", data, *options.split())
    assert not (tmp_path / "tuned.training").exists()


def test_a_resume_with_other_inputs_or_settings_is_refused(data: Path, tmp_path: Path, capfd: Capture) -> None:
    order: list[object] = [TINY, tmp_path / "tuned", data, *QUICK]
    stop(TuningJob(TINY, tmp_path / "tuned", (data,), SETTINGS, log_every=1), after=1)
    capfd.readouterr()
    refused_with(capfd, INPUT, "holds an unfinished training for this target: continue it with --resume", *order)
    changed = r"\(batch_size: 2 before, 3 now; learning_rate: 5e-05 before, 0.1 now\)"
    for message, options in (
        (changed, "--batch-size 3 --learning-rate 0.1"),
        (r"\(bf16: False before, True now\)", "--bf16"),
    ):
        refused_with(capfd, INPUT, message, *order, "--resume", *options.split())
    data.write_text(data.read_text() + '{"text": "More."}\n')
    refused_with(capfd, INPUT, r"\(data: data.jsonl \w+ before, data.jsonl \w+ now\)", *order, "--resume")
    assert states(tmp_path / "tuned") == ["step-00000001"]


def shortened(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("step-00000001: is damaged", lambda state: shortened(state / "model.safetensors")),
    ("step-00000001: is damaged", lambda state: shortened(state / "optimizer.bin")),
    ("step-00000001: is damaged", lambda state: (state / "random_states_0.pkl").unlink()),
    ("step-00000001: is damaged (", lambda state: (state / "progress.json").write_text('{"step": 1')),
    ("training.json: is damaged (", lambda state: (state.parent / "training.json").unlink()),
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and the state of a training after one step."""
    folder = tmp_path_factory.mktemp("stopped")
    data = written(folder / "data.jsonl", ({"prompt": f"Say {number}.", "response": "Yes."} for number in range(4)))
    stop(TuningJob(TINY, folder / "tuned", (data,), SETTINGS, log_every=1), after=1)
    return folder


@pytest.mark.parametrize(("message", "damage"), DAMAGE)
def test_a_damaged_state_is_refused(
    message: str, damage: Callable[[Path], object], stopped: Path, tmp_path: Path, capfd: Capture
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "copy")
    damage(folder / "tuned.training" / "step-00000001")
    refused_with(capfd, INPUT, re.escape(message), TINY, folder / "tuned", folder / "data.jsonl", *QUICK, "--resume")
    assert not (folder / "tuned").exists()


def test_a_changed_template_or_end_token_prevents_a_resume(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "base")
    job = TuningJob(tmp_path / "base", tmp_path / "tuned", (), TrainingSettings())
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        before = facts_of(job)
        with (tmp_path / "base" / name).open("a") as file:
            file.write("\n")
        assert facts_of(job) != before


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
        message = r"cannot write the state after step 2 in .* \(.+\): free disk space, and continue from the last state"
        refused_with(capfd, INPUT, message, *order)
    assert states(tmp_path / "tuned")[0] == "step-00000001"
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "write_checkpoint", cut_off)
        message = r"cannot write .*tuned \(.*No space left on device after .*\): free disk space, .* --resume"
        refused_with(capfd, INPUT, message, *order, "--resume")
    assert states(tmp_path / "tuned") == ["step-00000003", "step-00000004"]
    assert not (tmp_path / "tuned").exists()
    assert tuned(*order, "--resume") == tuned(TINY, tmp_path / "whole", *order[2:]) == OK
    assert same_weights(tmp_path / "tuned", tmp_path / "whole")


# Results of the command


def test_results_are_available_as_json_and_progress_as_lines(data: Path, tmp_path: Path, capfd: Capture) -> None:
    extra = ["--json", "--validation", data, "--mask-slots", 2]
    assert tuned(TINY, tmp_path / "tuned", data, *QUICK, *extra) == OK
    output, errors = capfd.readouterr()
    found = json.loads(output)
    assert found["samples"] == {"unforked": 4}
    assert (found["settings"]["mask_slots"], found["settings"]["cutoff"]) == (2, 1024)
    assert len(found["training"]["losses"]) == len(found["validation"]["losses"]) == 3
    line = r"step 4/4  loss \d+\.\d+  accuracy \d+%  mask slots \d+% \d+%  [\d,]+ rows/s  0:00:00 left, ends \d\d:\d\d"
    assert re.search(line, errors)
    length = 1 + sum(found["validation"]["acceptance"])
    assert re.search(rf"step 4/4  validation .*  tokens per step {length:.2f}\n", errors)


Measured = tuple[str, tuple[float | None, ...], tuple[float, ...]]  # kind, accuracies, those with the draft correction
WARNINGS: list[tuple[list[Measured], str]] = [
    ([("training", (0.9, 0.01, 0.5), ())], "slot predicts 1% of the training data"),
    ([("training", (0.9, 0.5), ()), ("validation", (None, 0.04), (0.06,))], "predicts 6% of the validation data"),
    ([("validation", (None, 0.04), (0.2,))], ""),
    ([("validation", (None, 0.1), ())], ""),
    ([("training", (0.001,), ())], ""),  # trained to fork only
    ([], ""),
]


@pytest.mark.parametrize(("lines", "expected"), WARNINGS)
def test_a_mask_slot_that_is_almost_always_wrong_is_a_warning_with_advice(lines: list[Measured], expected: str) -> None:
    measured = [{"kind": kind, "accuracies": slots, "corrected": better} for kind, slots, better in lines]
    warning = TuningOutcome(Counter(), TrainingSettings(), measured).warning or ""
    assert bool(warning) == bool(expected)
    assert expected in warning
    assert not warning or warning.startswith("drafts will not pay: the first mask ")
