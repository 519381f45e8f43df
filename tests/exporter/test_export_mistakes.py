"""Export mistakes: what is wrong in a checkpoint or an option is reported before anything is loaded, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from spaceport.exporter.checkpoint import TokenFlags, load_with_own_attention, open_checkpoint, read_source, template_of
from spaceport.exporter.checkpoint_files import SAR_FILE, read_json, refuse_sizes, require_checkpoint, weight_files
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.contract.manifest import MANIFEST_FILE, MODEL_FILE
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import FAULT, INPUT, INTERRUPTED, OK, USAGE, run
from spaceport.tools.terminal.screen import interruptible_stages
from support.copied_checkpoint import copy_of_tiny
from support.paths import TINY
from support.published_checkpoints import sentencepiece_model
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


def weights(file: Path, spoil: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights of a checkpoint."""
    found = load_file(file)
    spoil(found)
    save_file(found, file, metadata={"format": "pt"})


Spoil = Callable[[Path], object]
CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
NORM = "model.layers.1.input_layernorm.weight"
KINDS = ("t5", "vit", None)
FROB = {"model_type": "frobnicate", "auto_map": {"AutoConfig": "code.Config"}}
TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
SEVENFOLD = {"type": "Sequence", "normalizers": [TENFOLD] * 7}
# What is done to a file of the checkpoint, and a pattern of the message.
SPOILS: list[tuple[str, Spoil, str]] = [
    (".", shutil.rmtree, "checkpoint: no such folder: expected a checkpoint"),
    (CONFIG, Path.unlink, r"no config\.json in it: expected a checkpoint"),
    (CONFIG, lambda file: file.write_text("{"), r"config\.json: not valid JSON"),
    (CONFIG, lambda file: os.truncate(file, 2**26 + 1), rf"config\.json: {2**26 + 1} bytes: expected a JSON file"),
    (CONFIG, lambda file: file.write_text("[]"), r"config\.json: contains list: expected"),
    (CONFIG, partial(change, model_type="frobnicate"), r"'frobnicate' is not one that transformers \S+ knows:"),
    (CONFIG, partial(change, **FROB), "architecture 'frobnicate' .* has its own code: use --trust-remote-code if"),
    (CONFIG, partial(change, hidden_size="many"), r"config\.json: .*'hidden_size' expected int, got str"),
    (CONFIG, partial(change, num_attention_heads=7), "96.* not a multiple of .*7"),
    (CONFIG, partial(change, num_hidden_layers=4), "and 6 more are missing or of"),
    (".", lambda c: [file.unlink() for file in c.glob("tokenizer*")], r"no tokenizer in it: expected tokenizer\.json,"),
    (TOKENIZER, partial(change, normalizer=SEVENFOLD), "its tokenizer could make"),
    (TOKENIZER, lambda file: file.write_text("{}"), "its tokenizer cannot be read: .*expected"),
    (TOKENIZER, partial(change, model={"type": "Frob"}), "its tokenizer cannot be read: .*: expected one as"),
    (WEIGHTS, lambda file: file.rename(file.with_name("pytorch_model.bin")), "its weights are pickles, which can run"),
    (WEIGHTS, Path.unlink, r"no weights in it: expected \*\.safetensors"),
    (WEIGHTS, lambda file: os.truncate(file, 300_000), "its weights cannot be loaded: .*incomplete metadata, file not"),
    (WEIGHTS, partial(weights, spoil=lambda found: found.pop(NORM)), f"weights {NORM} are missing or of another shape"),
    (WEIGHTS, partial(weights, spoil=lambda found: found.update({NORM: torch.zeros(48)})), f"{NORM} are missing or of"),
    ("generation_config.json", partial(change, eos_token_id=640), "id 640 is outside the model's vocabulary of 640:"),
    (SAR_FILE, partial(change, mask_tokens=["[X]"]), r"mask token '\[X\]' is not in the tokenizer: expected one of"),
    (SAR_FILE, partial(change, mask_tokens=[640]), "id 640, the model's vocabulary ends at 639"),
    (SAR_FILE, partial(change, mask_tokens=["[M]", "630"], mask_slots=3), "3 mask slots, but 2 mask tokens"),
    (SAR_FILE, partial(change, fork_token="630"), "a fork token needs a child token"),
    (SAR_FILE, partial(change, fork_token="630", child_token="630"), "token id 630 has two of the roles"),
    (SAR_FILE, partial(change, mask_tokens=["</s>"]), "token id 1 has two of the roles"),
    # sizes that would fill the memory
    (CONFIG, partial(change, num_hidden_layers=10**6), "num_hidden_layers is 1000000: expected at most 4096"),
    (CONFIG, partial(change, n_layer=5000), "n_layer is 5000: expected at most 4096"),
    (CONFIG, partial(change, num_attention_heads=10**9), "num_attention_heads is 1000000000: expected at most 65536"),
    (CONFIG, partial(change, num_local_experts=10**9), "num_local_experts is"),
    (CONFIG, partial(change, hidden_size=2**40), "hidden_size is 1099511627776: expected at most 2147483647"),
    (CONFIG, partial(change, vocab_size=-(2**40)), "vocab_size is -1099511627776"),
    (CONFIG, partial(change, max_position_embeddings=10**50), "max_position_embeddings is a number of 51 digits"),
    (CONFIG, partial(change, text_config={"layers": [{"d_model": 2**40}]}), "d_model is"),
    (CONFIG, lambda file: file.write_text('{"vocab_size": ' + "1" * 5000 + "}"), r"not valid JSON: .*4300"),
    # models that generate no text by themselves
    *((CONFIG, partial(change, model_type=kind), rf"{kind!r} is not .* expected one such as llama") for kind in KINDS),
]


