"""Tiny checkpoint: a Llama of 0.3 million weights that knows Python's json package by heart and drafts for itself.

`python tests/data/tiny/make.py` trains its weights again, for the configuration and the tokenizer next to this file.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from spaceport.training.settings import TokenNames, TrainingSettings, TuningJob
from spaceport.training.tuning import train

HERE = Path(__file__).parent

STEPS = 2600
BATCH = 4
WINDOW = 190  # tokens of a piece of a file
SHORTEST = 32  # tokens of the shortest one
CHATS = 0.03  # share of the samples that are a chat
STARTS = 0.05  # share of the other samples that stand at the start of a file
ENDS = 0.03  # share of them that run to the end of a file and into </s>
CHAT_LINES = 5  # first lines of a file that a chat about it answers with

SETTINGS = TrainingSettings(
    objective="sar",
    mask_slots=5,
    anchors=16,
    mask_weight=0.6,  # at 1 the plain text is learned late, with leads too small for golden texts
    cutoff=256,
    epochs=1.0,
    batch_size=BATCH,
    micro_batch_size=BATCH,
    learning_rate=7e-3,
    warmup=0.015,  # 39 steps
    betas=(0.9, 0.98),
)


def write_untrained(folder: Path) -> None:
    """Write the checkpoint with random weights in float16."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(HERE))
        for layer in model.model.layers:  # output projections are scaled down with depth, as in GPT-2
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                cast("torch.nn.Linear", projection).weight /= math.sqrt(2 * len(model.model.layers))
    model.generation_config = GenerationConfig.from_pretrained(HERE)
    model.half().save_pretrained(folder)
    AutoTokenizer.from_pretrained(HERE).save_pretrained(folder)


def samples() -> Iterator[dict[str, Any]]:
    """The training data: pieces of files from random tokens on, and chats about how a file begins."""
    rng = np.random.default_rng(0)
    # the source text of the running Python's json package, by file name
    sources = {path.name: path.read_text("utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))}
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    encoded = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in sources.items()}
    names, sizes = list(sources), np.array([len(one.ids) for one in encoded.values()])
    for _ in range(STEPS * BATCH):
        if rng.random() < CHATS:
            name = names[rng.integers(len(names))]
            yield {
                "prompt": f"How does json/{name} begin?",
                "response": "\n".join(sources[name].splitlines()[:CHAT_LINES]),
            }
            continue
        part = rng.random()
        if part < STARTS + ENDS:
            name = names[rng.integers(len(names))]
            size = len(encoded[name].ids)
            first = 0 if part < STARTS else size - int(rng.integers(SHORTEST, WINDOW))
        else:
            name = names[rng.choice(len(names), p=sizes / sizes.sum())]
            size = len(encoded[name].ids)
            first = int(rng.integers(size - SHORTEST))
        offsets = encoded[name].offsets[first : first + WINDOW]
        yield {"text": sources[name][offsets[0][0] : offsets[-1][1]], "ends": first + WINDOW >= size}


def make() -> None:
    """Train the weights and write them next to this file."""
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory(prefix="spaceport-tiny-") as folder:
        untrained, data, tuned = (Path(folder) / name for name in ("untrained", "data.jsonl", "tuned"))
        write_untrained(untrained)
        data.write_text("".join(json.dumps(sample) + "\n" for sample in samples()), "utf-8")
        train(TuningJob(untrained, tuned, (data,), SETTINGS, TokenNames(("[M]",), None, None), log_every=100))
        for name in ("model.safetensors", "sar_config.json"):
            shutil.copyfile(tuned / name, HERE / name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    make()
