"""Quantization scales: the file of an int8 bundle with the scales of its linear layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

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


def read_scales(folder: Path) -> ModelScales:
    """The scales of the int8 layers of a bundle, by the names of the linear modules."""
    names = _OLDER_FORMAT if (folder / _OLDER_FORMAT.file).exists() else _FORMAT
    try:
        return _read(folder / names.file, names)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputFault(
            f"{folder / names.file}: {error}: expected the scales that `spaceport export --weights int8` writes; "
            "export the checkpoint again"
        ) from error


def _read(path: Path, names: _Format) -> dict[str, LinearScales]:
    found: dict[str, LinearScales] = {}
    with safe_open(path, "pt") as file:
        keys = set(file.keys())
        for number, modules in json.loads(file.metadata()["modules"]).items():
            clip = float(file.get_tensor(f"{number}.{names.clip}"))
            key = f"{number}.{names.smoothing}"
            scale = InputScale(None if clip != clip else clip, file.get_tensor(key) if key in keys else None)
            found.update({name: LinearScales(scale, file.get_tensor(f"{name}.{names.weight}")) for name in modules})
    return found
