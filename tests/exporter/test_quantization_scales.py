"""Quantization scales: the scales that were written are read again, also from older files; a damaged file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spaceport.exporter.quantization_scales import SCALES_FILE, read_scales, write_scales
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.int8 import InputScale, IntegerModel, LinearScales, quantize_linear


def model() -> IntegerModel:
    shared = InputScale(3.25, torch.linspace(0.5, 2.0, 8))
    scales = {"a.q": shared, "a.k": shared, "a.o": InputScale(None), "a.up": InputScale(None, torch.full((8,), 0.1))}
    return IntegerModel(2, {name: quantize_linear(torch.eye(8), LinearScales(scale)) for name, scale in scales.items()})


def test_scales_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_scales(tmp_path, model())
    found = read_scales(tmp_path)
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
    ((name, found),) = read_scales(tmp_path).items()
    assert (name, found.input.clip) == ("a.q", 3.25)
    assert found.input.smoothing is not None
    assert torch.equal(found.input.smoothing, smoothing)
    assert found.weight is not None
    assert torch.equal(found.weight, scale)


@pytest.mark.parametrize("content", [None, b"", b"not safetensors", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / SCALES_FILE).write_bytes(content)
    with pytest.raises(InputFault, match="expected the scales that `spaceport export --weights int8` writes"):
        read_scales(tmp_path)