@pytest.mark.parametrize(("file", "spoil", "message"), SPOILS)
def test_an_invalid_checkpoint_is_an_input_error(
    checkpoint: Path, capfd: Capture, file: str, spoil: Spoil, message: str
) -> None:
    spoil(checkpoint / file)
    refused(capfd, INPUT, message, checkpoint)


@pytest.mark.parametrize(
    ("code", "options", "message"),
    [
        (INPUT, ["--mask-token", 640], "mask token '640' is id 640, the model's vocabulary ends at 639: expected"),
        (INPUT, ["--mask-token", -1], "mask token '-1' is not in the tokenizer: expected"),
        (INPUT, ["--max-mask-slots", 65], "the number of mask slots is 65: expected 1 to 64 as --max-mask-slots, or"),
        (INPUT, ["--fork-token", 7], "a fork token needs a child token .*: set both --fork-token and --child-token"),
        (USAGE, ["--format", "int7"], "'int7' is not one of 'stored', 'int4', 'int8', 'float32'"),
        (USAGE, ["--format", "stored"], "is stored, which keeps the weights of a GGUF file: .* is none; expected"),
        (USAGE, ["--format", "int8", "--lowering", "append"], "lowering is append: expected scatter with format int8"),
        (
            USAGE,
            ["--format", "int4", "--attention", "operator"],
            "attention is operator: expected plain with format int",
        ),
        (USAGE, ["--format", "float16-int4", "--lowering", "scatter"], "lowering is scatter: expected append with"),
        (USAGE, ["--colour", "red"], "No such option"),
        (USAGE, ["another"], r"unexpected extra argument \(another\)"),
    ],
)
def test_an_invalid_option_is_refused(
    checkpoint: Path, capfd: Capture, code: int, options: list[object], message: str
) -> None:
    refused(capfd, code, message, checkpoint, *options)


