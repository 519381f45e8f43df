"""Medusa: published heads draft in a bundle, and the text stays the base model's.

The heads of support/published.py predict exactly with the right offset: k + 1 tokens per step.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint, quiet_libraries
from spaceport.exporter.export import ExportOptions
from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.on_cuda import DeviceEngine
from spaceport.runtime.backends.on_onnxruntime import open_selection, open_session, session_options
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, EngineOptions
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import OK, run
from support.exported import bundle_of
from support.published import (
    PADDED,
    exact_data,
    exact_heads,
    exact_model,
    text,
    write_checkpoint,
    write_published_heads,
)
from support.stand_in_driver import stand_in_memory

HEADS_FILE = "draft_heads.safetensors"

HEADS = 3
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_libraries()
    return write_checkpoint(tmp_path_factory.mktemp("medusa") / "base", exact_model())


def adopted_heads(base: Path, folder: Path, suffix: str = ".pt") -> Path:
    """The adapter folder of heads as FasterDecoding/medusa-vicuna-7b-v1.3, whose config.json names fewer heads."""
    heads = write_published_heads(folder / "heads", exact_heads(exact_model(), HEADS), suffix)
    assert run(["adopt", str(base), str(heads), str(folder / "adapter")]) == OK
    return folder / "adapter"


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return adopted_heads(base, base.parent)


@pytest.fixture(scope="module")
def bundle(base: Path, adapter: Path) -> Path:
    return bundle_of(base, ExportOptions(adapter=adapter))


def per_step(bundle: Path, **options: Any) -> tuple[list[int], float]:
    """The tokens of a bundle with these drafts, and its tokens per step."""
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        found = runtime.generate(text(0, 5), Decoding(max_tokens=33, **options))
    return list(found.tokens), (len(found.tokens) - 1) / (found.statistics.steps - 1)


@pytest.mark.slow
def test_exact_heads_draft_all_tokens_of_a_step_and_the_text_is_the_base_models(bundle: Path) -> None:
    for heads in range(HEADS + 1):
        tokens, steps = per_step(bundle, mask_slots=heads, draft="chain")
        assert tokens == text(5, 33)
        assert steps == pytest.approx(32 / -(-32 // (heads + 1)))
    assert per_step(bundle, draft="chain") == per_step(bundle, lookup=0) == (text(5, 33), HEADS + 1)
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        statistics = runtime.generate(text(0, 5), Decoding(max_tokens=33, draft="chain")).statistics
        with pytest.raises(ValueError, match="mask_slots is 4: expected 0 to 3, the number of heads of the bundle"):
            runtime.generate("text", Decoding(mask_slots=HEADS + 1))
    assert statistics.accepted_by_source == statistics.drafted_by_source == {"head": 24}
    assert (statistics.accepted_by_depth, statistics.mask_rows) == ([8, 8, 8], 0)
    manifest = read_manifest(bundle)
    assert (manifest.drafts.heads, manifest.drafts.mask_slots, manifest.drafts.max_tokens) == (HEADS, 0, HEADS)


def test_heads_in_any_file_are_adopted_alike(base: Path, adapter: Path, tmp_path: Path) -> None:
    other = adopted_heads(base, tmp_path, ".safetensors")
    assert {file.name: file.read_bytes() for file in other.iterdir()} == {
        file.name: file.read_bytes() for file in adapter.iterdir()
    }
    whole = write_checkpoint(tmp_path / "whole", exact_model(), medusa_num_heads=HEADS, medusa_num_layers=1)
    file = whole / "model.safetensors"
    heads = {f"medusa_head.{name}": head.contiguous() for name, head in exact_heads(exact_model(), HEADS).items()}
    save_file({**load_file(file), **heads}, file, {"format": "pt"})
    assert run(["adopt", str(whole), str(tmp_path / "from whole")]) == OK
    assert (tmp_path / "from whole" / HEADS_FILE).read_bytes() == (adapter / HEADS_FILE).read_bytes()
    assert open_checkpoint(whole, TokenFlags(), adapter=tmp_path / "from whole").drafts.heads == HEADS


def test_heads_are_stored_in_the_type_in_which_they_were_published(base: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in exact_heads(exact_model(), HEADS).items()}
    heads = write_published_heads(tmp_path / "heads", tensors)
    assert run(["adopt", str(base), str(heads), str(tmp_path / "adapter"), "--max-mask-slots", "2"]) == OK
    stored = load_file(tmp_path / "adapter" / HEADS_FILE)
    assert {name.split(".")[0] for name in stored} == {"0", "1"}
    assert all(torch.equal(stored[name], tensors[name]) and stored[name].dtype == torch.float16 for name in stored)


@pytest.mark.slow
def test_every_command_that_reads_drafts_takes_heads(
    base: Path, adapter: Path, bundle: Path, tiny_bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    data, own = exact_data(tmp_path / "data.jsonl"), ["--adapter", str(adapter)]
    bundle = shutil.copytree(bundle, tmp_path / "bundle")  # a check writes what it has measured
    assert run(["check", str(bundle), str(base), "--long-context", "40", "--threads", "1", *own]) == OK
    limits = ["--max-tokens", "17", "--max-seq-len", "64", "--threads", "1"]
    found: list[dict[str, Any]] = []
    for models in ([str(bundle), str(data)], [str(base), str(data), *own], [str(bundle), str(tiny_bundle), str(data)]):
        capsys.readouterr()
        assert run(["acceptance", *models, *limits, "--json"]) == OK
        found.append(json.loads(capsys.readouterr().out))
    row, of_checkpoint, in_a_table = (models["models"][0] for models in found)
    assert row == in_a_table == {**of_checkpoint, "model": str(bundle)}
    assert (row["draft_tokens"], row["predictor"]) == (HEADS, "head")
    assert (row["method"], row["adapter"], row["acceptance"]) == ("medusa", "heads", [1.0] * HEADS)
    assert row["tokens_per_step"] == 17 / 5
    assert run(["audit", str(bundle), str(data), "--max-tokens", "9", "--limit", "1", "--max-requests", "1"]) == OK
    assert run(["inspect", str(bundle)]) == OK
    assert "draft heads           3" in capsys.readouterr().out


def test_a_device_engine_selects_the_tokens_of_heads_as_the_plain_engine(bundle: Path) -> None:
    opened = open_bundle(bundle)
    options = EngineOptions(128, 2)
    session = open_session(opened, session_options(1), ["CPUExecutionProvider"])
    selection = open_selection(opened, ["CPUExecutionProvider"])
    assert selection is not None
    memory, signature = stand_in_memory(), opened.manifest.signature
    device = DeviceEngine(session, signature, options, "cpu", "cpu", memory, selection=selection)
    plain = open_engine(opened, "onnxruntime", options)
    rows = np.arange(5)[None].repeat(2, axis=0)
    mask = np.zeros((2, 1, 5, 64), np.bool_)
    mask[..., :5] = np.tri(5, dtype=np.bool_)
    batch = Batch(0, np.array([text(0, 5), text(2, 5)]), rows, rows, mask, np.array([[4, 1, 0], [4, 4, 2]]))
    expected = plain.run(batch)
    assert device.run(batch).tobytes() == expected.tobytes()
    assert expected.shape == (2, 3 * (1 + HEADS), PADDED)
    for request, found in enumerate(device.select(batch)):
        assert found.best(()) == expected[request].argmax(-1).tolist()
        assert found.best(())[1 : 1 + HEADS] == text(6 + 2 * request, HEADS)
    with Runtime(opened, device, 128) as runtime:
        answer = runtime.generate(text(0, 5), Decoding(max_tokens=33, draft="chain"))
    assert (list(answer.tokens), answer.statistics.steps) == (text(5, 33), 9)
