"""Transformers: the model's forward with a `DynamicCache`; concurrent requests as one batch of `generate`."""

from __future__ import annotations

from time import perf_counter
from typing import Any

LIBRARIES = ("numpy", "torch", "transformers")
PACKAGES = ("transformers", "torch", "numpy")


class Runner:
    """An open checkpoint in PyTorch, with scaled dot product attention."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        dtype = getattr(torch, settings.get("dtype", "float32"))
        self.torch, self.transformers = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=dtype, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self.model.requires_grad_(False)

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        cache, token = self._read(prompt)
        times = []
        for _ in range(tokens - 1):
            before = perf_counter()
            token = self._feed([token], cache)
            times.append(perf_counter() - before)
        return times

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        cache, _ = self._read(prompt)
        times = []
        for _ in range(repeats + 1):
            before = perf_counter()
            self._feed(rows, cache)
            times.append(perf_counter() - before)
            cache.crop(-len(rows))
        return times[1:]

    def prefill(self, prompt: list[int]) -> float:
        before = perf_counter()
        self._read(prompt)
        return perf_counter() - before

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        inputs = self.torch.tensor(prompts)
        mask = self.torch.ones_like(inputs)
        before = perf_counter()
        found = self.model.generate(
            inputs, attention_mask=mask, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0
        )
        return int(found.shape[0] * (found.shape[1] - inputs.shape[1])), perf_counter() - before

    def answer(self, prompt: list[int], tokens: int, ends: list[int], lookup: int) -> dict[str, Any]:
        inputs = self.torch.tensor([prompt])
        times = StepTimes()
        before = perf_counter()
        found = self.model.generate(
            inputs,
            attention_mask=self.torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=ends or None,
            pad_token_id=0,
            streamer=times,
            **({"prompt_lookup_num_tokens": lookup} if lookup else {}),
        )
        seconds = perf_counter() - before
        (_, (first_tokens, first), *_) = times.steps  # after the prompt
        return {
            "tokens": found[0, len(prompt) :].tolist(),
            "first_tokens": first_tokens,
            "first_token_seconds": first - before,
            "seconds": seconds,
        }

    def _read(self, prompt: list[int]) -> tuple[Any, int]:
        cache = self.transformers.DynamicCache(config=self.model.config)
        inputs = self.torch.tensor([prompt])
        logits = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return cache, int(logits[0, -1].argmax())

    def _feed(self, tokens: list[int], cache: Any) -> int:
        inputs = self.torch.tensor([tokens])
        return int(self.model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[0, -1].argmax())


class StepTimes:
    """A streamer that records the number of tokens and the time of each step, the prompt included."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []

    def put(self, tokens: Any) -> None:
        self.steps.append((tokens.numel(), perf_counter()))

    def end(self) -> None:
        """Nothing follows."""


def open_runner(settings: dict[str, Any]) -> Runner:
    """The checkpoint `model` on the CPU, in float32 or in `dtype`."""
    return Runner(settings)
