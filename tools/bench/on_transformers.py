"""Plain decoding with transformers, beside which steps are compared: a static cache, without and with torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StaticCache

from spaceport.graphs.attention import cache_argument
from spaceport.graphs.contract.signature import Precision

_WARM_UP = 4  # steps: torch.compile compiles and captures in the first ones


def decoding_times(config: Path, dtype: Precision, context: int, steps: int) -> Iterator[tuple[str, float]]:
    """Milliseconds per token of a random model behind a prompt, by the way in which it runs: on a GPU also compiled."""
    gpu = torch.cuda.is_available()
    with torch.device("cuda" if gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=getattr(torch, dtype)).eval()
    yield "static cache", _milliseconds(model, model, context, steps)
    if gpu:
        run = torch.compile(model, mode="reduce-overhead")  # with CUDA graphs
        yield "static cache, torch.compile", _milliseconds(model, run, context, steps)


@torch.inference_mode()
def _milliseconds(model: PreTrainedModel, run: Callable[..., Any], context: int, steps: int) -> float:
    """The time of a step of `run`, after a prompt that the model itself computes."""
    cache = StaticCache(config=model.config, max_cache_len=context + steps + _WARM_UP)
    argument = cache_argument(model, cache)
    ids = torch.randint(10, model.config.vocab_size, (1, context), device=model.device)
    token = model(ids, **argument, use_cache=True).logits[:, -1:].argmax(-1)
    started = 0.0
    for number in range(-_WARM_UP, steps):
        if number == 0:
            token.cpu()  # waits for the steps before
            started = perf_counter()
        # a copy: the next call of a compiled model reuses the memory of its outputs
        token = run(token.clone(), **argument, use_cache=True).logits[:, -1:].argmax(-1)
    token.cpu()
    return (perf_counter() - started) / steps * 1e3
