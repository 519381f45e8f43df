"""Faults stay with the request that they belong to: NaN in KV slots, calls that do not return, and slow readers."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from threading import Event

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.scheduling.stream import Stream
from support.spoilt_engine import spoilt_runtime


def test_nan_of_a_cancelled_prompt_does_not_reach_the_next_request_of_a_session(tiny_bundle: Path) -> None:
    opened: SimpleQueue[Stream] = SimpleQueue()
    begun = Event()  # the prompt that is cancelled

    def overflow(batch: Batch, logits: NDArray[np.float32]) -> None:
        """The first chunk leaves NaN behind, as a kernel does that overflows."""
        if begun.is_set():
            begun.clear()
            engine.inner._kv[:, batch.first, :, batch.slot_ids[0, -1]] = np.nan  # type: ignore[attr-defined]
            opened.get().close()

    runtime, engine = spoilt_runtime(tiny_bundle, overflow, prompt_rows=8)
    with runtime:
        expected = runtime.generate([3, 2, 1], Decoding(max_tokens=8, mask_slots=0)).tokens
        begun.set()
        stream = runtime.stream(list(range(40)), Decoding(max_tokens=8, mask_slots=0))
        opened.put(stream)
        assert stream.completion().ending == "cancelled"
        assert runtime.generate([3, 2, 1], Decoding(max_tokens=8, mask_slots=0)).tokens == expected
