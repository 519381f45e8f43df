"""Spaceport: plain decoding through the runtime, steps of several rows through its engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spaceport.runtime.session import Runtime

LIBRARIES = ("numpy", "onnxruntime", "spaceport.runtime.session")
PACKAGES = ("spaceport", "onnxruntime", "numpy")


class Runner:
    """An open bundle; a second runtime for concurrent requests is opened when first needed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.single = self._open(1)
        self.several: Runtime | None = None

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        times = []
        with self.single.stream(prompt, self._plain(self.single, tokens)) as stream:
            next(stream)
            before = perf_counter()
            for _ in stream:
                times.append((now := perf_counter()) - before)
                before = now
        return times

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        import numpy as np

        from spaceport.tools.bench.steps import chain_batch

        self.prefill(prompt)
        batch = chain_batch(self.single.engine, len(rows), len(prompt), np.random.default_rng(0))
        batch.input_ids[0] = rows
        self.single.engine.run(batch)
        return [_timed(lambda: self.single.engine.run(batch)) for _ in range(repeats)]

    def prefill(self, prompt: list[int]) -> float:
        return _timed(lambda: self.single.generate(prompt, self._plain(self.single, 1)))

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        if self.several is None:
            self.several = self._open(len(prompts))
        runtime = self.several
        decoding = self._plain(runtime, tokens)
        with ThreadPoolExecutor(len(prompts)) as clients:
            before = perf_counter()
            done = list(clients.map(lambda prompt: runtime.generate(prompt, decoding), prompts))
            seconds = perf_counter() - before
        return sum(len(completion.tokens) for completion in done), seconds

    def _open(self, requests: int) -> Runtime:
        from spaceport.runtime.session import Runtime

        length, threads = self.settings["length"], self.settings["threads"]
        path = Path(self.settings["model"])
        return Runtime.open(path, backend="onnxruntime", max_seq_len=length, max_requests=requests, threads=threads)

    def _plain(self, runtime: Runtime, tokens: int) -> Any:
        from spaceport.runtime.decoding import Decoding
        from spaceport.runtime.sampling.sampler import Sampling

        ends = Sampling(banned=runtime.bundle.manifest.tokens.end)
        return Decoding(max_tokens=tokens, mask_slots=0, fork=False, sampling=ends)


def open_runner(settings: dict[str, Any]) -> Runner:
    """The bundle `model` on the CPU."""
    return Runner(settings)


def _timed(work: Any) -> float:
    before = perf_counter()
    work()
    return perf_counter() - before
