"""Page cache: files are in memory after they were read, and a file that stays there is reported."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.start.page_cache import cached_share, drop, read


def test_a_folder_that_was_read_is_in_memory(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(bytes(1 << 20))
    (tmp_path / "empty").touch()
    read(tmp_path)
    assert cached_share(tmp_path / "inner" / "file") == 1.0
    assert cached_share(tmp_path / "empty") == 0.0


def test_a_mapped_file_cannot_be_dropped(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # now all pages are in use
        with pytest.raises(
            OptionFault, match="stays in the page cache, so reading it from its disk cannot be measured"
        ):
            drop(tmp_path)
        assert cached_share(file) == 1.0
