"""Adopt: published weights draft in a bundle as their authors let them draft, and the text stays the base model's.

The models of support/published.py predict exactly with the right shift, gate, scale and positions: k + 1 tokens per step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spaceport.exporter.adapter import ADAPTER_FILE
from spaceport.exporter.adapter_folder import BASE_FILE, EMBEDDINGS_FILE
from spaceport.exporter.base_identity import identity_of
from spaceport.exporter.checkpoint import SAR_FILE, TokenFlags, load_model, open_checkpoint
from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.quiet import quiet_libraries
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE
from support.published import (
    MASK,
    PADDED,
    VOCAB,
    exact_model,
    text,
    write_checkpoint,
)
from support.published_methods import METHODS, RANK, SLOTS, WRONG, PublishedModel, exact_data, wrong_base


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_libraries()
    return tmp_path_factory.mktemp("adopted")


@pytest.fixture(scope="module")
def pard(folder: Path) -> Path:
    return METHODS["pard"](folder).base


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    return wrong_base(folder)


@pytest.fixture(scope="module")
def idlm(folder: Path) -> Path:
    return adopted(METHODS["gated-lora"](folder), folder / "idlm.adapter")


@pytest.fixture(scope="module")
def uno(folder: Path) -> Path:
    return adopted(METHODS["uno"](folder), folder / "uno.adapter")


def adopted(model: PublishedModel, target: Path) -> Path:
    assert run(["adopt", str(model.base), str(model.weights), str(target), *model.options]) == OK
    return target


def drafts(bundle: Path) -> tuple[list[int], list[int], float]:
    """Tokens of a bundle without drafts, the same with drafts of mask slots, and tokens per step of the latter."""
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        plain, drafted = (
            runtime.generate(text(0, 5), Decoding(max_tokens=33, mask_slots=slots, draft="chain"))
            for slots in (0, SLOTS)
        )
    return list(plain.tokens), list(drafted.tokens), (len(drafted.tokens) - 1) / (drafted.statistics.steps - 1)


def predictions(base: Path, adapter: Path | None, tokens: int = 12) -> list[int]:
    """What the last token and the mask rows behind it predict, in PyTorch."""
    checkpoint = open_checkpoint(base, TokenFlags(), adapter=adapter)
    masks = (checkpoint.tokens.mask * SLOTS)[:SLOTS]
    with torch.no_grad():
        logits: Any = load_model(checkpoint, "float32")(torch.tensor([[*text(0, tokens), *masks]])).logits
    return [int(token) for token in logits[0, tokens - 1 :, :VOCAB].argmax(-1)]


def exported(checkpoint: Path, adapter: Path | None) -> Path:
    """The bundle of a checkpoint with an adapter, exported once."""
    bundle = (adapter or checkpoint).with_suffix(".bundle")
    if not bundle.exists():
        export(checkpoint, bundle, ExportOptions(adapter=adapter))
    return bundle


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pard", pytest.param("idlm", marks=pytest.mark.nightly), "uno"])
def test_adopted_weights_draft_all_tokens_of_a_step_and_the_text_is_the_base_models(
    method: str, base: Path, request: pytest.FixtureRequest
) -> None:
    made: Path = request.getfixturevalue(method)
    plain, drafted, per_step = drafts(exported(made, None) if method == "pard" else exported(base, made))
    assert plain == drafted == text(5, 33)
    assert per_step == SLOTS + 1


@pytest.mark.slow
def test_every_command_that_takes_an_adapter_takes_an_adopted_one(
    base: Path, uno: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = ["--adapter", str(uno)]
    bundle = str(exported(base, uno))
    assert run(["check", bundle, str(base), "--long-context", "40", "--threads", "1", *adapter]) == OK
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "import json", "response": "import os"}\n', "utf-8")
    limits = ["--max-tokens", "4", "--max-seq-len", "64", "--threads", "1"]
    assert run(["acceptance", str(base), str(data), *adapter, *limits, "--json"]) == OK
    torch_backend = ["--backend", "torch", "--checkpoint", str(base), *adapter]
    assert run(["generate", bundle, "import", *torch_backend, "--max-tokens", "4"]) == OK
    assert capsys.readouterr().out


@pytest.mark.parametrize("method", ["idlm", "uno"])
def test_mask_rows_need_the_adapter_and_no_other_row_has_it(
    method: str, base: Path, request: pytest.FixtureRequest
) -> None:
    adapter: Path = request.getfixturevalue(method)
    assert predictions(base, adapter) == text(12, SLOTS + 1)
    plain, opened = open_checkpoint(base, TokenFlags()), open_checkpoint(base, TokenFlags(), adapter=adapter)
    models = [load_model(checkpoint, "float32") for checkpoint in (plain, opened)]
    ids = torch.arange(VOCAB)[None, :200] * 3 % VOCAB
    with torch.no_grad():
        before, after = (model(ids).logits for model in models)
        masks = torch.tensor([[*text(0, 12), *opened.tokens.mask[:1] * SLOTS]])
        without = models[0](masks).logits[0, 12:].argmax(-1).tolist()
    assert torch.equal(before[..., :VOCAB], after[..., :VOCAB])
    if method == "idlm":
        assert not set(without) & set(text(13, SLOTS))


@pytest.mark.slow
def test_one_table_compares_methods_and_an_audit_finds_no_fault(
    pard: Path, base: Path, uno: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundles = [str(exported(pard, None)), str(exported(base, uno))]
    data = exact_data(tmp_path / "data.jsonl")
    capsys.readouterr()
    assert run(["acceptance", *bundles, str(data), "--max-tokens", "17", "--max-mask-slots", "3", "--json"]) == OK
    rows = json.loads(capsys.readouterr().out)["models"]
    assert [row["method"] for row in rows] == ["pard", "uno"]
    assert [row["adapter"] for row in rows] == [None, "uno/adapter"]
    for row in rows:
        assert row["generated"]["acceptance"] == [1.0] * SLOTS
        assert row["generated"]["tokens_per_step"][SLOTS] == 17 / 5
    limits = ["--max-tokens", "9", "--limit", "1", "--max-requests", "1", "--threads", "1"]
    assert run(["audit", *bundles, str(data), *limits]) == OK
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in table[2:4]] == ["pard", "uno"]
    assert all(line.split()[-2:] == ["0", "lossless"] for line in table[2:4])


def test_an_adapter_folder_says_how_it_drafts(idlm: Path, uno: Path) -> None:
    entries = json.loads((idlm / SAR_FILE).read_text("utf-8"))
    assert entries == {
        "mask_tokens": [str(MASK)],
        "mask_slots": SLOTS,
        "shift": True,
        "group": "causal",
        "method": "gated-lora",
        "adapter": "idlm",
        "mask_adapter": {"rank": RANK, "alpha": 2.0 * RANK, "targets": ["fc2"]},
    }
    assert {file.name for file in idlm.iterdir()} == {ADAPTER_FILE, BASE_FILE, EMBEDDINGS_FILE, SAR_FILE}
    entries = json.loads((uno / SAR_FILE).read_text("utf-8"))
    assert entries["mask_tokens"] == ["<|noise_1|>", "<|noise_2|>", "<|noise_3|>"]
    assert entries["noise"]["seed"] == 0
    assert (entries["method"], entries["adapter"]) == ("uno", "uno/adapter")
    assert all(1 <= token < 300 for token in entries["noise"]["ids"])
    assert entries["mask_adapter"]["alpha"] == pytest.approx(24 * RANK**0.5)  # rsLoRA: alpha / sqrt(rank)


def test_the_identity_of_a_base_model_does_not_depend_on_how_it_is_read(base: Path, uno: Path) -> None:
    """Adopting reads its matrices one by one."""
    whole = identity_of(base.name, load_model(open_checkpoint(base, TokenFlags()), "float32"))
    assert json.loads((uno / BASE_FILE).read_text("utf-8"))["base"] == whole.as_dict()


def test_noise_rows_are_copies_of_the_selected_rows(base: Path, uno: Path) -> None:
    checkpoint = open_checkpoint(base, TokenFlags(), adapter=uno)
    ids = json.loads((uno / SAR_FILE).read_text("utf-8"))["noise"]["ids"]
    model = load_model(checkpoint, "float32")
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        rows: Any = table.weight
        assert torch.equal(rows[list(checkpoint.tokens.mask)], rows[ids])
    assert set(load_file(uno / EMBEDDINGS_FILE)["ids"].tolist()) == set(checkpoint.tokens.mask)


def test_the_seed_selects_the_noise(base: Path, folder: Path, uno: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for seed in (0, 0, 1):
        options = ["--dry-run", "--json", "--noise-seed", str(seed), "--max-mask-slots", "7"]
        assert run(["adopt", str(base), str(folder / "uno" / "adapter"), *options]) == OK
        found.append(json.loads(capsys.readouterr().out)["noise"]["ids"])
    assert found[0] == found[1] != found[2]
    assert all(len(set(ids)) == 7 for ids in found)


def test_an_adapter_inside_the_checkpoint_folder_is_found(
    folder: Path, uno: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_checkpoint(folder / "whole", exact_model(WRONG), noise="uniform", mask_token_id=MASK)
    (whole / "adapter").symlink_to(folder / "uno" / "adapter")
    assert run(["adopt", str(whole), "--dry-run", "--json"]) == OK
    report = json.loads(capsys.readouterr().out)
    assert report["method"] == "uno"
    assert report["adapter"]["folder"] == str(whole / "adapter")
    assert report["written"] == []


@pytest.mark.slow
def test_an_adopted_adapter_can_be_trained_further(base: Path, idlm: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "import json", "response": "import os"}\n', "utf-8")
    options = [
        "--adapter",
        str(idlm),
        "--adapter-only",
        "--method",
        "gated-lora",
        "--max-steps",
        "1",
        "--batch-size",
        "1",
    ]
    assert run(["tune", str(base), str(tmp_path / "tuned"), str(data), *options]) == OK
    assert open_checkpoint(base, TokenFlags(), adapter=tmp_path / "tuned").tokens.mask == (MASK,)


def test_a_pard_checkpoint_needs_nothing_written(
    pard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predictions(pard, None) == text(12, SLOTS + 1)
    opened = open_checkpoint(pard, TokenFlags())
    assert (opened.tokens.mask, opened.max_mask_slots) == ((MASK,), 5)
    assert run(["adopt", str(pard), "--max-mask-slots", "4"]) == OK
    shown = capsys.readouterr().out
    assert f"pard_token {MASK} in config.json" in shown
    assert f"spaceport export {pard} BUNDLE --max-mask-slots 4" in shown
    assert run(["adopt", str(pard), str(tmp_path / "target")]) == USAGE
    assert "needs no TARGET" in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


def test_published_weights_that_are_not_there_are_named(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adopt", str(base), str(tmp_path / "nowhere.pt"), str(tmp_path / "target")]) == INPUT
    assert "nowhere.pt: no such file or folder: expected CHECKPOINT [ADAPTER] TARGET, with" in capsys.readouterr().err


def test_the_report_names_what_was_found(
    base: Path, folder: Path, idlm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = str(folder / "idlm")
    assert run(["adopt", str(base), adapter, "--dry-run"]) == OK
    shown = capsys.readouterr().out
    for expected in (f"mask_token_id {MASK}", f"rank {RANK}, scale 2, 1 modules", "written      nothing"):
        assert expected in shown
    assert run(["adopt", str(base), adapter]) == USAGE
    assert "no TARGET" in capsys.readouterr().err
    assert run(["adopt", str(base), adapter, str(idlm)]) == INPUT
    assert "--overwrite" in capsys.readouterr().err
    assert run(["adopt", str(base), adapter, str(idlm), "--overwrite", "--json", "--max-mask-slots", str(SLOTS)]) == OK
    report = json.loads(capsys.readouterr().out)
    assert report["mask_tokens"] == {str(MASK): MASK}
    assert report["written"] == sorted([ADAPTER_FILE, BASE_FILE, EMBEDDINGS_FILE, SAR_FILE])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--mask-token", "[nothing]"],
            "mask token '[nothing]' is not in its tokenizer: expected a token of this base",
        ),
        (["--mask-token", str(PADDED)], f"is id {PADDED}: expected a token of this base model, or an id from 0 to 639"),
        (["--mask-token", "40"], "an ordinary token"),
        (["--mask-token", "1"], "which ends a text: expected another"),
        (
            ["--method", "eagle"],
            "--method is 'eagle': expected one of medusa, ssd, bita, pard, uno, nemotron, gated-lora",
        ),
        (["--method", "uno", "--mask-token", "[M]"], "--mask-token has no effect: UNO has random tokens instead"),
        (["--noise-seed", "0"], "--noise-seed has no effect: this method has no noise"),
        (["--max-mask-slots", "400"], "--max-mask-slots is 400: expected 1 to"),
        (
            ["--mask-token", "639", "--mask-token", "638", "--max-mask-slots", "3"],
            "--max-mask-slots is 3: expected 1 to 2",
        ),
        (["--method", "uno", "--max-mask-slots", "400"], "--max-mask-slots is 400: expected 1 to"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], expected: str, base: Path, folder: Path, idlm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adopt", str(base), str(folder / "idlm"), "--dry-run", *options]) in (INPUT, USAGE)
    assert expected in capsys.readouterr().err


def test_an_adapter_needs_the_base_model_that_it_was_adopted_for(
    folder: Path, idlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = exact_model(WRONG)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    other = write_checkpoint(tmp_path / "other", model)
    assert run(["export", str(other), str(tmp_path / "bundle"), "--adapter", str(idlm)]) == INPUT
    assert "expected that model as base" in capsys.readouterr().err
