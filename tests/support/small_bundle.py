"""Small bundle: a few kilobytes that no engine can run, for checks before one is opened, and bundles made to fork."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from spaceport.exporter.atomic_folder import write_manifest
from spaceport.graphs.contract.draft_methods import DraftAcceptance, DraftMethod
from spaceport.graphs.contract.manifest import (
    DATA_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    EngineRecord,
    Manifest,
    TokenIds,
    with_digest,
)
from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.bundle import BundleError, open_bundle

ENGINE = "sm89-0123456789ab.engine"
RECORD = EngineRecord("a" * 64, 7, ("b" * 64, "c" * 64), "tensorrt-rtx", "1.7.1.116", "sm89", 1024, 4, 64, 512)


def fill(folder: Path, content: bytes = b"a graph") -> Manifest:
    """Write a small bundle into an existing folder."""
    (folder / MODEL_FILE).write_bytes(content)
    (folder / DATA_FILE).write_bytes(bytes(range(256)) * 16)
    (folder / TOKENIZER_FILE).write_text(Tokenizer(models.WordLevel({"a": 0}, "a")).to_str())
    manifest = Manifest(
        signature=Signature(2, 2, 16, 640, "float32", "scatter", window=32),
        tokens=TokenIds(mask=(4, 5), fork=6, child=7, end=(1, 3)),
        drafts=DraftMethod(
            name="tune",
            adapter="a/b",
            max_tokens=2,
            mechanisms={"draft_correction": {"rank": 3}},
            acceptance=(
                DraftAcceptance((0.75, 0.5), (0.25, 0.5, 0.5, 0.75, 1.0), 0.0, 1234, "heldout.jsonl", "2026-01-31"),
            ),
        ),
        max_positions=1024,
        model_type="llama",
        parameters=12345,
        opset=23,
        attention="plain",
        special_tokens={"bos_token": "<s>"},
        generation_config={"eos_token_id": [1, 3], "temperature": 0.5},
        engines={ENGINE: RECORD},
        versions={"spaceport": "0.1.0"},
        provenance={"name": "small", "licence": "mit"},
    )
    return write_manifest(folder, manifest)


def new_bundle(folder: Path) -> Path:
    """The folder of a new small bundle."""
    folder.mkdir()
    fill(folder)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest in place, with a digest of its own."""
    file = folder / MANIFEST_FILE
    entries = entries_of(file.read_bytes())
    change(entries)
    file.write_bytes(with_digest(entries))


def entries_of(content: bytes) -> dict[str, Any]:
    """The entries of a manifest's file without its digest."""
    entries: dict[str, Any] = json.loads(content)
    entries.pop("sha256", None)
    return entries


def refused(folder: Path, message: str) -> None:
    """Assert that a bundle is refused with the path, the reason and what to do."""
    with pytest.raises(BundleError, match=message) as caught:
        open_bundle(folder)
    assert str(folder) in str(caught.value)
    assert re.search(r"expected|the manifest says|copy the bundle|export", str(caught.value))


def forking_copy(bundle: Path, copy: Path) -> Path:
    """A copy of the tiny bundle that forks at each newline."""
    shutil.copytree(bundle, copy)
    tokenizer = Tokenizer.from_file(str(copy / TOKENIZER_FILE))
    (fork,), (child,) = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("\n", "#"))
    edit(copy, lambda manifest: manifest["tokens"].update(fork=fork, child=child))
    return copy
