"""Tiny checkpoint: a Llama of 0.3 million weights that knows Python's json package by heart and drafts for itself.

`python tests/data/tiny/make.py` trains it, writes it next to this file and measures it;
`python tests/data/tiny/make.py measure` only measures.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

HERE = Path(__file__).parent

BOS, EOS, START, END, MASK = "<s>", "</s>", "<|start|>", "<|end|>", "[M]"
TOKENS = 628  # size of the tokenizer
ROWS = 640  # size of the model's vocabulary: the next multiple of 64, so that the two differ
MASK_SLOTS = 5

STEPS = 2600
BATCH = 4
WINDOW = 192  # tokens of a packed row before its mask groups, bos included
GROUPS = 10  # mask groups of a packed row
CHATS = 0.03  # share of the rows that are a chat
STARTS = 0.05  # share of the file rows that stand at the start of a file
ENDS = 0.03  # share of the file rows that run to the end of a file and into eos
SHORTEST = 32  # tokens of the shortest piece of a file
MASK_WEIGHT = 0.3  # of the masks' loss: at 1 the plain text is learned late, with leads too small for golden texts
PEAK_RATE = 7e-3
WARMUP = 40  # steps
CHAT_LINES = 5  # a chat about a file answers with so many of its first lines
IGNORED = -100  # a target without a loss

PROMPT_TOKENS = 48
NEW_TOKENS = 96

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start|>assistant\\n' }}
{%- endif %}
"""

FOREIGN = (
    "The old bridge over the river had been closed since the spring floods, and nobody in the village could say when "
    "it would open again. On market days the farmers took the long way round, past the mill and the three chestnut "
    "trees, and arrived an hour late with warm milk."
)


@dataclass(frozen=True)
class Corpus:
    """What the model learns: whole files, each ending in eos, and short chats, each ending in the end of a turn."""

    files: list[list[int]]
    chats: list[list[int]]


@dataclass(frozen=True)
class Rows:
    """Packed rows of a batch: real tokens first, then mask groups; every row knows its parent and so what it sees."""

    ids: Tensor  # batch x rows, int64
    positions: Tensor  # batch x rows, int64
    visible: Tensor  # batch x 1 x rows x rows, bool, True = may see
    targets: Tensor  # batch x rows, int64, IGNORED where there is no loss


@dataclass(frozen=True)
class Run:
    """One greedy continuation: its tokens, its forward passes, its smallest lead of the best token over the second."""

    tokens: list[int]
    steps: int
    lead: float


def json_sources() -> dict[str, str]:
    """The source text of the running Python's json package, by file name."""
    folder = Path(json.__file__).parent
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer over all 256 bytes that opens every text with bos."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = [BOS, EOS, START, END, MASK]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=specials,
        initial_alphabet=alphabet,
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
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str, special: bool = False) -> list[int]:
    """The token ids of a text, with bos in front if special."""
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids


def ask(tokenizer: PreTrainedTokenizerFast, name: str) -> str:
    """The chat prompt that asks how a file begins."""
    question = [{"role": "user", "content": f"How does json/{name} begin?"}]
    return cast("str", tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False))


