"""Quantization scales: the file of an int8 bundle with the scales of its linear layers."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.int8 import InputScale, IntegerModel, LinearScales
from spaceport.graphs.quantize import ModelScales

SCALES_FILE = "quantization_scales.safetensors"


@dataclass(frozen=True)
class _Format:
    """File name, and suffixes of the tensor names: INPUT.clip, INPUT.smoothing, MODULE.weight_scale."""

    file: str
    clip: str
    smoothing: str
    weight: str


_FORMAT = _Format(SCALES_FILE, "clip", "smoothing", "weight_scale")
_OLDER_FORMAT = _Format("product_scales.safetensors", "bound", "move", "outputs")  # earlier versions


def write_scales(folder: Path, integers: IntegerModel) -> None:
    """Write the scales of a model's int8 layers into a bundle's folder."""
    names: dict[int, list[str]] = {}
    scales: dict[int, InputScale] = {}
    for name, layer in integers.layers.items():
        names.setdefault(id(layer.input), []).append(name)
        scales[id(layer.input)] = layer.input
    tensors, modules = {}, {}
    for number, key in enumerate(names):
        modules[str(number)] = names[key]
        scale = scales[key]
        clip = float("nan") if scale.clip is None else scale.clip  # NaN: a dynamic scale per row
        tensors[f"{number}.{_FORMAT.clip}"] = torch.tensor(clip, dtype=torch.float64)
        if scale.smoothing is not None:
            tensors[f"{number}.{_FORMAT.smoothing}"] = scale.smoothing.contiguous()
    for name, layer in integers.layers.items():
        tensors[f"{name}.{_FORMAT.weight}"] = layer.scale.clone()
    save_file(tensors, folder / SCALES_FILE, {"modules": json.dumps(modules)})


def scales_file(files: Collection[str]) -> str:
    """The name of the file with scales among the files of an int8 bundle."""
    return _OLDER_FORMAT.file if _OLDER_FORMAT.file in files else SCALES_FILE


def scales_in(content: bytes, file: Path) -> ModelScales:
    """The scales of the int8 layers of a bundle in the content of its file, by the names of the linear modules."""
    names = _OLDER_FORMAT if file.name == _OLDER_FORMAT.file else _FORMAT
    try:
        return _parsed(content, names)
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputFault(
            f"{file}: {error}: expected the scales that `spaceport export --weights int8` writes; export the checkpoint again"
        ) from error


def _parsed(content: bytes, names: _Format) -> dict[str, LinearScales]:
    tensors = load(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])  # safetensors reads it from paths only
    found: dict[str, LinearScales] = {}
    for number, modules in json.loads(header["__metadata__"]["modules"]).items():
        clip = float(tensors[f"{number}.{names.clip}"])
        scale = InputScale(None if clip != clip else clip, tensors.get(f"{number}.{names.smoothing}"))
        found.update({name: LinearScales(scale, tensors[f"{name}.{names.weight}"]) for name in modules})
    return found
