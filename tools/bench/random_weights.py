"""Random weights: what completes a skeleton where it runs, drawn on the GPU if torch has one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copy

import numpy as np
from numpy.typing import NDArray

from spaceport.exporter.atomic_folder import write_manifest
from spaceport.graphs.contract.manifest import DATA_FILE, MANIFEST_FILE, Manifest, manifest_in
from spaceport.graphs.contract.signature import DTYPES

SKELETON_FILE, CONFIG_FILE = "skeleton.json", "config.json"
ALIGNED = 65536  # bytes: alignment of weights in the data file
_DEVIATION = 0.02  # standard deviation, as transformers initializes a Llama
_PIECE = 1 << 25  # weights that are drawn at once


def is_skeleton(folder: Path) -> bool:
    """Whether a folder is a bundle without its weights."""
    return (folder / SKELETON_FILE).is_file()


def inflate(skeleton: Path, target: Path) -> Manifest:
    """Write the bundle of a skeleton with random weights into a new folder."""
    target.mkdir(parents=True)
    manifest = manifest_in((skeleton / MANIFEST_FILE).read_bytes())
    dtype = manifest.signature.dtype
    size = json.loads((skeleton / SKELETON_FILE).read_text("utf-8"))["bytes"]
    left, draw = size // DTYPES[dtype].bytes, _drawing()
    with (target / DATA_FILE).open("wb") as data:
        while left:
            drawn = draw(min(left, _PIECE))
            if dtype == "bfloat16":  # the upper half of a float32
                data.write(np.ascontiguousarray(drawn.view(np.uint16)[1::2]).data)
            else:
                data.write(drawn.astype(dtype).data)
            left -= drawn.size
    for file in skeleton.iterdir():
        if file.name not in (MANIFEST_FILE, SKELETON_FILE, CONFIG_FILE):
            copy(file, target)
    return write_manifest(target, replace(manifest, files={}))


def _drawing() -> Callable[[int], NDArray[np.float32]]:
    """What draws a number of weights: on the GPU if torch is installed and has one."""
    try:
        import torch

        if torch.cuda.is_available():
            return lambda count: torch.empty(count, device="cuda").normal_(0, _DEVIATION).cpu().numpy()
    except ImportError:
        pass
    random = np.random.default_rng(0)
    return lambda count: random.standard_normal(count, np.float32) * np.float32(_DEVIATION)