def collect(tokenizer: PreTrainedTokenizerFast, sources: dict[str, str]) -> Corpus:
    """The sources as token ids, and one chat for every file."""
    files = [[*encode(tokenizer, text), cast("int", tokenizer.eos_token_id)] for text in sources.values()]
    heads = {name: "\n".join(text.splitlines()[:CHAT_LINES]) for name, text in sources.items()}  # by file name
    chats = [encode(tokenizer, f"{ask(tokenizer, name)}{head}{END}") for name, head in heads.items()]
    longest = max(map(len, chats))
    if longest > WINDOW:
        raise ValueError(f"the longest chat has {longest} tokens, a row holds {WINDOW}: lower CHAT_LINES")
    return Corpus(files, chats)


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model; the row of the mask token is the mean of all rows."""
    config = LlamaConfig(
        vocab_size=ROWS,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        table[tokenizer.convert_tokens_to_ids(MASK)] = table.mean(0)
    return model


def see(parents: np.ndarray) -> tuple[Tensor, Tensor]:
    """Positions and visibility from parents (batch x rows, -1 = none): a row stands one after its parent."""
    batch, rows = parents.shape
    lines = np.arange(batch)
    positions = np.zeros((batch, rows), np.int64)
    visible = np.zeros((batch, rows, rows), bool)  # True = may see
    for row in range(rows):
        above = parents[:, row]
        real = above >= 0
        positions[real, row] = positions[lines, above][real] + 1
        visible[real, row] = visible[lines, above][real]
        visible[:, row, row] = True
    return torch.from_numpy(positions), torch.from_numpy(visible)[:, None]


def window(corpus: Corpus, bos: int, dice: np.random.Generator) -> list[int]:
    """The real tokens of one packed row: a chat, or bos and a piece of a file."""
    if dice.random() < CHATS:
        return corpus.chats[dice.integers(len(corpus.chats))]
    place = dice.random()
    if place < STARTS + ENDS:
        file = corpus.files[dice.integers(len(corpus.files))]
        start = 0 if place < STARTS else len(file) - dice.integers(SHORTEST, WINDOW)
    else:
        sizes = np.array([len(file) for file in corpus.files])
        file = corpus.files[dice.choice(len(sizes), p=sizes / sizes.sum())]
        start = dice.integers(len(file) - SHORTEST)
    return [bos, *file[start : start + WINDOW - 1]]


def pack(texts: list[list[int]], mask: int, dice: np.random.Generator) -> Rows:
    """Packed rows: mask i of a group with anchor a stands in the place of token a+i and predicts token a+i+1."""
    batch, total = len(texts), WINDOW + GROUPS * MASK_SLOTS
    ids = np.full((batch, total), mask, np.int64)
    parents = np.tile(np.arange(total) - 1, (batch, 1))
    targets = np.full((batch, total), IGNORED, np.int64)
    for line, text in enumerate(texts):
        ids[line, : len(text)] = text
        targets[line, : len(text) - 1] = text[1:]
        for group in range(GROUPS):
            anchor = dice.integers(len(text) - 2)
            first = WINDOW + group * MASK_SLOTS
            parents[line, first] = anchor
            told = text[anchor + 2 : anchor + 2 + MASK_SLOTS]
            targets[line, first : first + len(told)] = told
    positions, visible = see(parents)
    return Rows(torch.from_numpy(ids), positions, visible, torch.from_numpy(targets))


def losses(model: LlamaForCausalLM, rows: Rows) -> tuple[Tensor, Tensor]:
    """The mean loss of the real tokens and the mean loss of the mask slots."""
    logits = model(input_ids=rows.ids, position_ids=rows.positions, attention_mask=rows.visible, use_cache=False).logits
    plain = torch.nn.functional.cross_entropy(logits[:, :WINDOW].flatten(0, 1), rows.targets[:, :WINDOW].flatten())
    masks = torch.nn.functional.cross_entropy(logits[:, WINDOW:].flatten(0, 1), rows.targets[:, WINDOW:].flatten())
    return plain, masks


def rate(step: int) -> float:
    """The share of the peak learning rate at a step: a linear warm-up, then a cosine to zero."""
    return min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))


def train(model: LlamaForCausalLM, corpus: Corpus, bos: int, mask: int) -> None:
    """Trains in place and prints the two losses as it goes."""
    dice = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    begin = time.perf_counter()
    for step in range(STEPS):
        plain, masks = losses(model, pack([window(corpus, bos, dice) for _ in range(BATCH)], mask, dice))
        optimizer.zero_grad()
        torch.autograd.backward(plain + MASK_WEIGHT * masks)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            seconds = time.perf_counter() - begin
            print(
                f"step {step + 1:4d}  plain loss {plain.item():.3f}  mask loss {masks.item():.3f}  {seconds:.0f} s",
                flush=True,
            )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes the checkpoint in float16 next to this file."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ends = [eos, tokenizer.convert_tokens_to_ids(END)]
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=ends, pad_token_id=eos)
    model.half().save_pretrained(HERE)
    tokenizer.save_pretrained(HERE)
    (HERE / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    sar = {"mask_tokens": [MASK], "mask_slots": MASK_SLOTS, "fork_token": None, "child_token": None}
    (HERE / "sar_config.json").write_text(json.dumps(sar, indent=2) + "\n", encoding="utf-8")


@torch.inference_mode()
def predict(model: LlamaForCausalLM, ids: list[int], parents: list[int], mask: int) -> tuple[list[int], list[float]]:
    """For every row its best token that is no mask, and the lead of that token's logit over the second."""
    positions, visible = see(np.array([parents]))
    row = torch.tensor([ids])
    logits = model(input_ids=row, position_ids=positions, attention_mask=visible, use_cache=False).logits[0]
    logits[:, mask] = -math.inf
    best = logits.topk(2)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def cut(tokens: list[int], ends: list[int]) -> tuple[list[int], bool]:
    """The tokens up to the limit and to the first end, and whether the text is over."""
    tokens = tokens[:NEW_TOKENS]
    stops = [place for place, token in enumerate(tokens) if token in ends]
    return (tokens[: stops[0] + 1], True) if stops else (tokens, len(tokens) == NEW_TOKENS)


