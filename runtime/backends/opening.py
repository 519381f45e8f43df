"""Opening: how much room an engine is opened with, and what it may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Opening:
    """What is asked of an engine when it is opened."""

    capacity: int  # slots of each request
    requests: int
    threads: int = 1  # of the processor, for engines that run on it; 0: one for each core
    trust_engines: bool = False  # also those that were not built on this machine
    graphs: bool = True  # CUDA graphs beside the plain path, where there is a GPU
