"""Export mistakes: errors in a checkpoint or an option are reported early and leave nothing behind."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spaceport.graphs.contract.manifest import MANIFEST_FILE, MODEL_FILE
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import FAULT, INPUT, INTERRUPTED, OK, USAGE
from spaceport.tools.cli.export import interruptible
from support.paths import TINY
from support.small_bundle import entries_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may change."""
    return shutil.copytree(TINY, tmp_path / "checkpoint")


def refused(capfd: Capture, code: int, message: str, folder: Path, *options: object) -> None:
    """Verify that an export ends with this exit code and message, and leaves nothing behind."""
    before = set(folder.parent.iterdir())
    assert run(["export", str(folder), str(folder.with_name("bundle")), *map(str, options)]) == code
    output, errors = capfd.readouterr()
    assert output == ""
    assert "Traceback" not in errors
    assert re.search(message, errors.splitlines()[-1])
    assert set(folder.parent.iterdir()) == before


def change(file: Path, **values: Any) -> None:
    """Set entries of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **values}), "utf-8")


def weights(folder: Path, spoil: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights of a checkpoint."""
    found = load_file(folder / "model.safetensors")
    spoil(found)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.layers.1.input_layernorm.weight"
SPOILS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "checkpoint: no such folder: expected a checkpoint"),
    "no configuration": (lambda c: (c / "config.json").unlink(), r"no config\.json in it: expected a checkpoint"),
    "configuration no JSON": (lambda c: (c / "config.json").write_text("{"), r"config\.json: not valid JSON"),
    "configuration a list": (lambda c: (c / "config.json").write_text("[]"), r"config\.json: contains list: expected"),
    "unknown architecture": (
        lambda c: change(c / "config.json", model_type="frobnicate"),
        r"architecture 'frobnicate' is not one that transformers \S+ knows: expected one such as llama",
    ),
    "code of its own": (
        lambda c: change(c / "config.json", model_type="frobnicate", auto_map={"AutoConfig": "code.Config"}),
        "architecture 'frobnicate' .* has its own code: use",
    ),
    "architecture a number": (lambda c: change(c / "config.json", model_type=5), "architecture 5 is not one that"),
    "encoder and decoder": (
        lambda c: (c / "config.json").write_text('{"model_type": "t5"}'),
        "'t5' is not a decoder-only causal language model: expected one such as llama, qwen3 or mistral",
    ),
    "encoder and decoder that has a causal form": (
        lambda c: (c / "config.json").write_text('{"model_type": "bart", "is_encoder_decoder": true}'),
        "'bart' is not a decoder-only",
    ),
    "a size of no kind": (lambda c: change(c / "config.json", hidden_size="many"), r"config\.json: .*'hidden_size'"),
    "sizes that do not fit": (lambda c: change(c / "config.json", num_attention_heads=7), "96.* not a multiple of .*7"),
    "no tokenizer": (lambda c: [file.unlink() for file in c.glob("tokenizer*")], r"no tokenizer in it: expected"),
    "tokenizer of nothing": (lambda c: (c / "tokenizer.json").write_text("{}"), "its tokenizer cannot be read:"),
    "tokenizer unknown": (lambda c: change(c / "tokenizer.json", model={"type": "Frob"}), "its tokenizer cannot be"),
    "pickles only": (lambda c: (c / "model.safetensors").rename(c / "pytorch_model.bin"), r"its weights are pickles,"),
    "no weights": (lambda c: (c / "model.safetensors").unlink(), r"no weights in it: expected \*\.safetensors"),
    "weights cut off": (lambda c: os.truncate(c / "model.safetensors", 300_000), "its weights cannot be loaded:"),
    "weights of nothing": (lambda c: os.truncate(c / "model.safetensors", 0), "cannot be loaded: .*: copy or download"),
    "weights of junk": (lambda c: (c / "model.safetensors").write_bytes(b"\xff" * 999), "header too large: copy or"),
    "a weight is missing": (lambda c: weights(c, lambda found: found.pop(NORM)), f"weights {NORM} are missing or of"),
    "many are missing": (lambda c: change(c / "config.json", num_hidden_layers=4), "and 6 more are missing or of"),
    "a weight of another shape": (
        lambda c: weights(c, lambda found: found.update({NORM: torch.zeros(48)})),
        f"weights {NORM} are missing or of another shape: expected every weight of LlamaForCausalLM; save",
    ),
    "end beyond the vocabulary": (
        lambda c: change(c / "generation_config.json", eos_token_id=640),
        r"end-of-text id 640 is outside the model's vocabulary of 640: correct generation_config\.json",
    ),
    "mask token unknown": (lambda c: change(c / "sar_config.json", mask_tokens=["[MASK]"]), r"mask token '\[MASK\]'"),
}


