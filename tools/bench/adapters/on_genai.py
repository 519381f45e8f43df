"""onnxruntime-genai: greedy `Generator`, one per prompt; concurrent requests as one batch."""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

LIBRARIES = ("numpy", "onnxruntime_genai")
PACKAGES = ("onnxruntime-genai", "onnxruntime", "numpy")


class Runner:
    """An open onnxruntime-genai model; the variant with logits of all rows is opened when first needed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import onnxruntime_genai as og

        self.og, self.settings = og, settings
        self.model = self._open(settings["model"])
        self.rows_model: Any = None

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        generator = self._generator(self.model, [prompt], len(prompt) + tokens)
        generator.generate_next_token()
        times = []
        for _ in range(tokens - 1):
            before = perf_counter()
            generator.generate_next_token()
            times.append(perf_counter() - before)
        return times

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        import numpy as np

        if self.rows_model is None:
            self.rows_model = self._open(self.settings["rows_model"])
        generator = self._generator(self.rows_model, [prompt], self.settings["length"])
        draft, times = np.array(rows, np.int32), []
        for _ in range(repeats + 1):
            before = perf_counter()
            generator.append_tokens(draft)
            times.append(perf_counter() - before)
            generator.rewind_to(len(prompt))
        return times[1:]

    def prefill(self, prompt: list[int]) -> float:
        before = perf_counter()
        self._generator(self.model, [prompt], len(prompt) + 1).generate_next_token()
        return perf_counter() - before

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        before = perf_counter()
        generator = self._generator(self.model, prompts, len(prompts[0]) + tokens)
        for _ in range(tokens):
            generator.generate_next_token()
        return len(prompts) * tokens, perf_counter() - before

    def _open(self, folder: str) -> Any:
        config = self.og.Config(folder)
        threads = {"session_options": {"intra_op_num_threads": self.settings["threads"]}}
        config.overlay(json.dumps({"model": {"decoder": threads}}))
        return self.og.Model(config)

    def _generator(self, model: Any, prompts: list[list[int]], length: int) -> Any:
        import numpy as np

        params = self.og.GeneratorParams(model)
        params.set_search_options(
            do_sample=False,
            batch_size=len(prompts),
            min_length=length,
            max_length=length,
            past_present_share_buffer=True,
        )
        generator = self.og.Generator(model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        return generator


def open_runner(settings: dict[str, Any]) -> Runner:
    """The model folder `model` on the CPU; `rows_model` is its variant with logits of all rows."""
    return Runner(settings)
