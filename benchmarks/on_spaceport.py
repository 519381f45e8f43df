"""Spaceport as a runner: one decoding mode of a bundle."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.runners import Answer, Runner, timed
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.costs import CostSource
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode_measuring import FORKING, MODES, PLAIN, modes_for
from spaceport.tools.bench.steps import chain_batch

_DRAFTS = tuple(name for name in MODES if name not in FORKING)
_COSTS: dict[str, CostSource] = {"": "measured", "standard": "standard", "free": "free"}
MODE_NAMES = f"{', '.join(_DRAFTS)} and fixed K, also with other step costs: NAME@standard, NAME@free"


@dataclass(frozen=True)
class Mode:
    """A decoding mode such as `default`, `fixed 4` or `default@free`."""

    name: str
    drafts: str  # name of `bench decode`
    costs: CostSource  # step costs that drafts are planned with

    def decoding(self, manifest: Manifest) -> Decoding:
        """Its options for a bundle; raises if the bundle does not support them."""
        word, _, number = self.drafts.partition(" ")
        names, fixed = ((PLAIN,), (int(number),)) if word == "fixed" else ((self.drafts,), ())
        modes = modes_for(manifest, 1, names, fixed)
        return next(mode.decoding for mode in modes if mode.name == self.drafts)


def mode_named(name: str) -> Mode:
    """The mode of this name."""
    drafts, _, source = name.partition("@")
    if source not in _COSTS or not (drafts in _DRAFTS or re.fullmatch("fixed [1-9][0-9]*", drafts)):
        raise OptionFault(f"--modes names {name!r}: expected names among {MODE_NAMES}, with commas between them")
    return Mode(name, drafts, _COSTS[source])


class Spaceport(Runner):
    """An open bundle in one mode; a second runtime for concurrent requests is opened when first needed."""

    PACKAGES = ("onnxruntime",)

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.mode = mode_named(settings["mode"])
        self.single = self._open(1)
        self.decoding = self.mode.decoding(self.single.bundle.manifest)
        self.several: Runtime | None = None

    def decode(self, prompt: list[int], tokens: int, ends: list[int]) -> Answer:
        before = perf_counter()
        found = self.single.generate(prompt, replace(self.decoding, max_tokens=tokens))
        seconds = perf_counter() - before
        number = len(found.tokens) + (found.ending == "end")
        counts = {"steps": found.statistics.steps, "first": found.statistics.first_token_seconds}
        return {"output": [*found.tokens, found.ending], "tokens": number, "seconds": seconds, **counts}

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        self.first_token(prompt)
        batch = chain_batch(self.single.engine, len(rows), len(prompt), np.random.default_rng(0))
        batch.input_ids[0] = rows
        return [timed(lambda: self.single.engine.run(batch)) for _ in range(repeats + 1)][1:]

    def first_token(self, prompt: list[int]) -> object:
        return self.single.generate(prompt, self._endless(1))

    def concurrent(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        if self.several is None:
            self.several = self._open(len(prompts))
        runtime, decoding = self.several, self._endless(tokens)
        with ThreadPoolExecutor(len(prompts)) as clients:
            before = perf_counter()
            done = list(clients.map(lambda prompt: runtime.generate(prompt, decoding), prompts))
            seconds = perf_counter() - before
        return sum(len(completion.tokens) for completion in done), seconds

    def _open(self, requests: int) -> Runtime:
        return Runtime.open(
            self.settings["model"],
            backend=self.settings["backend"],
            max_seq_len=self.settings["length"],
            max_requests=requests,
            threads=self.threads,
            step_costs=self.mode.costs,
        )

    def _endless(self, tokens: int) -> Decoding:
        ends = Sampling(banned=self.single.bundle.manifest.tokens.end)
        return replace(self.decoding, max_tokens=tokens, sampling=ends)
