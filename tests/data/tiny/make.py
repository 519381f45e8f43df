"""Tiny checkpoint: a Llama of 0.3 million weights that knows Python's json package by heart and drafts for itself.

`python tests/data/tiny/make.py` trains it and writes it next to this file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from recipes.untrained import train_tokenizer, write_untrained
from spaceport.training.job import TuningJob
from spaceport.training.settings import TokenNames, TrainingSettings
from spaceport.training.tuning import train

HERE = Path(__file__).parent
KEPT = ("*.json", "*.jinja", "*.safetensors")  # files of the trained checkpoint that stand next to this one

MASK = "[M]"
TOKENS = 628
SHAPE = {"rows": 640, "hidden": 96, "intermediate": 192, "layers": 3}  # 640 rows for 628 tokens: the two differ

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

FOREIGN = (
    "The old bridge over the river had been closed since the spring floods, and nobody in the village could say when "
    "it would open again. On market days the farmers took the long way round, past the mill and the three chestnut "
    "trees, and arrived an hour late with warm milk."
)


def json_sources() -> dict[str, str]:
    """The source text of the running Python's json package, by file name."""
    folder = Path(json.__file__).parent
    return {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.py"))}


def tokenizer_for(sources: dict[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer that knows the mask token; numbers stay whole."""
    texts = [*sources.values(), FOREIGN, *map(chr, range(32, 127))]
    return train_tokenizer(texts, TOKENS, added=(MASK,), split=())


def samples(tokenizer: PreTrainedTokenizerFast, sources: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The training data: pieces of files from random tokens on, and chats about how a file begins."""
    rng = np.random.default_rng(0)
    encoded = {
        name: tokenizer.backend_tokenizer.encode(text, add_special_tokens=False) for name, text in sources.items()
    }
    names, sizes = list(sources), np.array([len(one.ids) for one in encoded.values()])
    for _ in range(STEPS * BATCH):
        if rng.random() < CHATS:
            name = names[rng.integers(len(names))]
            yield {"prompt": question(name), "response": "\n".join(sources[name].splitlines()[:CHAT_LINES])}
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


def question(name: str) -> str:
    """What a chat asks about a file."""
    return f"How does json/{name} begin?"


def make() -> None:
    """Train the checkpoint and write it next to this file."""
    torch.use_deterministic_algorithms(True)
    sources = json_sources()
    tokenizer = tokenizer_for(sources)
    with tempfile.TemporaryDirectory(prefix="spaceport-tiny-") as folder:
        untrained, data, tuned = (Path(folder) / name for name in ("untrained", "data.jsonl", "tuned"))
        write_untrained(untrained, tokenizer, **SHAPE)
        data.write_text("".join(json.dumps(sample) + "\n" for sample in samples(tokenizer, sources)), "utf-8")
        train(TuningJob(untrained, tuned, (data,), SETTINGS, TokenNames((MASK,), None, None), log_every=100))
        for pattern in KEPT:
            for file in tuned.glob(pattern):
                shutil.copyfile(file, HERE / file.name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    make()
