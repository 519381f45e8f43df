"""Published: tiny checkpoints, adapters and heads in the layouts in which methods publish theirs, some of which predict exactly.

In an exact one, the token at a position is given by the position: PERIOD tokens in turn. An ordinary row predicts the next
token from its own token and its position alike. The row of any other token predicts wrongly, until an adapter removes what
it reads from the token; then the position is left. So a wrong scale, gate, shift or position costs all drafts.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel

from spaceport.graphs.contract.draft_methods import MaskLayout
from support.gguf_files import random_model
from support.paths import TINY

PERIOD = 8
FIRST = 40  # id of the first of the PERIOD tokens that are the text of an exact model
VOCAB = 628  # tokens of the tiny tokenizer
PADDED = 640  # rows of the embedding tables
MASK = VOCAB  # a row that no token of the tokenizer has, as in published checkpoints
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

# FasterDecoding's medusa_lm_head.pt for Vicuna is a pickled dictionary with the names below, beside a config.json that names
# 2 heads although the file has 5.
BASE = "lmsys/vicuna-7b-v1.3"
SLOTS, RANK = 3, 16  # of the published models

_CONTENT, _POSITION = 6.0, 3.0  # the token counts for more, so that a wrong one is predicted from
_HIDDEN, _INNER = 32, 16
_MISREAD = (6.0, -6.0)  # what mask rows of a wrong group read instead of a token
_FLAG, _KEY = 6.0, 8.0


def text(start: int, count: int) -> list[int]:
    """The tokens of an exact model at these positions."""
    return [FIRST + position % PERIOD for position in range(start, start + count)]


def write_checkpoint(folder: Path, model: PreTrainedModel, **entries: Any) -> Path:
    """A checkpoint folder with the tiny tokenizer; the entries are added to config.json."""
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copyfile(TINY / name, folder / name)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **entries}), "utf-8")
    return folder


def exact_model(wrong_mask: bool = False, shift: bool = True) -> PreTrainedModel:
    """A model whose text is given by the position; MASK reads as no token, or as a token whose row predicts wrongly.

    A row whose token says nothing predicts from its position: the token after it, or without shift the one at it.
    """
    config = OPTConfig(
        vocab_size=PADDED,
        hidden_size=_HIDDEN,
        word_embed_proj_dim=_HIDDEN,
        ffn_dim=_INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    model: Any = OPTForCausalLM(config).eval()
    decoder, layer = model.model.decoder, model.model.decoder.layers[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_norm" not in name:
                parameter.zero_()
        for token in range(config.vocab_size):
            decoder.embed_tokens.weight[token, (token - FIRST + 1) % PERIOD] = _CONTENT
        decoder.embed_tokens.weight[MASK] = decoder.embed_tokens.weight[FIRST - 1] if wrong_mask else 0.0
        for position in range(256):
            decoder.embed_positions.weight[position + 2, PERIOD + (position + shift) % PERIOD] = _POSITION
        for offset in range(PERIOD):
            model.lm_head.weight[FIRST + offset, [offset, PERIOD + offset]] = 1.0
        layer.fc1.bias[0] = 1.0  # inner unit 0 is 1 on every row, 1 to PERIOD are what the row reads from its token
        layer.fc1.weight[range(1, PERIOD + 1), range(PERIOD)] = 1.0
    return model  # type: ignore[no-any-return]


def layout_model(layout: MaskLayout, mask_slots: int) -> tuple[PreTrainedModel, list[int]]:
    """An exact model with these mask rows, and their tokens, one for each row of a group.

    The last mask token of a group has a key that all rows look for, and a value: in a block it removes what the other mask
    rows wrongly read, otherwise it adds that. So rows that see other mask rows than they should predict wrongly.
    """
    model: Any = exact_model(shift=layout.shift)
    masks = [MASK + row for row in range(layout.rows(mask_slots))]
    decoder, attention = model.model.decoder, model.model.decoder.layers[0].self_attn
    read = torch.tensor(_MISREAD)
    flag = 2 * PERIOD
    with torch.no_grad():
        for token in masks:
            decoder.embed_tokens.weight[token] = 0.0
            decoder.embed_tokens.weight[token, : len(read)] = read if layout.group == "block" else 0.0
        decoder.embed_tokens.weight[masks[-1], : len(read)] = read if layout.group == "block" else -read
        decoder.embed_tokens.weight[masks[-1], flag] = _FLAG
        attention.q_proj.bias[0] = _KEY
        attention.k_proj.weight[0, flag] = _KEY
        attention.v_proj.weight[0, flag] = 1.0
        for token in (FIRST, masks[0]):  # what rows without the flag read there, which their values must not have
            row = decoder.embed_tokens.weight[token] + decoder.embed_positions.weight[2]
            attention.v_proj.bias[0] = -torch.nn.functional.layer_norm(row, (_HIDDEN,))[flag]
        last = decoder.embed_tokens.weight[masks[-1]] + decoder.embed_positions.weight[2]
        value = torch.nn.functional.layer_norm(last, (_HIDDEN,))[flag] + attention.v_proj.bias[0]
        attention.out_proj.weight[: len(read), 0] = (-read if layout.group == "block" else read) / value
    return model, masks


def write_exact_adapter(folder: Path, base: PreTrainedModel, **options: Any) -> Path:
    """An adapter on fc2 that removes what a row reads from its token."""
    adapted: Any = _adapted(base, LoraConfig(target_modules=["fc2"], task_type="CAUSAL_LM", **options))
    (layer,) = (one for name, one in adapted.named_modules() if name.endswith("fc2"))
    a, b, scale = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"]
    row = torch.zeros(_HIDDEN)
    row[0], row[PERIOD] = _CONTENT, _POSITION
    read = float(torch.nn.functional.layer_norm(row, (_HIDDEN,))[0])  # value of an inner unit for the row's token
    with torch.no_grad():
        a.zero_()
        b.zero_()
        a[range(PERIOD), range(1, PERIOD + 1)] = 1.0
        b[range(PERIOD), range(PERIOD)] = -_CONTENT / read / scale
    adapted.save_pretrained(folder)
    return folder


def random_base() -> PreTrainedModel:
    """A random model of two layers, with embedding rows beyond those of the tokenizer."""
    model = random_model("qwen3")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model.resize_token_embeddings(PADDED)
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name or "lm_head" in name:
                torch.nn.init.normal_(parameter)  # so large that every token matters
    return model


def random_adapter(base: PreTrainedModel, **options: Any) -> PeftModel:
    """A random adapter of peft around a copy of a model, large enough to change every row much."""
    adapted: Any = _adapted(base, LoraConfig(task_type="CAUSAL_LM", **options))
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(adapted.named_parameters()):
            if "lora_" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=dice))
    return adapted.eval()  # type: ignore[no-any-return]


def reference_logits(adapted: PeftModel, ids: Tensor, masks: Tensor) -> Tensor:
    """Logits of peft's own forward pass in which the adapters act on mask rows only, as UNO's training routes them."""
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: output * masks[..., None])
        for name, module in adapted.named_modules()
        if name.endswith("lora_A.default")
    ]
    with torch.no_grad():
        logits: Tensor = adapted(ids).logits
    for hook in hooks:
        hook.remove()
    return logits


def _adapted(base: PreTrainedModel, config: LoraConfig) -> Any:
    with warnings.catch_warnings():  # peft uses a deprecated transformers attribute
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(copy.deepcopy(base), config)


def exact_heads(model: PreTrainedModel, count: int) -> dict[str, Tensor]:
    """Heads that predict the text of an exact model.

    The first block of a head doubles each positive number: x + silu(W x) is about 2 x where W x is large.
    """
    output = model.get_output_embeddings().weight.detach()
    hidden = output.shape[1]
    found: dict[str, Tensor] = {}
    for head in range(count):
        rows = torch.zeros_like(output)
        for index in range(PERIOD):
            rows[FIRST + (index + 1 + head) % PERIOD] = output[FIRST + index]
        found[f"{head}.0.linear.weight"] = torch.eye(hidden)
        found[f"{head}.0.linear.bias"] = torch.full((hidden,), 0.5)
        found[f"{head}.1.weight"] = rows
    return found


def random_heads(count: int, blocks: int, hidden: int, vocab: int) -> dict[str, Tensor]:
    """Heads with random numbers, large enough that each block matters."""
    dice = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for head in range(count):
        for block in range(blocks):
            found[f"{head}.{block}.linear.weight"] = torch.randn(hidden, hidden, generator=dice) / hidden**0.5
            found[f"{head}.{block}.linear.bias"] = 0.5 * torch.randn(hidden, generator=dice)
        found[f"{head}.{blocks}.weight"] = torch.randn(vocab, hidden, generator=dice)
    return found


def write_published_heads(folder: Path, tensors: Mapping[str, Tensor], suffix: str = ".pt", **config: object) -> Path:
    """A folder with heads; the entries are added to config.json."""
    folder.mkdir(parents=True)
    file = folder / f"medusa_lm_head{suffix}"
    if suffix == ".pt":
        torch.save(dict(tensors), file)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    entries = {"base_model_name_or_path": BASE, "medusa_num_heads": 2, "medusa_num_layers": 1, **config}
    (folder / "config.json").write_text(json.dumps(entries), "utf-8")
    return folder


def reference_lines(tensors: Mapping[str, Tensor], hidden: Tensor, count: int, blocks: int) -> list[Tensor]:
    """The logits of each head, by the formula of the paper (arXiv 2401.10774), extended to several blocks."""
    found = []
    for head in range(count):
        x = hidden
        for block in range(blocks):
            y = x @ tensors[f"{head}.{block}.linear.weight"].T + tensors[f"{head}.{block}.linear.bias"]
            x = x + y / (1 + torch.exp(-y))
        found.append(x @ tensors[f"{head}.{blocks}.weight"].T)
    return found


@dataclass(frozen=True)
class PublishedModel:
    """A base model, published weights for it, and the options with which they are adopted."""

    base: Path
    weights: Path | None  # None: the base model has all that is needed
    options: tuple[str, ...] = ("--max-mask-slots", str(SLOTS))


def wrong_base(folder: Path) -> Path:
    """A base model whose mask token predicts wrongly without an adapter."""
    base = folder / "base"
    return base if base.exists() else write_checkpoint(base, exact_model(wrong_mask=True))


def pard(folder: Path) -> PublishedModel:
    """A checkpoint as amd/PARD-Qwen3-0.6B: the whole model, and pard_token in config.json."""
    return PublishedModel(write_checkpoint(folder / "pard", exact_model(), pard_token=MASK), None)


def gated_lora(folder: Path) -> PublishedModel:
    """LoRA of peft on a plain base model, with the mask token in a config.json beside it."""
    adapter = write_exact_adapter(folder / "lora", exact_model(wrong_mask=True), r=RANK, lora_alpha=2 * RANK)
    (adapter / "config.json").write_text(json.dumps({"block_size": 3, "mask_token_id": MASK}))
    return PublishedModel(wrong_base(folder), adapter)


def uno(folder: Path) -> PublishedModel:
    """An adapter as s-sahoo/uno-qwen3-8B: in the folder `adapter`, below a config.json with uniform noise."""
    adapter = folder / "uno" / "adapter"
    write_exact_adapter(adapter, exact_model(wrong_mask=True), r=RANK, lora_alpha=24, use_rslora=True)
    (folder / "uno" / "config.json").write_text(json.dumps({"noise": "uniform", "mask_token_id": 300}))
    return PublishedModel(wrong_base(folder), adapter)


def medusa(folder: Path) -> PublishedModel:
    """Heads as FasterDecoding/medusa-vicuna-7b-v1.3: a file of torch beside a config.json."""
    heads = write_published_heads(folder / "medusa", exact_heads(exact_model(), SLOTS))
    return PublishedModel(wrong_base(folder), heads)


METHODS: dict[str, Callable[[Path], PublishedModel]] = {
    "pard": pard,
    "gated-lora": gated_lora,
    "uno": uno,
    "medusa": medusa,
}


def exact_data(file: Path) -> Path:
    """Two texts that the exact models continue: the token at each position is the one that they predict there."""
    whole = "EFGHIJKD" * 6  # behind the first token, which the tokenizer adds
    file.write_text("".join(json.dumps({"text": whole[:length]}) + "\n" for length in (48, 43)), "utf-8")
    return file
