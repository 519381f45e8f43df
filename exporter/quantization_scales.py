"""Product scales: the file of a bundle that says how its integer products are scaled."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.int8 import InputScale, IntegerModel, LinearScales
from spaceport.graphs.quantize import ModelScales

SCALES_FILE = "product_scales.safetensors"


def write_scales(folder: Path, integers: IntegerModel) -> None:
    """Write the scales of a model's products into a bundle's folder."""
    names: dict[int, list[str]] = {}
    scales: dict[int, InputScale] = {}
    for name, product in integers.products.items():
        names.setdefault(id(product.input), []).append(name)
        scales[id(product.input)] = product.input
    tensors, shared = {}, {}
    for number, key in enumerate(names):
        shared[str(number)] = names[key]
        scale = scales[key]
        tensors[f"{number}.bound"] = torch.tensor(
            float("nan") if scale.bound is None else scale.bound, dtype=torch.float64
        )
        if scale.move is not None:
            tensors[f"{number}.move"] = scale.move.contiguous()
    for name, product in integers.products.items():
        tensors[f"{name}.outputs"] = product.scale.clone()
    save_file(tensors, folder / SCALES_FILE, {"modules": json.dumps(shared)})


def read_scales(folder: Path) -> ModelScales:
    """The scales of products in a bundle's folder, by the names of the linear modules."""
    found: dict[str, LinearScales] = {}
    try:
        with safe_open(folder / SCALES_FILE, "pt") as file:
            keys = set(file.keys())
            for number, names in json.loads(file.metadata()["modules"]).items():
                bound = float(file.get_tensor(f"{number}.bound"))
                move = file.get_tensor(f"{number}.move") if f"{number}.move" in keys else None
                scale = InputScale(None if bound != bound else bound, move)
                found.update({name: LinearScales(scale, file.get_tensor(f"{name}.outputs")) for name in names})
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputFault(
            f"{folder / SCALES_FILE}: {error}: expected the scales that `spaceport export --weights int8` writes; "
            "export the checkpoint again"
        ) from error
    return found
