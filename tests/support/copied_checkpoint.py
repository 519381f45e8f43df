"""Copied checkpoint: the tiny checkpoint in a new folder, with changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from spaceport.exporter.checkpoint import quiet_libraries
from support.paths import TINY


def copy_of_tiny(folder: Path, **changes: Any) -> Path:
    """A copy of the tiny checkpoint with changes of its JSON files: name -> entries, or None to delete the file."""
    quiet_libraries()
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("make.py", "README.md", "__pycache__"))
    for name, entries in changes.items():
        file = folder / f"{name}.json"
        if entries is None:
            file.unlink()
        else:
            content = json.loads(file.read_text("utf-8")) if file.exists() else {}
            file.write_text(json.dumps({**content, **entries}), "utf-8")
    return folder
