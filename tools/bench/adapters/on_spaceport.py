"""Spaceport: plain decoding through the runtime, steps of several rows through its engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.adapters.runtimes import Runner
from spaceport.tools.bench.steps import chain_batch


class Spaceport(Runner):
    """An open bundle; a second runtime for concurrent requests is opened when first needed."""

    LIBRARIES = ("numpy", "onnxruntime")
    PACKAGES = ("spaceport", "onnxruntime", "numpy")

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.single = self._open(1)
        self.several: Runtime | None = None

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        times = []
        with self.single.stream(prompt, self._plain(tokens)) as stream:
            next(stream)
            before = perf_counter()
            for _ in stream:
                times.append((now := perf_counter()) - before)
                before = now
        return times

    def feed(self, prompt: list[int], rows: list[int]) -> tuple[Callable[[], object], Callable[[], object]]:
        self.first_token(prompt)
        batch = chain_batch(self.single.engine, len(rows), len(prompt), np.random.default_rng(0))
        batch.input_ids[0] = rows
        return lambda: self.single.engine.run(batch), lambda: None  # the next step writes the same slots

    def first_token(self, prompt: list[int]) -> object:
        return self.single.generate(prompt, self._plain(1))

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        if self.several is None:
            self.several = self._open(len(prompts))
        runtime, decoding = self.several, self._plain(tokens)
        with ThreadPoolExecutor(len(prompts)) as clients:
            before = perf_counter()
            done = list(clients.map(lambda prompt: runtime.generate(prompt, decoding), prompts))
            seconds = perf_counter() - before
        return sum(len(completion.tokens) for completion in done), seconds

    def _open(self, requests: int) -> Runtime:
        path, length = Path(self.settings["model"]), self.settings["length"]
        return Runtime.open(
            path, backend="onnxruntime", max_seq_len=length, max_requests=requests, threads=self.threads
        )

    def _plain(self, tokens: int) -> Decoding:
        ends = Sampling(banned=self.single.bundle.manifest.tokens.end)
        return Decoding(max_tokens=tokens, mask_slots=0, fork=False, sampling=ends)
