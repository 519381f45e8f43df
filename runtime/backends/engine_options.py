"""Engine options: how an engine is opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is opened."""

    capacity: int  # KV slots of each request
    requests: int  # maximum number of concurrent requests
    threads: int = 1  # CPU threads of engines that run on a CPU; 0: one for each core
    trust_engines: bool = False  # also run engines that were not built on this machine
    graphs: bool = True  # replay CUDA graphs on a GPU
