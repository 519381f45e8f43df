"""Prefetch: the collated micro-batches of each training step, prepared in a thread while the step before it computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from spaceport.tools.tune.packing import PackedBatch


@dataclass(frozen=True)
class StepBatches:
    """What one process computes in one training step."""

    micro_batches: tuple[PackedBatch, ...]
    totals: torch.Tensor  # text tokens and mask slots with a loss, over all processes
    rows: int  # text tokens and mask slots, over all processes


class Prefetch:
    """Prepares the batches of the next step in the background; the order of the steps is up to the caller."""

    def __init__(self, prepare: Callable[[int], StepBatches]) -> None:
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="spaceport-prefetch")
        self._next: tuple[int, Future[StepBatches]] | None = None

    def take(self, step: int, following: bool) -> StepBatches:
        """The batches of a step; with `following`, those of the step after it are begun."""
        if self._next is not None and self._next[0] == step:
            found = self._next[1].result()
        else:
            found = self._prepare(step)
        self._next = (step + 1, self._pool.submit(self._prepare, step + 1)) if following else None
        return found
