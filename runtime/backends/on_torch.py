"""PyTorch: a module with the graph's inputs and outputs as an engine; the reference for all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.engine import CPU_COSTS, Batch, Moves


class TorchEngine:
    """A module as an engine; it updates the KV buffers in place."""

    costs = CPU_COSTS
    notes: tuple[str, ...] = ()

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
        for request, (sources, targets) in enumerate(moves, first):
            if sources.size:
                moved = self._kv[:, request, :, torch.from_numpy(sources).to(self.device)]
                self._kv[:, request, :, torch.from_numpy(targets).to(self.device)] = moved

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        copied = self._kv[:, source][:, :, torch.from_numpy(slots).to(self.device)]
        self._kv[:, target, :, : slots.size] = copied

    def clear(self, request: int) -> None:
        self._kv[:, request] = 0

    def close(self) -> None:
        self._kv = self._kv[:0]
