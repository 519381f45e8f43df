"""CTranslate2: greedy `Generator.generate_batch`, whole prompts in one call as documented for long inputs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

LIBRARIES = ("numpy", "ctranslate2")
PACKAGES = ("ctranslate2", "numpy")


class Runner:
    """An open CTranslate2 model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import ctranslate2

        self.vocabulary = json.loads((Path(settings["model"]) / "vocabulary.json").read_text("utf-8"))
        self.generator = ctranslate2.Generator(
            settings["model"],
            "cpu",
            compute_type=settings["compute_type"],
            inter_threads=1,
            intra_threads=settings["threads"],
        )

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        times: list[float] = []

        def step(_: object) -> bool:
            times.append(perf_counter())
            return False

        self._generate([prompt], tokens, step)
        return [later - earlier for earlier, later in pairwise(times)]

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        raise NotImplementedError(
            "no call of its API feeds several tokens after a cached prompt and returns their logits"
        )

    def prefill(self, prompt: list[int]) -> float:
        before = perf_counter()
        self._generate([prompt], 1, None)
        return perf_counter() - before

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        before = perf_counter()
        found = self._generate(prompts, tokens, None)
        seconds = perf_counter() - before
        return sum(len(result.sequences_ids[0]) for result in found), seconds

    def _generate(self, prompts: list[list[int]], tokens: int, callback: Any) -> Any:
        words = [[self.vocabulary[token] for token in prompt] for prompt in prompts]
        return self.generator.generate_batch(
            words,
            beam_size=1,
            min_length=tokens,
            max_length=tokens,
            include_prompt_in_result=False,
            callback=callback,
        )


def open_runner(settings: dict[str, Any]) -> Runner:
    """The model folder `model` on the CPU, with `compute_type`."""
    return Runner(settings)
