"""PyTorch: a module with the graph's inputs and outputs as an engine; the reference for all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.engine import CPU_COSTS, Batch, Engine, Moves


def move_slots(kv: torch.Tensor, first: int, moves: Sequence[Moves]) -> None:
    """Copy slots of some requests in all layers, reading all before writing any; kv is 2L x requests x Hkv x S x D."""
    busy = [(request, *move) for request, move in enumerate(moves, first) if move[0].size]
    if not busy:
        return
    lines = np.concatenate([np.full(sources.size, request) for request, sources, _ in busy])
    sources, targets = (np.concatenate([move[side] for move in busy]) for side in (1, 2))
    where = torch.from_numpy(np.stack((lines, sources, targets))).to(kv.device)
    kv[:, where[0], :, where[2]] = kv[:, where[0], :, where[1]]


def copy_slots(kv: torch.Tensor, source: int, target: int, slots: NDArray[np.int64]) -> None:
    """Copy slots of a request to the lowest ones of another in all layers; kv is 2L x requests x Hkv x S x D."""
    kv[:, target, :, : slots.size] = kv[:, source][:, :, torch.from_numpy(slots).to(kv.device)]


class TorchEngine(Engine):
    """A module as an engine; it updates the KV buffers in place."""

    costs = CPU_COSTS
    parks = True

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

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        move_slots(self._kv, first, moves)

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        copy_slots(self._kv, source, target, slots)

    def saved(self, request: int, slots: int) -> torch.Tensor:
        return self._kv[:, request, :, :slots].to("cpu", copy=True)

    def restore(self, request: int, rows: torch.Tensor) -> None:
        self._kv[:, request, :, : rows.shape[2]] = rows.to(self._kv.device)

    def clear(self, request: int) -> None:
        self._kv[:, request] = 0

    def close(self) -> None:
        self._kv = self._kv[:0]
