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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint
from spaceport.exporter.checkpoint_files import own_files, require_checkpoint
from spaceport.exporter.dry_run import added_by, dry_run
from spaceport.exporter.export import ExportOptions
from spaceport.exporter.mechanisms import apply_mechanisms, check_values, read_mechanisms, write_mechanisms
from spaceport.exporter.sar_config import (
    SAR_FILE,
    CheckpointError,
    CopiedEmbeddings,
    SarConfig,
    config_mask_token,
    read_sar_config,
)
from spaceport.graphs.contract.draft_methods import CORRECTION_FILE, MaskLayout, read_tables
from spaceport.graphs.contract.signature import LOWERINGS, Lowering
from spaceport.graphs.gated import MaskAdapter, adapter_state, gate_model
from spaceport.graphs.mechanism import Factors, InputRows
from spaceport.graphs.preloaded_slots import PreloadedSlots, slots_of
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decode.draft import Shape
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.adopt.adopt import additions_of, plan_adoption, write_adoption
from spaceport.tools.adopt.given import AdoptionRequest, read_given
from spaceport.tools.cli import OK, run
from spaceport.tools.verify.acceptance import AnswerSegment, ReferenceAnswer, measure
from support.exported import bundle_of
from support.gguf_files import HEAD_DIM, HEADS, KV_HEADS, random_model
from support.hash_engine import LAYOUTS
from support.paths import TINY
from support.published import layout_model, text, write_checkpoint
from support.published_methods import METHODS

FACTORS_FILE, INPUT_ROWS_FILE = "draft_correction.safetensors", "input_rows.safetensors"
PRELOADED_FILE = "preloaded_slots.safetensors"
ROWS = InputRows((9, 7), torch.randn(2, 6, generator=torch.Generator().manual_seed(0)))
FACTORS = Factors(torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.ones(6, 2))
Sizes = tuple[int, ...]
SHAPE = (2, KV_HEADS, 3, HEAD_DIM)


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
    ],
)
def test_invalid_layouts_are_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_sar_config(written(tmp_path, sar={"mask_tokens": ["[M]"], **entries}))


