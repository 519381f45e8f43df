"""Draft formats: adapters and heads in bundles of every format have PyTorch's logits and change no other row."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint import quiet_libraries
from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.formats import FORMATS
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import OK, run
from support.exported import bundle_of
from support.gguf_files import random_model
from support.mask_rows import bundle_engine, rows_batch, walk
from support.published import MASK, VOCAB, random_adapter, random_heads, write_checkpoint, write_published_heads

pytestmark = pytest.mark.nightly
TOKENS = range(5, VOCAB)
KINDS = [
    *(
        ExportOptions(FORMATS[name])
        for name in ("float32", "float16", "int8", "int4", "float16-int4", "float16-float8")
    ),
    ExportOptions(requested_lowering="append"),
]


def publish(method: str, folder: Path, model: PreTrainedModel) -> list[str]:
    """Write weights of a method for a model; the options with which they are adopted."""
    if method == "heads":
        write_published_heads(folder, random_heads(3, 1, model.config.hidden_size, VOCAB))
        return []
    random_adapter(model, r=4, lora_alpha=8, target_modules="all-linear").save_pretrained(folder)
    return ["--method", "uno", "--max-mask-slots", "1"]


@pytest.mark.parametrize("options", KINDS, ids=lambda options: f"{options.format.name}-{options.lowering}")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["adapter", "heads"])
def test_drafts_have_the_logits_of_pytorch_and_change_no_other_row(
    method: str, tied: bool, options: ExportOptions, tmp_path: Path
) -> None:
    quiet_libraries()
    base = write_checkpoint(tmp_path / "base", random_model("llama", tied))
    adapter, arguments = tmp_path / "adapter", publish(method, tmp_path / "published", random_model("llama", tied))
    assert run(["adopt", str(base), str(tmp_path / "published"), str(adapter), *arguments]) == OK
    bundle = shutil.copytree(bundle_of(base, replace(options, adapter=adapter)), tmp_path / "bundle")
    long = ["--long-context", "40", "--threads", "1"]
    assert run(["check", str(bundle), str(base), "--adapter", str(adapter), *long]) == OK
    plain, drafting = bundle_engine(bundle_of(base, options)), bundle_engine(bundle)
    if method == "heads" and options == ExportOptions() and not tied:
        rows = rows_batch(torch.randint(0, 600, (20,), generator=torch.Generator().manual_seed(0)).tolist())
        assert np.array_equal(drafting.run(rows)[:, ::4], plain.run(rows))
    elif method != "heads":
        (ordinary, drafted), (same, other) = walk(plain, 4, TOKENS), walk(drafting, MASK, TOKENS)
        if not options.format.rounds:  # rounded on sampled texts, which the added tokens change
            assert ordinary.tobytes() == same.tobytes()
        assert np.isfinite(other).all()
        assert (np.abs(drafted - other).max(axis=-1) > 0.05).all()
    with Runtime.open(bundle, max_seq_len=128, step_costs="free") as runtime:
        decoding = Decoding(max_tokens=24, draft="chain")
        expected = runtime.generate("import os", Decoding(max_tokens=24, mask_slots=0))
        assert runtime.generate("import os", decoding).tokens == expected.tokens
