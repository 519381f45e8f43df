"""PyTorch: a module with the graph's inputs and outputs as an engine; the reference for all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.engine import CPU_COSTS, Batch, Engine, Moves


class TorchBuffers(Engine):
    """An engine with its KV buffers in one tensor, so that one statement moves slots in all layers."""

    parks = True
    working: Callable[[], AbstractContextManager[None]] = nullcontext  # a context for work on the buffers
    _kv: torch.Tensor  # 2L x requests x Hkv x S x D

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        busy = [(request, *move) for request, move in enumerate(moves, first) if move[0].size]
        if not busy:
            return
        lines = np.concatenate([np.full(sources.size, request) for request, sources, _ in busy])
        sources, targets = (np.concatenate([move[side] for move in busy]) for side in (1, 2))
        with self.working():
            where = torch.from_numpy(np.stack((lines, sources, targets))).to(self._kv.device)
            self._kv[:, where[0], :, where[2]] = self._kv[:, where[0], :, where[1]]

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        with self.working():
            where = torch.from_numpy(slots).to(self._kv.device)
            self._kv[:, target, :, : slots.size] = self._kv[:, source][:, :, where]

    def saved(self, request: int, slots: int) -> torch.Tensor:
        with self.working():
            return self._kv[:, request, :, :slots].to("cpu", copy=True)

    def restore(self, request: int, rows: torch.Tensor) -> None:
        with self.working():
            self._kv[:, request, :, : rows.shape[2]] = rows.to(self._kv.device)

    def clear(self, request: int) -> None:
        with self.working():
            self._kv[:, request] = 0


class TorchEngine(TorchBuffers):
    """A module as an engine; it updates the KV buffers in place."""

    costs = CPU_COSTS

    def __init__(
        self,
        module: Callable[..., tuple[torch.Tensor, ...]],
        signature: Signature,
        capacity: int,
        requests: int,
        device: str,
    ) -> None:
        self.signature = signature
        self.capacity = capacity
        self.requests = requests
        self.rows = capacity
        self.device = device
        shape = (2 * signature.layers, requests, signature.kv_heads, capacity, signature.head_dim)
        self._kv = torch.zeros(shape, dtype=getattr(torch, signature.kv_dtype), device=device)
        self.module = module

    def run(self, batch: Batch) -> NDArray[np.float32]:
        last = batch.first + batch.requests
        arrays = [
            np.require(array, requirements="W") for _, array in batch.arrays(self.signature)
        ]  # torch warns otherwise
        rows = [torch.from_numpy(array).to(self.device) for array in arrays]
        past = [buffer[batch.first : last] for buffer in self._kv]
        with torch.inference_mode():
            logits: NDArray[np.float32] = self.module(*rows, *past)[0].cpu().numpy()
        return logits

    def close(self) -> None:
        self._kv = self._kv[:0]
