"""Forecast file: the file of torch that is published with SSD, found without opening its pickle."""

from __future__ import annotations

import zipfile
from pathlib import Path

SUFFIX = ".pt"
PREFIX, EMBEDDING = "forecast_prefix", "forecast_embedding"  # its tensors
_READ = 1_000_000  # bytes of a pickle that are searched for the name


def forecast_file(path: Path) -> Path | None:
    """The file of torch with a forecast prefix: the given one, or one in a folder; None if there is none."""
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    return next((file for file in files if file.suffix == SUFFIX and _names_prefix(file)), None)


def _names_prefix(file: Path) -> bool:
    if not file.is_file():
        return False
    if not zipfile.is_zipfile(file):  # before torch 1.6
        with file.open("rb") as opened:
            return PREFIX.encode() in opened.read(_READ)
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.endswith("data.pkl"):
                with archive.open(name) as opened:
                    return PREFIX.encode() in opened.read(_READ)
    return False