@pytest.mark.parametrize("name", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_config_json_names_the_mask_token_of_pard(name: str, tmp_path: Path) -> None:
    assert config_mask_token(written(tmp_path, {name: 9}), 10) == 9
    for wrong, message in (
        (10, "is 10, the model's vocabulary ends at 9: expected an id"),
        ("9", "is '9': expected a"),
    ):
        with pytest.raises(CheckpointError, match=f"{name} {message}"):
            config_mask_token(written(tmp_path, {name: wrong}), 10)


@pytest.mark.parametrize(
    ("config", "mask"),
    [
        ({"mask_token_id": 1, "ptd_token_id": 2, "pard_token": 3}, 3),  # PARD's own entry counts first
        ({"mask_token_id": None}, None),
        *(
            ({"mask_token_id": 1, **other}, None)  # of another method
            for other in ({"block_size": 4}, {"dlm_paradigm": "x"}, {"pard2": True}, {"dflash_config": {"a": 1}})
        ),
        (None, None),
    ],
)
def test_that_of_another_method_is_not_taken(config: dict[str, Any] | None, mask: int | None, tmp_path: Path) -> None:
    assert config_mask_token(written(tmp_path, config), 10) == mask
    assert config_mask_token(tmp_path / "model.gguf", 10) is None


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
    for value in (5, "", "a\nb", "a" * 201):
        with pytest.raises(CheckpointError, match=r"method is .*: expected null, or a printable text of 1 to 200 char"):
            read_sar_config(written(folder, sar={"method": value}))


def with_embeddings(tokens: int, hidden: int) -> PreTrainedModel:
    """A model with token embeddings of this size."""
    sizes = {"num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=tokens, hidden_size=hidden, **sizes))


def test_input_rows_are_read_as_they_were_written_and_those_of_another_model_are_refused(tmp_path: Path) -> None:
    assert read_mechanisms(tmp_path) == ()
    write_mechanisms(tmp_path, [ROWS])
    (rows,) = read_mechanisms(tmp_path)
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
    (factors,) = read_mechanisms(tmp_path)
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


@pytest.mark.parametrize(
    ("file", "entry", "content", "message"),
    [
        (INPUT_ROWS_FILE, {"tokens": [1]}, None, "cannot be read"),
        (INPUT_ROWS_FILE, {"tokens": [1]}, {}, "has no tensors"),
        *(
            (INPUT_ROWS_FILE, {"tokens": tokens}, content, message)
            for tokens, content, message in (
                ([1], {"other": torch.zeros(1, 6)}, "expected rows, 1 x H"),
                ([1, 2], {"rows": torch.zeros(1, 6)}, "expected rows, 2 x H"),
                ([1], {"rows": torch.zeros(1, 6, 1)}, "expected rows, 1 x H"),
                ([1, 1], {"rows": torch.zeros(2, 6)}, "expected token ids, each once"),
                ([1.5], {"rows": torch.zeros(1, 6)}, "expected a whole number"),
                ([1], {"rows": torch.full((1, 6), torch.nan)}, "rows has numbers that are not finite"),
            )
        ),
        (FACTORS_FILE, {"rank": 2}, None, "cannot be read"),
        *(
            (FACTORS_FILE, {"rank": 2}, {"before": torch.zeros(4, 2), **content}, message)
            for content, message in (
                ({}, "has tensors with the shapes"),
                ({"after": torch.zeros(4, 3)}, "expected before and after, H x 2"),
                ({"after": torch.zeros(3, 2)}, "expected before and after, H x 2"),
                ({"after": torch.full((4, 2), torch.inf)}, "after has numbers that are not finite"),
            )
        ),
    ],
)
def test_damaged_rows_and_factors_are_refused(
    file: str, entry: dict[str, Any], content: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    written(tmp_path, sar={"mechanisms": {file.removesuffix(".safetensors"): entry}})
    if content is None:
        (tmp_path / file).write_bytes(b"nothing")
    else:
        save_file(content, tmp_path / file)
    with pytest.raises(CheckpointError, match=message):
        check_values(tmp_path, read_mechanisms(tmp_path))


def test_entries_of_earlier_versions_are_refused(tmp_path: Path) -> None:
    for name in ("mask_adapter", "heads", "prefix"):
        (tmp_path / SAR_FILE).write_text(json.dumps({name: None}), "utf-8")
        with pytest.raises(CheckpointError, match=f"unknown entries {name}: .*; export, tune or adopt again"):
            read_mechanisms(tmp_path)


@pytest.mark.parametrize("name", ["uno", "medusa"])
def test_a_model_without_values_gets_the_tensors_that_an_adopted_one_has(name: str, tmp_path: Path) -> None:
    model = METHODS[name](tmp_path)
    slots = 13 if name == "uno" else None  # more new tokens than free rows of the embedding table
    plan = plan_adoption(read_given(model.base, model.weights, AdoptionRequest(max_mask_slots=slots)))
    write_adoption(plan, tmp_path / "adapter", overwrite=False)
    opened = open_checkpoint(model.base, TokenFlags(), adapter=tmp_path / "adapter")
    adopted = {name: tensor.shape for name, tensor in load_model(opened, "float32").named_parameters()}
    for additions in (additions_of(plan), added_by(opened)):
        with torch.device("meta"), torch.no_grad():
            empty = AutoModelForCausalLM.from_config(plan.checkpoint.config)
            additions.add_to(empty)
        assert {name: tensor.shape for name, tensor in empty.named_parameters()} == adopted


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("preloaded") / "base", random_model(tied=False))


@pytest.fixture
def preloaded(base: Path, tmp_path: Path) -> Path:
    """A checkpoint folder whose mask tokens see preloaded slots."""
    for file in base.iterdir():
        (tmp_path / file.name).symlink_to(file)
    written(tmp_path, sar={"mask_tokens": ["600", "601"], "mask_slots": 2})
    slots = torch.randn((2, *SHAPE), generator=torch.Generator().manual_seed(0))
    write_mechanisms(tmp_path, [PreloadedSlots(slots[0], slots[1])])
    return tmp_path


def test_the_preloaded_slots_of_a_folder_are_those_of_its_model(preloaded: Path) -> None:
    checkpoint = open_checkpoint(preloaded, TokenFlags())
    read = checkpoint.mechanism(PreloadedSlots)
    assert read is not None
    assert read.count == 3
    found = slots_of(load_model(checkpoint, "float32"))
    for layer, slots in enumerate(found):
        assert torch.equal(slots.keys, read.keys[layer])
        assert torch.equal(slots.values, read.values[layer])
        assert slots.gate.mask_ids == (600, 601)
    assert len(found) == 2
    assert preloaded / PRELOADED_FILE in own_files(preloaded)
    with pytest.raises(CheckpointError, match=r"preloaded_slots.safetensors: has tensors beside the model"):
        dry_run(preloaded, ExportOptions())
    model = random_model(tied=False)  # a folder may have slots and an adapter
    adapter = gate_model(model, (600, 601), 2, 4.0, ["q_proj"])
    write_mechanisms(preloaded, [replace(adapter, tensors=adapter_state(model))])
    checkpoint = open_checkpoint(preloaded, TokenFlags())
    assert checkpoint.mechanism(MaskAdapter) == adapter
    loaded = load_model(checkpoint, "float32")
    assert {slots.gate for slots in slots_of(loaded)} == {loaded.model.layers[0].self_attn.q_proj.gate}
    (preloaded / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights in it"):
        require_checkpoint(preloaded)


def test_slots_may_have_a_head_for_each_query_head(preloaded: Path) -> None:
    shape = (2, HEADS, 5, HEAD_DIM)
    write_mechanisms(preloaded, [PreloadedSlots(torch.zeros(shape), torch.zeros(shape))])
    found = open_checkpoint(preloaded, TokenFlags()).mechanism(PreloadedSlots)
    assert found is not None
    assert tuple(found.keys.shape) == shape


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"mechanisms": {"preloaded_slots": {"slots": 0}}}, r"preloaded_slots.slots is 0: expected a whole number"),
        ({"mechanisms": {"preloaded_slots": {}}}, r"preloaded_slots lacks 'slots'"),
        (
            {"mechanisms": {}},
            r"preloaded_slots.safetensors: mechanisms in sar_config.json has no entry preloaded_slots",
        ),
        ({"mechanisms": {"preloaded_slots": {"slots": 2}}}, r"expected keys and values with 2 slots"),
        (
            {"mask_tokens": [], "mask_slots": None},
            r"names preloaded_slots, .* but no mask token is known: set one with",
        ),
    ],
)
def test_an_entry_that_names_no_slots_is_refused(entries: dict[str, Any], message: str, preloaded: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(written(preloaded, sar=entries), TokenFlags())


def test_a_file_of_slots_that_is_lost_or_damaged_is_refused(preloaded: Path) -> None:
    (preloaded / PRELOADED_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match=r"preloaded_slots.safetensors: cannot be read"):
        open_checkpoint(preloaded, TokenFlags())
    (preloaded / PRELOADED_FILE).unlink()
    with pytest.raises(
        CheckpointError, match=r"names preloaded_slots, but there is no preloaded_slots.safetensors: copy"
    ):
        open_checkpoint(preloaded, TokenFlags())


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ((1, *SHAPE[1:]), (1, *SHAPE[1:]), rf"shape \(1, .*: expected 2 x {KV_HEADS} or {HEADS} x slots x {HEAD_DIM}"),
        ((2, 3, 3, HEAD_DIM), (2, 3, 3, HEAD_DIM), "which are layers, heads, slots and head size of the model"),
        ((*SHAPE[:3], HEAD_DIM + 1), (*SHAPE[:3], HEAD_DIM + 1), "expected 2 x"),
        ((*SHAPE[:2], 0, HEAD_DIM), (*SHAPE[:2], 0, HEAD_DIM), "expected keys and values with 3 slots"),
        (SHAPE[1:], SHAPE[1:], "expected keys and values with 3 slots"),
        (SHAPE, (*SHAPE[:2], 4, HEAD_DIM), "expected keys and values with 3 slots"),
        (SHAPE, (1, *SHAPE[1:]), r"and values of shape \(1, \d, 3, "),
        (SHAPE, None, r"has tensors with the shapes {'keys': .*: expected keys and values"),
    ],
)
def test_slots_of_other_sizes_are_refused(keys: Sizes, values: Sizes | None, message: str, preloaded: Path) -> None:
    tensors = {"keys": torch.zeros(keys)} | ({} if values is None else {"values": torch.ones(values)})
    save_file(tensors, preloaded / PRELOADED_FILE)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(preloaded, TokenFlags())


