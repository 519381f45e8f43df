"""Folder lock: one holder at a time, and no lock file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from spaceport.exporter.folder_lock import locked_folder


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    """Each thread increments a number by reading and writing it; concurrent increments would be lost."""
    file = tmp_path / "number"
    file.write_text("0")

    def add() -> None:
        for _ in range(50):
            with locked_folder(tmp_path):
                before = int(file.read_text())
                file.write_text(str(before + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(file.read_text()) == 200
    assert [path.name for path in tmp_path.iterdir()] == ["number"]


def test_the_lock_yields_the_descriptor_of_the_folder_and_closes_it(tmp_path: Path) -> None:
    with locked_folder(tmp_path) as descriptor:
        assert os.path.samestat(os.fstat(descriptor), tmp_path.stat())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
