"""Draft files: what a folder says about its drafts is read as it was written; damaged and foreign files are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.checkpoint_files import (
    SAR_FILE,
    CopiedEmbeddings,
    SarConfig,
    config_mask_token,
    read_sar_config,
)
from spaceport.exporter.draft_files import apply_mechanisms, check_values, read_mechanisms, write_mechanisms
from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.draft_methods import CORRECTION_FILE, MaskLayout, read_tables
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.contract.signature import LOWERINGS, Lowering
from spaceport.graphs.mechanism import Factors, InputRows
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decode.draft import Shape
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import OK, run
from spaceport.training.acceptance import DraftPrompt, measure
from support.exported import bundle_of
from support.hash_engine import LAYOUTS
from support.paths import TINY
from support.published import layout_model, text, write_checkpoint

FACTORS_FILE, INPUT_ROWS_FILE = "draft_correction.safetensors", "input_rows.safetensors"
ROWS = InputRows((9, 7), torch.randn(2, 6, generator=torch.Generator().manual_seed(0)))
FACTORS = Factors(torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.ones(6, 2))


def written(folder: Path, config: dict[str, Any] | None = None, sar: dict[str, Any] | None = None) -> Path:
    """The folder with these entries added to its JSON files."""
    for name, entries in (("config.json", config), (SAR_FILE, sar)):
        if entries is not None:
            file = folder / name
            content = json.loads(file.read_text("utf-8")) if file.exists() else {}
            file.unlink(missing_ok=True)
            file.write_text(json.dumps({**content, **entries}), "utf-8")
    return folder


def test_the_layout_of_mask_slots_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_sar_config(tmp_path) == SarConfig()
    written(tmp_path, sar={"mask_tokens": ["[M]"], "shift": None})
    assert read_sar_config(tmp_path) == SarConfig(mask_tokens=("[M]",), layout=MaskLayout(shift=True, group="causal"))
    sar = {"mask_tokens": ["a", "b"], "shift": False, "group": "block", "noise": {"ids": [7, 3], "seed": 5}}
    layout = MaskLayout(shift=False, group="block")
    assert read_sar_config(written(tmp_path, sar=sar)) == SarConfig(
        ("a", "b"), layout=layout, noise=CopiedEmbeddings((7, 3), 5)
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"shift": 1}, r"shift is 1: expected true or false"),
        ({"group": "tree"}, r"group is 'tree': expected causal or block"),
        ({"noise": {"ids": [1, 2], "seed": 0}}, r"expected null, or ids, one for each of the 1 mask_tokens, and seed"),
        ({"noise": {"ids": [-1], "seed": 0}}, r"noise.ids\[0\] is -1: expected a whole number"),
        ({"noise": {"ids": [1]}}, r"noise lacks 'seed': expected ids, seed"),
        ({"noise": "uniform"}, r"noise is str: expected an object"),
        ({"mask_tokens": "[M]"}, r"mask_tokens is '\[M\]': expected a list"),
        ({"mask_tokens": [1.5]}, r"mask_tokens\[0\] is 1.5: expected a token by its id or its text"),
        ({"mask_slots": 0}, r"mask_slots is 0: expected a whole number of at least 1"),
        ({"fork_by_default": 1}, r"fork_by_default is 1: expected true or false"),
        ({"acceptance": 0.5}, "acceptance is 0.5: expected a list; remove the entry, and measure again"),
        ({"acceptance": [{"rates": [0.5]}]}, r"acceptance\[0\] lacks 'data', 'date', 'lookup', 'temperature',"),
        ({"heads": None}, r"unknown entries heads: .*; tune or adopt again what an earlier"),
        *(
            ({"method": value}, r"method is .*: expected null, or a printable text of 1 to 200 characters")
            for value in (5, "", "a\nb", "a" * 201)
        ),
    ],
)
def test_invalid_entries_are_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_sar_config(written(tmp_path, sar={"mask_tokens": ["[M]"], **entries}))


@pytest.mark.parametrize(
    ("config", "mask"),
    [
        *(({name: 9}, 9) for name in ("pard_token", "ptd_token_id", "mask_token_id")),
        ({"mask_token_id": 1, "ptd_token_id": 2, "pard_token": 3}, 3),  # PARD's own entry counts first
        ({"mask_token_id": None}, None),
        *(
            ({"mask_token_id": 1, **other}, None)  # of another method
            for other in ({"block_size": 4}, {"dlm_paradigm": "x"}, {"pard2": True}, {"dflash_config": {"a": 1}})
        ),
        (None, None),
        ({"pard_token": 10}, "pard_token is 10, the model's vocabulary ends at 9: expected an id"),
        ({"pard_token": "9"}, "pard_token is '9': expected a"),
    ],
)
def test_config_json_names_the_mask_token_of_pard(config: dict[str, Any] | None, mask: int | str | None) -> None:
    if isinstance(mask, str):
        with pytest.raises(CheckpointError, match=mask):
            config_mask_token(Path("config.json"), config or {}, 10)
    else:
        assert config_mask_token(Path("config.json"), config or {}, 10) == mask


@pytest.mark.parametrize(
    ("config", "sar", "mask", "expected"),
    [
        ({}, None, "6", ("unknown", None)),
        ({"pard_token": 5}, None, None, ("pard", None)),
        ({"pard_token": 5}, None, "6", ("unknown", None)),  # another mask token is on the command line
        ({"pard_token": 5}, {"mask_tokens": ["6"]}, None, ("unknown", None)),
        ({"mask_token_id": 5, "block_size": 8}, None, None, ("lookup", None)),  # not read as a mask token of PARD
        ({}, {"mask_tokens": ["6"], "method": "tune"}, None, ("tune", None)),
        ({}, {"mask_tokens": ["6"], "method": "uno", "adapter": "a/b@1"}, None, ("uno", "a/b@1")),
        ({}, {"mask_tokens": ["6"], "method": None, "adapter": None}, None, ("unknown", None)),
    ],
)
def test_the_files_of_a_checkpoint_name_the_method(
    config: dict[str, Any],
    sar: dict[str, Any] | None,
    mask: str | None,
    expected: tuple[str, str | None],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(TINY, tmp_path / "checkpoint", ignore=shutil.ignore_patterns(SAR_FILE, "*.py"))
    written(folder, config, sar)
    drafts = open_checkpoint(folder, TokenFlags(mask=() if mask is None else (mask,))).drafts
    assert (drafts.name, drafts.adapter) == expected


def with_embeddings(tokens: int, hidden: int) -> PreTrainedModel:
    """A model with token embeddings of this size."""
    sizes = {"num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=tokens, hidden_size=hidden, **sizes))


def test_input_rows_are_read_as_they_were_written_and_those_of_another_model_are_refused(tmp_path: Path) -> None:
    assert read_mechanisms(tmp_path, read_sar_config(tmp_path)) == ()
    write_mechanisms(tmp_path, [ROWS])
    (rows,) = read_mechanisms(tmp_path, read_sar_config(tmp_path))
    assert isinstance(rows, InputRows)
    assert rows.tokens == (9, 7)
    assert torch.equal(rows.rows, ROWS.rows)
    apply_mechanisms(with_embeddings(10, 6), tmp_path, [rows], ())
    for tokens, hidden in ((9, 6), (10, 8)):
        expected = f"has rows of size 6 for the ids .9, 7.: expected size {hidden} and ids below {tokens}"
        with pytest.raises(CheckpointError, match=expected):
            apply_mechanisms(with_embeddings(tokens, hidden), tmp_path, [rows], ())


@pytest.mark.parametrize("vocab_size", [9, 10, 12])
def test_correction_factors_are_read_as_they_were_written_and_make_tables(tmp_path: Path, vocab_size: int) -> None:
    write_mechanisms(tmp_path, [FACTORS])
    (factors,) = read_mechanisms(tmp_path, read_sar_config(tmp_path))
    assert isinstance(factors, Factors)
    assert factors.rank == 2
    for factor, expected in ((factors.before, FACTORS.before), (factors.after, FACTORS.after)):
        torch.testing.assert_close(factor, expected, rtol=1e-3, atol=1e-6)
    model = with_embeddings(10, 6)
    apply_mechanisms(model, tmp_path, [factors], ())
    with pytest.raises(CheckpointError, match=f"{FACTORS_FILE}: is for embeddings of size 6: expected 8, that of the"):
        apply_mechanisms(with_embeddings(10, 8), tmp_path, [factors], ())
    FACTORS.write_files(tmp_path, model, vocab_size)
    with (tmp_path / CORRECTION_FILE).open("rb") as file:
        tables = read_tables(file, vocab_size)
    for table, other in zip(tables, FACTORS.tables(model.get_input_embeddings().weight), strict=True):
        torch.testing.assert_close(torch.from_numpy(table[:10]).float(), other[:vocab_size], rtol=2e-3, atol=1e-3)
        assert not table[10:].any()


ZEROS = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("file", "entry", "content", "message"),
    [
        (INPUT_ROWS_FILE, [1], None, "cannot be read"),
        (INPUT_ROWS_FILE, [1], {}, "has no tensors"),
        (INPUT_ROWS_FILE, [1], {"other": torch.zeros(1, 6)}, "expected rows, 1 x H"),
        (INPUT_ROWS_FILE, [1, 2], {"rows": torch.zeros(1, 6)}, "expected rows, 2 x H"),
        (INPUT_ROWS_FILE, [1], {"rows": torch.zeros(1, 6, 1)}, "expected rows, 1 x H"),
        (INPUT_ROWS_FILE, [1, 1], {"rows": torch.zeros(2, 6)}, "expected token ids, each once"),
        (INPUT_ROWS_FILE, [1.5], {"rows": torch.zeros(1, 6)}, "expected a whole number"),
        (INPUT_ROWS_FILE, [1], {"rows": torch.full((1, 6), torch.nan)}, "rows has numbers that are not finite"),
        (FACTORS_FILE, 2, {"before": ZEROS}, "has tensors with the shapes"),
        (FACTORS_FILE, 2, {"before": ZEROS, "after": torch.zeros(4, 3)}, "expected before and after, H x 2"),
        (FACTORS_FILE, 2, {"before": ZEROS, "after": torch.zeros(3, 2)}, "expected before and after, H x 2"),
        (FACTORS_FILE, 2, {"before": ZEROS, "after": ZEROS + torch.inf}, "after has numbers that are not finite"),
    ],
)
def test_damaged_rows_and_factors_are_refused(
    file: str, entry: object, content: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    numbers = {"rank" if file == FACTORS_FILE else "tokens": entry}
    written(tmp_path, sar={"mechanisms": {file.removesuffix(".safetensors"): numbers}})
    if content is None:
        (tmp_path / file).write_bytes(b"nothing")
    else:
        save_file(content, tmp_path / file)
    with pytest.raises(CheckpointError, match=message):
        check_values(tmp_path, read_mechanisms(tmp_path, read_sar_config(tmp_path)))


def test_the_file_and_the_entry_of_a_mechanism_belong_together(tmp_path: Path) -> None:
    write_mechanisms(tmp_path, [FACTORS])
    assert tmp_path / FACTORS_FILE in read_sar_config(tmp_path).tensor_files(tmp_path)
    written(tmp_path, sar={"mechanisms": {}})
    with pytest.raises(CheckpointError, match=f"{FACTORS_FILE}: mechanisms in sar_config.json has no entry draft_corr"):
        read_mechanisms(tmp_path, read_sar_config(tmp_path))
    (tmp_path / FACTORS_FILE).unlink()
    written(tmp_path, sar={"mechanisms": {"draft_correction": {"rank": 2}}})
    with pytest.raises(CheckpointError, match=f"names draft_correction, but there is no {FACTORS_FILE}: copy it"):
        read_mechanisms(tmp_path, read_sar_config(tmp_path))
    written(tmp_path, sar={"mechanisms": {"preloaded_slots": {"slots": 2}}})
    with pytest.raises(CheckpointError, match="mechanisms has 'preloaded_slots': expected draft_correction, phrases"):
        read_mechanisms(tmp_path, read_sar_config(tmp_path))


SLOTS = 3
EACH_RUN = (MaskLayout(shift=False, group="block"), "scatter")


def checkpoint_of(layout: MaskLayout, folder: Path, **entries: object) -> Path:
    model, masks = layout_model(layout, SLOTS)
    write_checkpoint(folder, model)
    config = {"mask_tokens": list(map(str, masks)), "shift": layout.shift, "group": layout.group, **entries}
    (folder / SAR_FILE).write_text(json.dumps(config), "utf-8")
    return folder


def tokens_per_step(runtime: Runtime, layout: MaskLayout, shape: Shape = "chain") -> float:
    """Those of a completion whose mask rows have this layout; its text is that of plain decoding."""
    drafts = replace(runtime.bundle.manifest.drafts, layout=layout)
    bundle = replace(runtime.bundle, manifest=replace(runtime.bundle.manifest, drafts=drafts))
    other = Runtime(bundle, runtime.engine, runtime.max_seq_len, costs=runtime.costs)
    plain, drafted = (
        other.generate(text(0, 5), Decoding(max_tokens=33, mask_slots=slots, draft=shape, lookup=0))
        for slots in (0, SLOTS)
    )
    assert list(plain.tokens) == list(drafted.tokens) == text(5, 33)
    return (len(drafted.tokens) - 1) / (drafted.statistics.steps - 1)


CASES = [
    pytest.param(layout, lowering, marks=() if (layout, lowering) == EACH_RUN else pytest.mark.nightly)
    for layout in LAYOUTS
    for lowering in LOWERINGS
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "lowering"), CASES)
def test_an_exact_model_generates_k_plus_1_tokens_per_step_in_its_own_layout_only(
    layout: MaskLayout, lowering: Lowering, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(layout, tmp_path / "checkpoint")
    bundle = tmp_path / "bundle"  # a copy, because check writes into it
    shutil.copytree(bundle_of(checkpoint, ExportOptions(requested_lowering=lowering)), bundle)
    manifest = open_bundle(bundle).manifest
    assert (manifest.drafts.layout, manifest.drafts.mask_slots) == (layout, SLOTS)
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        assert tokens_per_step(runtime, layout) == tokens_per_step(runtime, layout, "tree") == SLOTS + 1
        for other in set(LAYOUTS) - {layout}:
            if len(manifest.tokens.mask) >= other.rows(SLOTS):
                assert tokens_per_step(runtime, other) < 2
        found = measure(runtime, [DraftPrompt(tuple(text(0, 5)))], 13)
        assert found.all.acceptance == [1.0] * SLOTS
        assert found.all.tokens_per_step == 13 / 4
    assert run(["check", str(bundle), str(checkpoint), "--long-context", "40", "--threads", "1"]) == OK


def test_without_shift_distinct_mask_tokens_are_one_more_than_mask_slots(tmp_path: Path) -> None:
    folder = checkpoint_of(MaskLayout(shift=False), tmp_path / "checkpoint", mask_slots=SLOTS + 1)
    with pytest.raises(CheckpointError, match=r"4 mask slots, but 4 mask tokens: .*; without shift, one more"):
        open_checkpoint(folder, TokenFlags())