def test_numbers_beyond_the_range_of_a_type_are_refused(preloaded: Path) -> None:
    save_file({"keys": torch.zeros(SHAPE), "values": torch.full(SHAPE, 1e5)}, preloaded / PRELOADED_FILE)
    checkpoint = open_checkpoint(preloaded, TokenFlags())
    assert slots_of(load_model(checkpoint, "bfloat16"))
    with pytest.raises(CheckpointError, match="has numbers beyond the range of float16: expected --dtype bfloat16"):
        load_model(checkpoint, "float16")
    save_file({"keys": torch.zeros(SHAPE), "values": torch.full(SHAPE, torch.nan)}, preloaded / PRELOADED_FILE)
    with pytest.raises(CheckpointError, match="values has numbers that are not finite"):
        load_model(open_checkpoint(preloaded, TokenFlags()), "float32")


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
    bundle = shutil.copytree(
        bundle_of(checkpoint, ExportOptions(lowering)), tmp_path / "bundle"
    )  # check writes into it
    manifest = open_bundle(bundle).manifest
    assert (manifest.drafts.layout, manifest.drafts.mask_slots) == (layout, SLOTS)
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        assert tokens_per_step(runtime, layout) == tokens_per_step(runtime, layout, "tree") == SLOTS + 1
        for other in set(LAYOUTS) - {layout}:
            if len(manifest.tokens.mask) >= other.rows(SLOTS):
                assert tokens_per_step(runtime, other) < 2
        prompt, answer = tuple(text(0, 5)), tuple(text(5, 13))
        found = measure(runtime, [ReferenceAnswer(prompt, (AnswerSegment(prompt, answer),))], None)
        assert found.all.acceptance == [1.0] * SLOTS
        assert found.all.tokens_per_step == len(answer) / 4
    assert run(["check", str(bundle), str(checkpoint), "--long-context", "40", "--threads", "1"]) == OK


def test_without_shift_distinct_mask_tokens_are_one_more_than_mask_slots(tmp_path: Path) -> None:
    folder = checkpoint_of(MaskLayout(shift=False), tmp_path / "checkpoint", mask_slots=SLOTS + 1)
    with pytest.raises(CheckpointError, match=r"4 mask slots, but 4 mask tokens: .*; without shift, one more"):
        open_checkpoint(folder, TokenFlags())