def write_plain(model: LlamaForCausalLM, prompt: list[int], mask: int, ends: list[int]) -> Run:
    """Greedy decoding, one token for one forward pass."""
    tokens: list[int] = []
    lead, over = math.inf, False
    while not over:
        text = prompt + tokens
        best, leads = predict(model, text, list(range(-1, len(text) - 1)), mask)
        lead = min(lead, leads[-1])
        tokens, over = cut([*tokens, best[-1]], ends)
    return Run(tokens, len(tokens), lead)


def write_drafted(model: LlamaForCausalLM, prompt: list[int], mask: int, ends: list[int], mask_slots: int) -> Run:
    """Greedy decoding that feeds text | masks | candidate | masks | ..., emits what it agrees with, and one more."""
    tokens: list[int] = []
    candidates: list[int] = []
    steps, lead, over = 0, math.inf, False
    while not over:
        ids = prompt + tokens
        parents = list(range(-1, len(ids) - 1))
        anchors = [len(ids) - 1]
        for after in range(len(candidates) + 1):
            parents += [anchors[after], *range(len(ids), len(ids) + mask_slots - 1)]
            ids = ids + [mask] * mask_slots
            if after < len(candidates):
                parents.append(anchors[after])
                anchors.append(len(ids))
                ids.append(candidates[after])
        best, leads = predict(model, ids, parents, mask)
        accepted = 0
        while accepted < len(candidates) and candidates[accepted] == best[anchors[accepted]]:
            accepted += 1
        last = anchors[accepted]
        lead = min(lead, *(leads[row] for row in anchors[: accepted + 1]))
        tokens, over = cut([*tokens, *candidates[:accepted], best[last]], ends)
        candidates = best[last + 1 : last + 1 + mask_slots]
        steps += 1
    return Run(tokens, steps, lead)


def prompts(tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    """The token ids to continue, by name: own text, the two ends of a text, foreign text."""
    texts = {name: encode(tokenizer, text) for name, text in json_sources().items()}
    bos = cast("int", tokenizer.bos_token_id)
    middle = len(texts["decoder.py"]) // 2
    own = {
        "begin of json/decoder.py": texts["decoder.py"][: PROMPT_TOKENS - 1],
        "begin of json/encoder.py": texts["encoder.py"][: PROMPT_TOKENS - 1],
        "begin of json/__init__.py": texts["__init__.py"][: PROMPT_TOKENS - 1],
        "middle of json/decoder.py": texts["decoder.py"][middle : middle + PROMPT_TOKENS],
        "end of json/scanner.py": texts["scanner.py"][-2 * PROMPT_TOKENS : -PROMPT_TOKENS],
    }
    return {name: [bos, *ids] for name, ids in own.items()} | {
        "chat on json/scanner.py": encode(tokenizer, ask(tokenizer, "scanner.py")),
        "English": encode(tokenizer, FOREIGN, True)[:PROMPT_TOKENS],
    }


def measure() -> None:
    """Prints tokens per forward pass of the saved checkpoint, in float32, and refuses a draft that changes a text."""
    tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(HERE))
    model = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32).eval()
    mask, ends = cast("int", tokenizer.convert_tokens_to_ids(MASK)), model.generation_config.eos_token_id
    print("| prompt | tokens | k = 1 | k = 3 | k = 5 | smallest lead |\n|---|---|---|---|---|---|")
    for name, prompt in prompts(tokenizer).items():
        plain = write_plain(model, prompt, mask, ends)
        drafted = [write_drafted(model, prompt, mask, ends, mask_slots) for mask_slots in (1, 3, 5)]
        if any(run.tokens != plain.tokens for run in drafted):
            got = [run.tokens for run in drafted]
            raise AssertionError(f"{name}: the drafts wrote {got}, plain decoding {plain.tokens}")
        cells = [f"{len(run.tokens) / run.steps:.2f}" for run in drafted]
        print(f"| {name} | {len(plain.tokens)} | {' | '.join(cells)} | {plain.lead:.2f} |", flush=True)


def make() -> None:
    """Trains and writes the checkpoint."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    sources = json_sources()
    tokenizer = train_tokenizer([*sources.values(), FOREIGN, *map(chr, range(32, 127))])
    corpus = collect(tokenizer, sources)
    model = new_model(tokenizer)
    weights, tokens = sum(weight.numel() for weight in model.parameters()), sum(map(len, corpus.files))
    print(f"{weights} weights, {ROWS} rows for {len(tokenizer)} tokens, a text of {tokens} tokens")
    train(model, corpus, cast("int", tokenizer.bos_token_id), cast("int", tokenizer.convert_tokens_to_ids(MASK)))
    save(model, tokenizer)


def main() -> int:
    """Trains and measures, or only measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", nargs="?", choices=["make", "measure"], default="make")
    verb = parser.parse_args().verb
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if verb == "make":
        make()
    measure()
    return 0


if __name__ == "__main__":
    sys.exit(main())
