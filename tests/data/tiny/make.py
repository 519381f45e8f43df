"""Tiny checkpoint: a Llama of 0.3 million weights that knows Python's json package by heart and drafts for itself.

`python tests/data/tiny/make.py` trains it and writes it next to this file.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spaceport.training.settings import TokenNames, TrainingSettings, TuningJob
from spaceport.training.tuning import train

HERE = Path(__file__).parent
KEPT = ("*.json", "*.jinja", "*.safetensors")  # files of the trained checkpoint that stand next to this one

MASK = "[M]"
TOKENS = 628
HIDDEN, LAYERS = 96, 3
LONGEST_TEXT = 1024  # tokens
BOS, EOS, START, END = "<s>", "</s>", "<|start|>", "<|end|>"
_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start|>assistant\\n' }}
{%- endif %}
"""

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


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that starts every text with bos and knows the mask token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=[BOS, EOS, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    bos = [(BOS, core.token_to_id(BOS))]
    opening = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=bos)
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), opening])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=[START, END, MASK],
        chat_template=_TEMPLATE,
        model_max_length=LONGEST_TEXT,
        clean_up_tokenization_spaces=False,
    )


def write_untrained(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a Llama with random weights in float16, and its tokenizer."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=640,  # for 628 tokens: the two differ
        hidden_size=HIDDEN,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=HIDDEN // 6,
        max_position_embeddings=LONGEST_TEXT,
        initializer_range=0.05,  # at 0.02 a model this narrow learns late
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:  # output projections are scaled down with depth, as in GPT-2
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                cast("torch.nn.Linear", projection).weight /= math.sqrt(2 * LAYERS)
    ends = [eos, tokenizer.convert_tokens_to_ids(END)]
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=ends, pad_token_id=eos)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
    tokenizer = train_tokenizer([*sources.values(), FOREIGN, *map(chr, range(32, 127))])
    with tempfile.TemporaryDirectory(prefix="spaceport-tiny-") as folder:
        untrained, data, tuned = (Path(folder) / name for name in ("untrained", "data.jsonl", "tuned"))
        write_untrained(untrained, tokenizer)
        data.write_text("".join(json.dumps(sample) + "\n" for sample in samples(tokenizer, sources)), "utf-8")
        train(TuningJob(untrained, tuned, (data,), SETTINGS, TokenNames((MASK,), None, None), log_every=100))
        for pattern in KEPT:
            for file in tuned.glob(pattern):
                shutil.copyfile(file, HERE / file.name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    make()
