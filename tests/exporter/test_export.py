"""Export: what a bundle contains of its checkpoint, and what is refused before the export starts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

import spaceport
from spaceport.exporter.atomic_folder import TargetError
from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.checkpoint_files import provenance_of, save_acceptance
from spaceport.exporter.export import ExportOptions, estimate_export, export
from spaceport.graphs.contract.draft_methods import DraftAcceptance
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from support.copied_checkpoint import copy_of_tiny
from support.exported import bundle_of
from support.paths import TINY


def test_a_bundle_has_the_data_of_its_checkpoint(tiny_bundle: Path) -> None:
    manifest = open_bundle(tiny_bundle).manifest
    assert manifest.tokens.mask == (4,)
    assert manifest.tokens.end == (1, 3)
    assert (manifest.drafts.mask_slots, manifest.max_positions) == (5, 1024)
    assert (manifest.model_type, manifest.parameters, manifest.opset) == ("llama", 301_728, 23)
    assert manifest.signature.vocab_size == 640
    assert Tokenizer.from_file(str(tiny_bundle / "tokenizer.json")).get_vocab_size() == 628
    assert manifest.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert manifest.generation_config["eos_token_id"] == [1, 3]
    assert (tiny_bundle / "chat_template.jinja").read_text() == (TINY / "chat_template.jinja").read_text()
    assert set(manifest.files) == {file.name for file in tiny_bundle.iterdir()} - {"manifest.json"}


def test_a_half_precision_bundle_generates_the_golden_text(half_bundle: Path) -> None:
    manifest = open_bundle(half_bundle).manifest
    assert manifest.signature.dtype == "float16"
    size = {name: record.size for name, record in manifest.files.items()}
    assert size["model.onnx.data"] < 700_000
    prompt = json.loads((TINY / "prompts.json").read_text("utf-8"))["end of json/scanner.py"]
    with Runtime.open(half_bundle, max_seq_len=256) as runtime:
        found = [runtime.generate(prompt, Decoding(mask_slots=k)) for k in (0, 3)]
    assert found[0].text.endswith("make_scanner = c_make_scanner or py_make_scanner\n")
    assert found[0].tokens == found[1].tokens


@pytest.mark.parametrize(
    "options",
    [ExportOptions(), *(ExportOptions(FORMATS[name]) for name in ("int4", "int8", "bfloat16-int4", "float16-float8"))],
    ids=lambda options: options.format.name,
)
def test_a_bundle_has_about_the_size_that_its_export_announces(options: ExportOptions) -> None:
    checkpoint = open_checkpoint(TINY, options.tokens)
    estimate = estimate_export(checkpoint, options)
    assert str(estimate).startswith(f"bundle of about {estimate.bundle / 1e6:.1f} MB, in about 1 min")
    data = (bundle_of(TINY, options) / DATA_FILE).stat().st_size
    assert data / 1.3 < estimate.bundle < 1.3 * data  # scales count more in a tiny model


def test_an_export_is_refused_before_it_reads_weights_if_the_disk_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages, options = list[str](), ExportOptions(FORMATS["float16-int8"])
    estimate = estimate_export(open_checkpoint(TINY, options.tokens), options)
    assert estimate.temporary > 0
    free = estimate.bundle + estimate.temporary - 1
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(TargetError, match=r"MB free, the bundle needs about"):
        export(TINY, tmp_path / "bundle", options, on_stage=stages.append)
    assert stages == ["reading the checkpoint", str(estimate)]


def test_token_ids_beyond_the_tokenizers_vocabulary_can_be_decoded(tiny_bundle: Path) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=64) as runtime:
        assert len(runtime.generate([639, 628, 5], Decoding(max_tokens=4)).tokens) == 4


@pytest.mark.parametrize(
    ("sar", "flags", "mask", "slots"),
    [
        ({}, TokenFlags(), (4,), 5),
        ({}, TokenFlags(mask=("7",)), (7,), 5),
        ({}, TokenFlags(mask=("[M]",), max_mask_slots=3), (4,), 3),
        ({}, TokenFlags(mask=("630", "631"), max_mask_slots=2), (630, 631), 2),
        (None, TokenFlags(), (), 0),
        (None, TokenFlags(mask=("630",)), (630,), 5),  # the published number
        (None, TokenFlags(mask=("630", "631", "632")), (630, 631, 632), 3),
    ],
)
def test_flags_override_the_checkpoints_tokens(
    sar: dict[str, Any] | None, flags: TokenFlags, mask: tuple[int, ...], slots: int, tmp_path: Path
) -> None:
    found = open_checkpoint(copy_of_tiny(tmp_path / "c", sar_config=sar), flags)
    assert (found.tokens.mask, found.drafts.mask_slots) == (mask, slots)


@pytest.mark.parametrize(
    ("generation", "config", "end"),
    [
        ({"eos_token_id": [3, 1]}, {}, (3, 1)),
        ({"eos_token_id": 3}, {}, (3,)),
        (None, {"eos_token_id": 2}, (2,)),
        (None, {"eos_token_id": None}, (1,)),
    ],
)
def test_end_tokens_come_from_the_first_file_that_names_them(
    tmp_path: Path, generation: Any, config: dict[str, Any], end: tuple[int, ...]
) -> None:
    folder = copy_of_tiny(tmp_path / "c", generation_config=generation, config=config)
    assert open_checkpoint(folder, TokenFlags()).tokens.end == end


def untraced_graph(decoder: object, folder: Path, *_: object) -> None:
    """Stands in for to_onnx, which takes seconds."""
    (folder / MODEL_FILE).write_bytes(b"a graph")
    (folder / DATA_FILE).write_bytes(bytes(8))


@pytest.fixture
def _untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spaceport.exporter.export.to_onnx", untraced_graph)


@pytest.mark.usefixtures("_untraced")
def test_measured_acceptance_is_exported_unless_other_mask_tokens_are_named(tmp_path: Path) -> None:
    measured = DraftAcceptance((0.5, 0.25), temperature=0.7, tokens=9, data="heldout.jsonl", date="2026-01-31")
    folder = copy_of_tiny(tmp_path / "c")
    save_acceptance(folder, measured)
    save_acceptance(folder, greedy := replace(measured, temperature=0.0))
    assert export(folder, tmp_path / "bundle", ExportOptions()).drafts.acceptance == (greedy, measured)
    assert open_bundle(tmp_path / "bundle").manifest.drafts.acceptance == (greedy, measured)
    assert open_checkpoint(folder, TokenFlags(mask=("7",))).drafts.acceptance == ()
    save_acceptance(folder, newer := replace(greedy, rates=(0.75,)))
    assert open_checkpoint(folder, TokenFlags()).drafts.acceptance == (newer, measured)
    assert open_checkpoint(TINY, TokenFlags()).drafts.acceptance == ()


def test_fork_and_child_tokens_are_exported(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "c", sar_config={"fork_token": "630", "child_token": 631})
    tokens = open_checkpoint(folder, TokenFlags()).tokens
    assert (tokens.fork, tokens.child) == (630, 631)
    assert tokens.forbidden == (4, 631)


def test_padding_and_truncation_of_the_tokenizer_are_not_exported(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "c")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    found = Tokenizer.from_str(open_checkpoint(folder, TokenFlags()).tokenizer)
    assert len(found.encode("import json; " * 9).ids) > 8
    assert 0 not in found.encode("x").ids[1:]


@pytest.mark.usefixtures("_untraced")
def test_a_dynamic_rope_model_is_limited_to_its_first_frequencies(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = copy_of_tiny(tmp_path / "c", config={"max_position_embeddings": 128, "rope_parameters": rope})
    assert export(folder, tmp_path / "bundle", ExportOptions()).max_positions == 128


def test_the_target_is_checked_before_the_checkpoint_is_loaded(tmp_path: Path) -> None:
    stages: list[str] = []
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="contains files but no bundle"):
        export(TINY, tmp_path / "notes", ExportOptions(), overwrite=True, on_stage=stages.append)
    assert stages == []
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


REVISION = "0123456789abcdef0123456789abcdef01234567"


def test_the_origin_of_a_checkpoint_is_what_its_path_and_metadata_say(tmp_path: Path) -> None:
    assert provenance_of(Path("/models/my-model")) == {"name": "my-model"}
    metadata = {"general.name": "A model", "general.license": "mit", "general.source.url": 5}
    assert provenance_of(Path("/models/a.gguf"), metadata) == {"name": "A model", "licence": "mit"}
    assert provenance_of(Path("/models/a.gguf"), {}) == {"name": "a"}
    folder = tmp_path / "models--someone--a-model--chat" / "snapshots" / REVISION
    assert provenance_of(folder) == {"name": "a-model--chat", "source": "someone/a-model--chat", "revision": REVISION}


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("---\nlicense: 'mit'\n---\n", "mit"),
        ("# A model\nlicense: mit\n", None),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
        ("---\nlicense: a\x1bb\n---\n", None),
        ("", None),
    ],
)
def test_a_model_card_says_the_licence(tmp_path: Path, card: str, licence: str | None) -> None:
    (tmp_path / "README.md").write_text(card)
    assert provenance_of(tmp_path).get("licence") == licence


def test_an_export_reads_each_json_file_of_a_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Counter[str]()
    own = Path.read_text

    def counted(path: Path, *arguments: Any, **options: Any) -> str:
        read[path.name] += path.parent == TINY
        return own(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", counted)
    spaceport.export(TINY, tmp_path / "bundle", format="float32")
    assert read["config.json"] == read["generation_config.json"] == read["sar_config.json"] == 1
