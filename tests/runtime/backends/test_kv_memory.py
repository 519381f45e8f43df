"""KV memory: it is zero, takes space only where it is used, and huge pages change no content."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from spaceport.runtime.backends import kv_memory
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.kv_memory import KvMemory
from spaceport.runtime.backends.on_onnxruntime import open_engine
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime

_SHAPE = (20, 4, 2, 4096, 16)  # layers x requests x heads x slots x values
_BYTES = 4 * 20 * 4 * 2 * 4096 * 16


def taken() -> int:
    """Bytes of memory that this process has without files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    assert found is not None
    return 1024 * int(found[1])


def moved(memory: KvMemory, request: int, visible: int) -> None:
    """Move all layers of a request."""
    for _ in range(_SHAPE[0]):
        memory.use_huge_pages(memory.array, request, 1, visible)


def test_a_short_text_takes_little_of_the_memory() -> None:
    before = taken()
    memory = KvMemory(_SHAPE, np.float32)
    assert taken() - before < _BYTES / 20
    memory.array[:, :, :, :64] = 1
    assert _BYTES / 100 < taken() - before < _BYTES / 20
    assert memory.array.sum(dtype=np.float64) == 20 * 4 * 2 * 64 * 16


def test_huge_pages_change_no_content() -> None:
    memory = KvMemory(_SHAPE, np.float32)
    memory.array[:, :, :, :1500] = np.arange(1500)[:, None]
    expected = memory.array.copy()
    moved(memory, 1, 1500)
    assert memory.array.tobytes() == expected.tobytes()
    memory.array[-1, -1, -1, -1, -1] = 7  # all of it can be written


def test_only_the_first_slots_of_a_long_text_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = KvMemory((20, 4, 2, 65536, 16), np.float32)  # a huge page has the slots of one head only
    parts: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "_move", lambda part: parts.append(part.shape))
    moved(memory, 2, 1024)
    assert parts == []
    moved(memory, 2, 1025)
    moved(memory, 2, 2050)  # they were moved ahead
    assert parts == [(2050, 16)] * 40
    memory.use_huge_pages(memory.array, 2, 1, 2051)
    assert parts[40:] == [(4102, 16)] * 2


@pytest.mark.parametrize("requests", [1, 2])
def test_huge_pages_do_not_change_what_is_generated(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    with Runtime.open(demo_bundle, max_requests=requests, threads=1, step_costs="free") as runtime:
        expected = runtime.generate("import json\n", Decoding(max_tokens=100)).tokens
    monkeypatch.setattr(kv_memory, "LONG", 64)
    with Runtime.open(demo_bundle, max_requests=requests, threads=1, step_costs="free") as runtime:
        assert runtime.generate("import json\n", Decoding(max_tokens=100)).tokens == expected


def test_buffers_beyond_all_memory_are_refused(tiny_bundle: Path) -> None:
    with pytest.raises(MemoryError, match="bytes of KV buffers"):
        KvMemory((2**40, 2**20), np.float32)
    with pytest.raises(MemoryError, match="bytes of KV buffers"):
        open_engine(open_bundle(tiny_bundle), EngineOptions(2**40, 1))
