"""OpenVINO: `LLMPipeline` for generation, the stateful model in `openvino` itself for steps of several rows.

Only the number of threads is set: precision hints and the attention backend stay at their defaults.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

LIBRARIES = ("numpy", "openvino", "openvino_genai")
PACKAGES = ("openvino-genai", "openvino", "openvino-tokenizers", "numpy")
CACHE_GB = 1  # KV cache of the pipeline for several requests


class Runner:
    """An open OpenVINO model; two more compiled models are created when first needed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        self.ov, self.genai = openvino, openvino_genai
        self.model = settings["model"]
        self.properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
        self.pipeline = openvino_genai.LLMPipeline(self.model, "CPU", **self.properties)
        self.stateful: Any = None
        self.batching: Any = None

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        times: list[float] = []
        running = self.genai.StreamingStatus.RUNNING

        class Times(self.genai.StreamerBase):  # type: ignore[name-defined, misc]
            def write(self, token: object) -> Any:
                times.append(perf_counter())
                return running

            def end(self) -> None:
                pass

        self.pipeline.generate(self._tensor(prompt), self._plain(tokens), Times())
        return [later - earlier for earlier, later in pairwise(times)]

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        if self.stateful is None:
            model = Path(self.model) / "openvino_model.xml"
            self.stateful = self.ov.Core().compile_model(model, "CPU", self.properties).create_infer_request()
        times = []
        for _ in range(repeats):
            self.stateful.reset_state()
            warm_up = len(prompt) - len(rows)  # the last prompt tokens are a step of the same shape as the timed one
            self._feed(prompt[:warm_up], 0)
            self._feed(prompt[warm_up:], warm_up)
            before = perf_counter()
            self._feed(rows, len(prompt))
            times.append(perf_counter() - before)
        return times

    def prefill(self, prompt: list[int]) -> float:
        before = perf_counter()
        self.pipeline.generate(self._tensor(prompt), self._plain(1))
        return perf_counter() - before

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        if self.batching is None:
            scheduler = self.genai.SchedulerConfig()
            scheduler.cache_size = CACHE_GB
            self.batching = self.genai.ContinuousBatchingPipeline(self.model, scheduler, "CPU", self.properties)
        inputs = [self._tensor(prompt) for prompt in prompts]
        before = perf_counter()
        found = self.batching.generate(inputs, [self._plain(tokens)] * len(prompts))
        seconds = perf_counter() - before
        return sum(len(result.m_generation_ids[0]) for result in found), seconds

    def _feed(self, tokens: list[int], past: int) -> None:
        import numpy as np

        positions = np.arange(past, past + len(tokens), dtype=np.int64)[None]
        self.stateful.infer(
            {
                "input_ids": np.array([tokens], np.int64),
                "attention_mask": np.ones((1, past + len(tokens)), np.int64),
                "position_ids": positions,
                "beam_idx": np.zeros(1, np.int32),
            },
            share_outputs=True,
        )

    def _tensor(self, prompt: list[int]) -> Any:
        import numpy as np

        return self.ov.Tensor(np.array([prompt], np.int64))

    def _plain(self, tokens: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        return config


def open_runner(settings: dict[str, Any]) -> Runner:
    """The model folder `model` on the CPU."""
    return Runner(settings)