def test_a_full_disk_and_an_interrupt_end_an_export_and_the_old_bundle_stays(
    tiny_bundle: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    before = {file: file.read_bytes() for file in target.iterdir()}

    def fill_the_disk(decoder: object, folder: Path, *_: object) -> None:
        (folder / MODEL_FILE).write_bytes(b"half of a graph")
        raise OSError(errno.EFBIG, "File too large")

    def terminate(*_: object) -> None:
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
        with interruptible_stages():
            try:
                signal.raise_signal(kind)
            except KeyboardInterrupt as error:
                raise RuntimeError("could not be traced") from error

    before = signal.getsignal(kind)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(kind) == before
    with pytest.raises(ValueError, match="wrong"), interruptible_stages():
        raise ValueError("wrong")


@pytest.mark.slow
def test_an_export_writes_the_same_graph_again_and_prints_only_its_manifest(
    tiny_bundle: Path, tmp_path: Path, capfd: Capture
) -> None:
    """The one export of this folder that is not taken from the cache."""
    assert run(["export", str(TINY), str(tmp_path / "bundle"), "--json"]) == OK
    output, errors = capfd.readouterr()
    assert json.loads(output) == entries_of((tmp_path / "bundle" / MANIFEST_FILE).read_bytes())
    stages = [line.partition(" s  ")[2] for line in errors.splitlines()]
    tracing = [
        "tracing the graph",
        "traced 1 of 3 layers",
        "traced 2 of 3 layers",
        "breaking operators down into those of ONNX",
        "translating the graph to ONNX",
        "simplifying the graph",
    ]
    written = ["writing the graph and its weights, 1.2 MB", "checking the graph", "writing the manifest"]
    assert [stage for stage in stages if not stage.startswith("...")][-9:] == tracing + written
    assert open_bundle(tmp_path / "bundle").manifest == open_bundle(tiny_bundle).manifest


# Files of a checkpoint


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "sar_config.json", "unknown"])
def test_a_fifo_or_a_link_to_a_device_is_refused_and_not_waited_for(checkpoint: Path, name: str) -> None:
    file = checkpoint / name
    for replace in (lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero")):
        file.unlink(missing_ok=True)
        replace()
        with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
            open_checkpoint(checkpoint, TokenFlags())
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_json(file)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/model.safetensors", "a/../../b.safetensors", "a/b", "..", "", "a\0"]
)
def test_an_index_names_files_beside_it_only(checkpoint: Path, name: str) -> None:
    index = checkpoint / "model.safetensors.index.json"
    (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": name}}))
    message = (
        f"^{index}: weight_map has the file {re.escape(repr(name))}: expected the names of files beside the index; "
    )
    with pytest.raises(CheckpointError, match=message):
        require_checkpoint(checkpoint)
    index.write_text(json.dumps({"weight_map": {"x": 1}}))
    with pytest.raises(CheckpointError, match="weight_map is invalid: expected the file of each tensor; copy"):
        require_checkpoint(checkpoint)
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    require_checkpoint(checkpoint)
    single = (checkpoint / "a.safetensors").rename(checkpoint / "model.safetensors")
    assert require_checkpoint(checkpoint).weights == (single,)


def test_weights_are_those_of_the_model_alone(tmp_path: Path) -> None:
    drafting = (tmp_path / "heads.safetensors",)
    drafting[0].touch()
    with pytest.raises(CheckpointError, match=r"no weights in it: expected \*\.safetensors"):
        weight_files(tmp_path, drafting)
    for expected in (("part-1", "part-2"), ("model",)):  # a file with all weights comes before its parts
        for name in expected:
            (tmp_path / f"{name}.safetensors").touch()
        assert [file.stem for file in weight_files(tmp_path, drafting)] == list(expected)


def test_usual_sizes_are_accepted() -> None:
    sizes = {"hidden_size": 16384, "num_hidden_layers": 126, "vocab_size": 262144, "max_position_embeddings": 10485760}
    refuse_sizes(Path("config.json"), {**sizes, "num_parameters": 10**12, "quantization": [{"bits": 4, "tie": True}]})


def test_the_attention_implementation_is_always_passed() -> None:
    """A configuration can name an implementation that would be fetched."""
    asked: list[str] = []

    def load(folder: str, attn_implementation: str) -> tuple[str, dict[str, Any]]:
        asked.append(attn_implementation)
        if folder == "old" and attn_implementation == "sdpa":
            raise ValueError("does not support torch.nn.functional.scaled_dot_product_attention yet")
        if folder == "broken":
            raise ValueError("another reason")
        return folder, {}

    assert load_with_own_attention(partial(load, "new")) == ("new", {})
    assert load_with_own_attention(partial(load, "old")) == ("old", {})
    with pytest.raises(ValueError, match="another reason"):
        load_with_own_attention(partial(load, "broken"))
    assert asked == ["sdpa", "sdpa", "eager", "sdpa"]


def backend_of(folder: Path) -> Tokenizer:
    backend: Tokenizer = read_source(require_checkpoint(folder), remote_code=False).load_tokenizer().backend_tokenizer
    return backend


def test_slow_and_word_level_tokenizers_are_read_as_fast_ones(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "slow", tokenizer=None, tokenizer_config=None)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}), "utf-8")
    tokenizer = backend_of(folder)
    slow = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    sample = "the answer of the tower is the ship"
    assert tokenizer.encode(sample, add_special_tokens=False).ids == slow.encode(sample)
    assert tokenizer.decode(slow.encode(sample)) == sample
    folder = copy_of_tiny(tmp_path / "words")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "[UNK]"}), "utf-8")
    assert backend_of(folder).encode("a b c").ids == [0, 1, 2]


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    tokenizer = read_source(require_checkpoint(copy_of_tiny(tmp_path / "c")), remote_code=False).load_tokenizer()
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    assert template_of(tokenizer) == "a"
    tokenizer.chat_template = {"tool_use": "b"}
    assert template_of(tokenizer) is None
