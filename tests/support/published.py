"""Published: tiny checkpoints and adapters in the layouts in which methods publish theirs, some of which predict exactly.

In an exact one, the token at a position is given by the position: PERIOD tokens in turn. An ordinary row predicts the next
token from its own token and its position alike. The row of any other token predicts wrongly, until an adapter removes what
it reads from the token; then the position is left. So a wrong scale, gate, shift or position costs all drafts.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
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
