"""Provenance: what is known about a checkpoint's origin, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from spaceport.exporter.provenance import provenance_of

REVISION = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_has_a_name() -> None:
    assert provenance_of(Path("/models/my-model")) == {"name": "my-model"}


def test_a_cache_of_a_model_hub_says_source_and_revision(tmp_path: Path) -> None:
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


def test_a_gguf_file_says_its_own_origin() -> None:
    metadata = {"general.name": "A model", "general.license": "mit", "general.source.url": 5}
    assert provenance_of(Path("/models/a.gguf"), metadata) == {"name": "A model", "licence": "mit"}
    assert provenance_of(Path("/models/a.gguf"), {}) == {"name": "a"}