@pytest.mark.parametrize("kind", SPOILS)
def test_an_invalid_checkpoint_is_an_input_error(checkpoint: Path, capfd: Capture, kind: str) -> None:
    spoil, message = SPOILS[kind]
    spoil(checkpoint)
    refused(capfd, INPUT, message, checkpoint)


@pytest.mark.parametrize(
    ("code", "options", "message"),
    [
        (INPUT, ["--mask-token", 640], "mask token '640' is id 640, the model's vocabulary ends at 639: expected"),
        (INPUT, ["--mask-token", -1], "mask token '-1' is not in the tokenizer: expected"),
        (INPUT, ["--max-mask-slots", 65], "the number of mask slots is 65: expected 1 to 64 as --max-mask-slots, or"),
        (INPUT, ["--fork-token", 7], "a fork token needs a child token .*: set both --fork-token and --child-token"),
        (USAGE, ["--opset", 22], "opset is 22: expected one of 23, 24"),
        (USAGE, ["--lowering", "append", "--opset", 23], "append lowering uses TensorScatter, which needs opset 24"),
        (USAGE, ["--weights", "int7"], "'int7' is not one of 'same', 'int8', 'int4', 'float8'"),
        (USAGE, ["--weights", "int8", "--dtype", "float16"], "dtype is float16: int8 layers run on CPUs only,"),
        (USAGE, ["--colour", "red"], "No such option"),
        (USAGE, ["another"], r"unexpected extra argument \(another\)"),
    ],
)
def test_an_invalid_option_is_refused(
    checkpoint: Path, capfd: Capture, code: int, options: list[object], message: str
) -> None:
    refused(capfd, code, message, checkpoint, *options)


def test_an_existing_target_is_an_input_error(tiny_bundle: Path, checkpoint: Path, capfd: Capture) -> None:
    def tried(target: Path, message: str, *options: str) -> None:
        assert run(["export", str(checkpoint), str(target), *options]) == INPUT
        assert re.search(message, capfd.readouterr().err)

    tried(tiny_bundle, "a bundle exists there: replace it with --overwrite")
    tried(checkpoint, "contains files but no bundle: choose another name, these files would be lost", "--overwrite")
    tried(checkpoint / "config.json", "exists and is not a folder: choose another name", "--overwrite")
    tried(checkpoint / "nowhere" / "bundle", "nowhere: no such folder: create it first")
    assert (tiny_bundle / MANIFEST_FILE).exists()
    assert {file.name for file in checkpoint.iterdir()} == {file.name for file in TINY.iterdir()}


def test_a_full_disk_and_an_interrupt_end_an_export_and_the_old_bundle_stays(
    tiny_bundle: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    before = {file: file.read_bytes() for file in target.iterdir()}

    def fill_the_disk(decoder: object, folder: Path, opset: int) -> None:
        (folder / MODEL_FILE).write_bytes(b"half of a graph")
        raise OSError(errno.EFBIG, "File too large")

    def terminate(decoder: object, folder: Path, opset: int) -> None:
        signal.raise_signal(signal.SIGTERM)

    for ending, code, message in ((fill_the_disk, FAULT, "File too large"), (terminate, INTERRUPTED, "interrupted")):
        monkeypatch.setattr("spaceport.exporter.export.to_onnx", ending)
        assert run(["export", str(TINY), str(target), "--overwrite"]) == code
        output, errors = capfd.readouterr()
        assert (output, errors.splitlines()[-1]) == ("", f"spaceport: {message}")
        assert "Traceback" not in errors
        assert {file: file.read_bytes() for file in target.iterdir()} == before
        assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM], ids=lambda kind: kind.name)
def test_an_interrupt_that_a_library_converts_to_an_error_is_still_an_interrupt(kind: signal.Signals) -> None:
    def work() -> None:  # like torch: an interrupt during tracing may be raised as a tracing error
        with interruptible():
            try:
                signal.raise_signal(kind)
            except KeyboardInterrupt as error:
                raise RuntimeError("could not be traced") from error

    before = signal.getsignal(kind)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(kind) == before
    with pytest.raises(ValueError, match="wrong"), interruptible():
        raise ValueError("wrong")


@pytest.mark.slow
def test_an_export_writes_the_same_graph_again_and_prints_only_its_manifest(
    tiny_bundle: Path, tmp_path: Path, capfd: Capture
) -> None:
    """The one export of this folder that is not taken from the cache."""
    assert run(["export", str(TINY), str(tmp_path / "bundle"), "--json"]) == OK
    output, errors = capfd.readouterr()
    assert json.loads(output) == entries_of((tmp_path / "bundle" / MANIFEST_FILE).read_bytes())
    assert "writing the manifest" in errors
    assert open_bundle(tmp_path / "bundle").manifest == open_bundle(tiny_bundle).manifest
