"""Quantization scales: the scales that were written are read again, also from older files; a damaged file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spaceport.exporter.bundle_files import write_manifest
from spaceport.exporter.quantization_scales import SCALES_FILE, scales_file, scales_in, write_scales
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE
from spaceport.graphs.int8 import InputScale, IntegerModel, LinearScales, quantize_linear
from spaceport.graphs.quantize import ModelScales
from spaceport.runtime.bundle import BundleError, open_bundle, read_manifest
from spaceport.tools.reference import scales_of
from support.small_bundle import edit, fill


def read(folder: Path) -> ModelScales:
    file = folder / scales_file([path.name for path in folder.iterdir()])
    return scales_in(file.read_bytes(), file)


def model() -> IntegerModel:
    shared = InputScale(3.25, torch.linspace(0.5, 2.0, 8))
    scales = {"a.q": shared, "a.k": shared, "a.o": InputScale(None), "a.up": InputScale(None, torch.full((8,), 0.1))}
    return IntegerModel(2, {name: quantize_linear(torch.eye(8), LinearScales(scale)) for name, scale in scales.items()})


def test_scales_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_scales(tmp_path, model())
    found = read(tmp_path)
    expected = {name: layer.input for name, layer in model().layers.items()}
    assert found.keys() == expected.keys()
    for name, scale in expected.items():
        assert found[name].input.clip == scale.clip
        smoothing = found[name].input.smoothing
        assert (smoothing is None) == (scale.smoothing is None)
        assert smoothing is None or torch.equal(smoothing, scale.smoothing)
    for name, layer in model().layers.items():
        weight_scale = found[name].weight
        assert weight_scale is not None
        assert torch.equal(weight_scale, layer.scale)
    assert found["a.q"].input is found["a.k"].input
    assert found["a.q"].input is not found["a.o"].input


def test_scales_of_a_bundle_of_an_older_version_are_read(tmp_path: Path) -> None:
    smoothing, scale = torch.linspace(0.5, 2.0, 8), torch.full((8,), 0.25)
    tensors = {"0.bound": torch.tensor(3.25, dtype=torch.float64), "0.move": smoothing, "a.q.outputs": scale}
    save_file(tensors, tmp_path / "product_scales.safetensors", {"modules": '{"0": ["a.q"]}'})
    ((name, found),) = read(tmp_path).items()
    assert (name, found.input.clip) == ("a.q", 3.25)
    assert found.input.smoothing is not None
    assert torch.equal(found.input.smoothing, smoothing)
    assert found.weight is not None
    assert torch.equal(found.weight, scale)


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SCALES_FILE).write_bytes(content)
    with pytest.raises(InputFault, match="expected the scales that `spaceport export --weights int8` writes"):
        read(tmp_path)


def test_the_scales_of_a_bundle_are_those_that_were_verified(tmp_path: Path) -> None:
    fill(tmp_path)
    quantized = {"weights": "int8", "activations": "int8x2"}
    edit(tmp_path, lambda entries: entries.update(quantized))
    with pytest.raises(InputFault, match=f"the manifest lists no {SCALES_FILE}: expected one; export"):
        scales_of(open_bundle(tmp_path))
    write_scales(tmp_path, model())
    manifest = read_manifest(tmp_path)
    (tmp_path / MANIFEST_FILE).unlink()
    write_manifest(tmp_path, manifest)
    opened = open_bundle(tmp_path)
    (tmp_path / SCALES_FILE).rename(tmp_path / "verified")
    (tmp_path / SCALES_FILE).write_bytes(b"another file")
    found = scales_of(opened)
    assert found is not None
    assert found.keys() == model().layers.keys()
    with (tmp_path / "verified").open("r+b") as stream:
        stream.write(b"changed in place")
    with pytest.raises(BundleError, match=f"{SCALES_FILE}: sha256 is"):
        scales_of(opened)
