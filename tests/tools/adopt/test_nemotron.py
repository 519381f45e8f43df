"""Nemotron: the published folder is the base model and its adapter, whose mask rows see their block and have no shift."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spaceport.exporter.checkpoint import Checkpoint, TokenFlags, load_model, open_checkpoint
from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.quiet import quiet_libraries
from spaceport.exporter.sar_config import SAR_FILE
from spaceport.graphs.contract.mask_layout import MaskLayout
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK
from support.published import MASK, VOCAB, exact_model, write_checkpoint
from support.published_nemotron import (
    CONSTANT,
    FOLDER,
    constant_weights,
    nemotron_logits,
    random_weights,
    write_nemotron,
)

SLOTS = 4  # of a block of 6: the last token of the text, a mask row whose prediction is not used, and these
TEXT = [5, 9, 200, 33, 17, 5, 80, 401, 64, 12, 7, 300, 21, 90, 55, 18, 77, 260, 31, 6]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    quiet_libraries()


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nemotron(tmp_path_factory.mktemp("nemotron") / "random", *random_weights())


def adopt(checkpoint: Path, target: Path, *options: str) -> Path:
    assert run(["adopt", str(checkpoint), str(target), *options]) == OK
    return target


def logits(checkpoint: Checkpoint, ids: list[int], visible: torch.Tensor) -> torch.Tensor:
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        output: Any = load_model(checkpoint, "float32")(torch.tensor([ids]), attention_mask=mask)
    found: torch.Tensor = output.logits[0]
    return found


def block(ids: list[int]) -> torch.Tensor:
    """Visibility of a text and the block of mask rows behind it."""
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    masked = torch.tensor(ids) == MASK
    return visible | (masked[:, None] & masked[None, :])


def test_a_block_has_the_logits_of_its_own_architecture(random: Path, tmp_path: Path) -> None:
    """The text is longer than original_max_position_embeddings, so that queries are scaled."""
    base, adapter = random_weights()
    adopted = open_checkpoint(random, TokenFlags(), adapter=adopt(random, tmp_path / "adapter"))
    assert (adopted.mask_layout, adopted.max_mask_slots) == (MaskLayout(shift=False, group="block"), SLOTS)
    ids = [*TEXT, *[MASK] * (SLOTS + 1)]
    expected = nemotron_logits(base, adapter, ids, block(ids))
    found = logits(adopted, ids, block(ids))
    assert (found[:, :VOCAB] - expected[:, :VOCAB]).abs().max() < 2e-5
    assert (found - logits(adopted, ids, torch.ones_like(block(ids)).tril())).abs().max() > 0.1


@pytest.mark.nightly
def test_an_adopted_bundle_drafts_as_its_adapter_was_made_to(tmp_path: Path) -> None:
    checkpoint = write_nemotron(tmp_path / "constant", *constant_weights())
    adapter, bundle = adopt(checkpoint, tmp_path / "adapter"), tmp_path / "bundle"
    manifest = export(checkpoint, bundle, ExportOptions(adapter=adapter))
    assert (manifest.model_type, manifest.max_mask_slots, manifest.tokens.mask) == ("ministral3", SLOTS, (MASK,))
    with Runtime.open(bundle, max_seq_len=128, step_costs="free") as runtime:
        plain, drafted = (
            runtime.generate(TEXT, Decoding(max_tokens=31, mask_slots=slots, draft="chain")) for slots in (0, SLOTS)
        )
    assert list(plain.tokens) == list(drafted.tokens) == [CONSTANT] * 31
    assert (len(drafted.tokens) - 1) / (drafted.statistics.steps - 1) == SLOTS + 1
    assert run(["check", str(bundle), str(checkpoint), "--adapter", str(adapter), "--threads", "1"]) == OK


def test_an_adapter_folder_says_that_mask_rows_see_their_block(random: Path, tmp_path: Path) -> None:
    entries = json.loads((adopt(random, tmp_path / "adapter") / SAR_FILE).read_text("utf-8"))
    assert entries == {
        "mask_tokens": [str(MASK)],
        "mask_slots": SLOTS,
        "shift": False,
        "group": "block",
        "method": "nemotron",
        "adapter": f"{random.name}/linear_spec_lora",
        "mask_adapter": {"rank": 4, "alpha": 16.0, "targets": ["o_proj"]},
    }


def test_a_base_model_in_the_format_of_transformers_takes_the_published_adapter(random: Path, tmp_path: Path) -> None:
    plain = open_checkpoint(random, TokenFlags())
    load_model(plain, "float32").save_pretrained(tmp_path / "base")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / file).write_bytes((random / file).read_bytes())
    assert run(["adopt", str(tmp_path / "base"), str(random / FOLDER), str(tmp_path / "adapter")]) == OK
    ids = [*TEXT, *[MASK] * (SLOTS + 1)]
    adopted = open_checkpoint(tmp_path / "base", TokenFlags(), adapter=tmp_path / "adapter")
    expected = nemotron_logits(*random_weights(), ids, block(ids))
    assert (logits(adopted, ids, block(ids))[:, :VOCAB] - expected[:, :VOCAB]).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"block_size": 2}, "block_size is 2: expected a whole number of at least 3"),
        ({"mask_token_id": None}, "no mask token is known: expected mask_token_id in config.json"),
        ({"mask_token_id": 9}, "an ordinary token"),
    ],
)
def test_a_block_that_is_not_described_as_published_is_refused(
    entries: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_nemotron(tmp_path / "model", *random_weights(), **entries)
    assert run(["adopt", str(checkpoint), "--dry-run"]) == INPUT
    error = " ".join(capsys.readouterr().err.split())
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


def test_another_base_model_is_refused(random: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_checkpoint(tmp_path / "base", exact_model())
    assert run(["adopt", str(base), str(random / FOLDER), "--dry-run"]) == INPUT
    assert "model_type is 'opt': expected nemotron_labs_diffusion or ministral3" in capsys.readouterr().err
