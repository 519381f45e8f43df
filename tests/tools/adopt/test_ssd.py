"""SSD: a published prefix drafts in a bundle, and the text stays the base model's.

With the prefix of support/published_prefix.py, mask rows predict exactly: k + 1 tokens per step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spaceport.exporter.adapter_folder import EMBEDDINGS_FILE
from spaceport.exporter.checkpoint import SAR_FILE, TokenFlags, load_model, open_checkpoint
from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.preloaded_slots_file import PRELOADED_FILE
from spaceport.exporter.quiet import quiet_libraries
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.signature import LOWERINGS, Lowering
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE
from spaceport.tools.verify.acceptance.measure import measure
from spaceport.tools.verify.acceptance.reference_answers import ReferenceAnswer, Segment
from support.adopted_models import answers, checked_acceptance
from support.gguf_files import random_model
from support.published import random_base, text, write_checkpoint
from support.published_methods import exact_data
from support.published_prefix import (
    FILE,
    SLOTS,
    exact_prefix,
    random_embedding,
    random_prefix,
    write_published_prefix,
)

MASKS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_libraries()
    return tmp_path_factory.mktemp("ssd")


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    return write_checkpoint(folder / "base", exact_prefix(MASKS)[0])


@pytest.fixture(scope="module")
def published(folder: Path) -> Path:
    _, prefix, embedding = exact_prefix(MASKS)
    return write_published_prefix(folder / "ssd", prefix, embedding)


@pytest.fixture(scope="module")
def adopted(folder: Path, base: Path, published: Path) -> Path:
    assert run(["adopt", str(base), str(published), str(folder / "adapter")]) == OK
    return folder / "adapter"


@pytest.fixture(scope="module")
def bundle(folder: Path, base: Path, adopted: Path) -> Path:
    export(base, folder / "bundle", ExportOptions(adapter=adopted))
    return folder / "bundle"


def per_step(bundle: Path, **options: Any) -> tuple[list[int], float]:
    """The tokens of a bundle with these drafts, and its tokens per step."""
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        found = runtime.generate(text(0, 5), Decoding(max_tokens=33, lookup=0, **options))
    return list(found.tokens), (len(found.tokens) - 1) / (found.statistics.steps - 1)


@pytest.mark.slow
def test_an_exact_prefix_drafts_all_tokens_of_a_step_and_the_text_is_the_base_models(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert (manifest.preloaded_slots, manifest.max_mask_slots, len(manifest.tokens.mask)) == (SLOTS, MASKS, MASKS)
    for masks in range(MASKS + 1):
        tokens, steps = per_step(bundle, mask_slots=masks, draft="chain")
        assert tokens == text(5, 33)
        assert steps == pytest.approx(32 / -(-32 // (masks + 1)))
    assert per_step(bundle, draft="tree") == (text(5, 33), MASKS + 1)
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        sampled = [
            runtime.generate(
                text(0, 5), Decoding(max_tokens=20, mask_slots=masks, sampling=Sampling(1.5, seed=3))
            ).tokens
            for masks in (0, MASKS)
        ]
    assert sampled[0] == sampled[1]


@pytest.mark.nightly
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("change", ["zeroed", "without the last slot", "large"])
def test_another_prefix_drafts_less_and_the_text_stays_the_base_models(
    change: str, lowering: Lowering, base: Path, tmp_path: Path
) -> None:
    _, prefix, embedding = exact_prefix(MASKS)
    if change == "zeroed":
        prefix = torch.zeros_like(prefix)
    elif change == "large":
        prefix = torch.full_like(prefix, 1e4)
    else:
        prefix = prefix[..., :-1, :]
    published = write_published_prefix(tmp_path / "ssd", prefix, embedding)
    assert run(["adopt", str(base), str(published), str(tmp_path / "adapter")]) == OK
    export(base, tmp_path / "bundle", ExportOptions(lowering, adapter=tmp_path / "adapter"))
    for shape in ("chain", "tree"):
        tokens, steps = per_step(tmp_path / "bundle", draft=shape)
        assert tokens == text(5, 33)
        assert steps < MASKS  # some tokens are right by chance


@pytest.mark.nightly
def test_an_append_bundle_drafts_all_tokens_of_a_step(base: Path, adopted: Path, tmp_path: Path) -> None:
    export(base, tmp_path / "bundle", ExportOptions("append", adapter=adopted))
    assert per_step(tmp_path / "bundle", draft="chain") == (text(5, 33), MASKS + 1)


def test_the_adapter_folder_has_the_published_numbers(base: Path, adopted: Path) -> None:
    _, prefix, embedding = exact_prefix(MASKS)
    stored = load_file(adopted / PRELOADED_FILE)
    assert torch.equal(stored["keys"], prefix[:, 0, 0])
    assert torch.equal(stored["values"], prefix[:, 1, 0])
    checkpoint = open_checkpoint(base, TokenFlags(), adapter=adopted)
    rows = load_model(checkpoint, "float32").get_input_embeddings().weight
    assert torch.equal(rows[list(checkpoint.tokens.mask)], embedding)
    assert json.loads((adopted / SAR_FILE).read_text("utf-8")) == {
        "mask_tokens": [f"<|forecast_{mask}|>" for mask in range(1, MASKS + 1)],
        "mask_slots": MASKS,
        "shift": True,
        "group": "causal",
        "method": "ssd",
        "adapter": "ssd",
        "prefix": PRELOADED_FILE,
    }
    assert not (adopted / "mask_adapter.safetensors").exists()
    assert EMBEDDINGS_FILE in {file.name for file in adopted.iterdir()}


def test_the_file_is_found_in_the_checkpoint_by_itself_or_by_its_folder(
    base: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in base.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / FILE).symlink_to(published / FILE)
    found = []
    for paths in ([base, published], [base, published / FILE], [tmp_path]):
        capsys.readouterr()
        assert run(["adopt", *map(str, paths), "--dry-run", "--json"]) == OK
        report = json.loads(capsys.readouterr().out)
        assert (report["method"], report["evidence"]) == ("ssd", f"forecast_prefix in {FILE}")
        found.append((report["mask_slots"], report["mask_tokens"], report["prefix"] | {"file": ""}))
    assert found[0] == found[1] == found[2]
    assert found[0][2] == {"file": "", "slots": SLOTS, "tokens": MASKS, "unused": []}


def test_the_report_names_what_was_found(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, prefix, embedding = exact_prefix(MASKS)
    published = write_published_prefix(tmp_path / "ssd", prefix, embedding, heads=torch.zeros(2))
    assert run(["adopt", str(base), str(published), "--dry-run", "--max-mask-slots", "2"]) == OK
    shown = capsys.readouterr().out
    for expected in (
        "SSD: a forecast prefix that only mask rows see; shown by forecast_prefix in",
        f"{SLOTS} key/value pairs per layer and {MASKS} mask tokens in",
        "without effect: heads",
        "mask slots   2",
        "--adapter TARGET",
    ):
        assert expected in shown
    assert run(["adopt", str(base), str(published)]) == USAGE
    assert "no TARGET" in capsys.readouterr().err


def _other(prefix: Tensor, embedding: Tensor) -> dict[str, tuple[dict[str, Tensor], str]]:
    """Files that do not fit the base model, with the message."""
    fits = {"forecast_prefix": prefix, "forecast_embedding": embedding}
    layers = torch.cat((prefix, prefix))
    return {
        "layers": ({**fits, "forecast_prefix": layers}, "has keys of shape (2, 4, 16, 8) and values of shape (2, 4"),
        "heads": ({**fits, "forecast_prefix": prefix[:, :, :, :2]}, "expected 1 x 4 x slots x 8 for both"),
        "dim": ({**fits, "forecast_prefix": prefix[..., :6]}, "or give the base model that it was trained on"),
        "pair": ({**fits, "forecast_prefix": prefix[:, :1]}, "expected layers x 2 x 1 x KV heads x slots x head size"),
        "axes": ({**fits, "forecast_prefix": prefix[0]}, "has shape (2, 1, 4, 16, 8): expected layers x 2 x 1"),
        "batch": ({**fits, "forecast_prefix": prefix.repeat(1, 1, 2, 1, 1, 1)}, "expected layers x 2 x 1 x KV heads"),
        "hidden": ({**fits, "forecast_embedding": embedding[:, :31]}, "has shape (3, 31): expected tokens x 32"),
        "tokens": ({**fits, "forecast_embedding": embedding[:0]}, "has shape (0, 32): expected tokens x 32"),
        "nan": ({**fits, "forecast_prefix": prefix * torch.nan}, "forecast_prefix: has numbers that are not finite"),
        "embedding": ({"forecast_prefix": prefix}, "has no tensor forecast_embedding"),
        "inf": ({**fits, "forecast_embedding": embedding / 0}, "forecast_embedding has numbers that are not finite"),
    }


@pytest.mark.parametrize("case", _other(*exact_prefix(MASKS)[1:]))
def test_a_file_that_does_not_fit_is_refused(
    case: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, message = _other(*exact_prefix(MASKS)[1:])[case]
    torch.save(tensors, tmp_path / FILE)
    assert run(["adopt", str(base), str(tmp_path / FILE), str(tmp_path / "adapter")]) == INPUT
    assert message in capsys.readouterr().err
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-mask-slots", "4"], "--max-mask-slots is 4: expected 1 to 3"),
        (["--mask-token", "638"], "--mask-token has no effect: the file of SSD has mask tokens of its own"),
        (["--noise-seed", "1"], "--noise-seed has no effect"),
    ],
)
def test_options_without_effect_are_refused(
    options: list[str], message: str, base: Path, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adopt", str(base), str(published), "--dry-run", *options]) == USAGE
    assert message in capsys.readouterr().err


def test_a_pickle_that_runs_code_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return print, ("this pickle runs code",)

    torch.save({"forecast_prefix": Code()}, tmp_path / FILE)
    assert run(["adopt", str(base), str(tmp_path / FILE), "--dry-run"]) == INPUT
    shown = capsys.readouterr()
    assert "expected what torch.save writes for a dictionary of tensors" in shown.err
    assert "runs code" not in shown.out


def test_another_base_model_is_refused(base: Path, adopted: Path, tmp_path: Path) -> None:
    model = exact_prefix(MASKS)[0]
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    other = write_checkpoint(tmp_path / "other", model)
    with pytest.raises(CheckpointError, match="neither fine-tuned nor quantized in another way"):
        load_model(open_checkpoint(other, TokenFlags(), adapter=adopted), "float32")
    with pytest.raises(CheckpointError, match="the adapter was trained on base with"):
        open_checkpoint(write_checkpoint(tmp_path / "wide", random_base()), TokenFlags(), adapter=adopted)


def test_a_base_model_that_drafts_already_is_refused(
    base: Path, adopted: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masked = write_checkpoint(tmp_path / "masked", exact_prefix(MASKS)[0], pard_token=638)
    assert run(["adopt", str(masked), str(published), "--dry-run"]) == INPUT
    assert "has mask tokens, which draft already" in capsys.readouterr().err
    for name in (SAR_FILE, PRELOADED_FILE):
        (masked / name).write_bytes((adopted / name).read_bytes())
    (masked / SAR_FILE).write_text(json.dumps({"mask_tokens": ["638"], "prefix": PRELOADED_FILE}), "utf-8")
    with pytest.raises(CheckpointError, match="has a prefix already: expected its base model"):
        open_checkpoint(masked, TokenFlags(), adapter=adopted)
    assert run(["adopt", str(masked), str(published), "--dry-run"]) == INPUT
    assert "has a prefix already: expected its base model" in capsys.readouterr().err


def test_a_prefix_is_not_tuned(base: Path, adopted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "import json", "response": "import os"}\n', "utf-8")
    options = ["--adapter", str(adopted), "--adapter-only", "--method", "gated-lora"]
    assert run(["tune", str(base), str(tmp_path / "tuned"), str(data), *options]) == INPUT
    assert "has a prefix, which is not tuned" in capsys.readouterr().err


@pytest.mark.nightly
def test_every_command_that_reads_drafts_takes_a_prefix(
    base: Path, adopted: Path, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = checked_acceptance(bundle, base, adopted, answers(tmp_path), capsys)
    assert (found["mask_slots"], found["predictor"]) == (MASKS, "mask slot")
    assert run(["inspect", str(bundle)]) == OK
    assert f"mask slots            {MASKS}, which see {SLOTS} preloaded slots" in capsys.readouterr().out
    texts = exact_data(tmp_path / "texts.jsonl")
    assert run(["audit", str(bundle), str(texts), "--max-tokens", "12", "--threads", "1"]) == OK
    with Runtime.open(bundle, max_seq_len=256) as runtime:
        segment = Segment(tuple(text(0, 5)), tuple(text(5, 30)))
        accuracy = measure(runtime, [ReferenceAnswer(1, segment.prefix, (segment,))], 20, MASKS)
    assert accuracy.reference.accuracy == accuracy.generated.accuracy == [1.0] * (1 + MASKS)


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--weights", "int8"],
        ["--weights", "int8", "--activations", "int8"],
        ["--weights", "int4"],
        ["--weights", "int4", "--activations", "float"],
        ["--weights", "float8"],
        ["--dtype", "float16"],
        ["--lowering", "append"],
        ["--lowering", "append", "--weights", "int4", "--dtype", "float16"],
    ],
)
def test_a_bundle_with_a_prefix_has_the_logits_of_pytorch_in_every_format(
    options: list[str], tied: bool, tmp_path: Path
) -> None:
    model = random_model("llama", tied=tied)
    base = write_checkpoint(tmp_path / "base", model)
    embedding = random_embedding(model.config.hidden_size)
    published = write_published_prefix(tmp_path / "ssd", random_prefix(model.config), embedding)
    adapter = ["--adapter", str(tmp_path / "adapter")]
    assert run(["adopt", str(base), str(published), str(tmp_path / "adapter")]) == OK
    assert run(["export", str(base), str(tmp_path / "bundle"), *adapter, *options]) == OK
    long = ["--long-context", "40", "--threads", "1"]
    assert run(["check", str(tmp_path / "bundle"), str(base), *adapter, *long]) == OK
