"""Product scales: what is read is what was written, and a damaged file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
    expected = {name: product.input for name, product in model().products.items()}
    assert found.keys() == expected.keys()
    for name, scale in expected.items():
        assert found[name].input.bound == scale.bound
        move = found[name].input.move
        assert (move is None) == (scale.move is None)
        assert move is None or torch.equal(move, scale.move)
    for name, product in model().products.items():
        outputs = found[name].outputs
        assert outputs is not None
        assert torch.equal(outputs, product.scale)
    assert found["a.q"].input is found["a.k"].input
    assert found["a.q"].input is not found["a.o"].input


@pytest.mark.parametrize("content", [None, b"", b"not safetensors", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / SCALES_FILE).write_bytes(content)
    with pytest.raises(InputFault, match="expected the scales that `spaceport export --weights int8` writes"):
        read_scales(tmp_path)
