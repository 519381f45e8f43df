"""Adapters: LoRA of peft that acts on mask rows only, as UNO publishes it."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.exporter.checkpoint import DEFAULT_MASK_SLOTS, Checkpoint, load_tokenizer
from spaceport.exporter.checkpoint_files import CopiedEmbeddings, is_id, read_json
from spaceport.exporter.draft_files import read_tensors, tensor_shapes
from spaceport.graphs.contract.draft_methods import MAX_MASK_SLOTS
from spaceport.graphs.contract.faults import CheckpointError, InputFault
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.graphs.gated import MaskAdapter, adapter_state, gate_model
from spaceport.graphs.mechanism import Shapes, shapes_of
from spaceport.graphs.traits import different_names
from spaceport.tools.adopt.plan import PEFT_FILE, AdoptionPlan, Given, Method, PublishedWeights, check_slots

WEIGHTS_FILE = "adapter_model.safetensors"

# Entries that determine which modules have an adapter, and how its output is scaled.
_USED = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
)
# Entries without effect on the result.
_NOTES = (
    *("peft_type", "task_type", "inference_mode", "auto_mapping", "base_model_name_or_path", "revision"),
    *("peft_version", "lora_dropout", "init_lora_weights", "runtime_config", "loftq_config"),
    *("megatron_config", "megatron_core"),
)
_REASONS = {
    "use_dora": "DoRA scales the base weights, also for other rows",
    "fan_in_fan_out": "its weights are transposed, as in Conv1D modules, which cannot have gated adapters",
    "bias": "trained biases would act on all rows",
    "modules_to_save": "whole modules would act on all rows",
    "lora_bias": "a gated adapter has no bias",
    "trainable_token_indices": "trained embeddings are not taken over",
    "layer_replication": "the model would have other layers than its base",
    "target_parameters": "only linear modules can have gated adapters",
    "alora_invocation_tokens": "it is active after an invocation, not on mask rows",
}
# Initializations that leave the base weights as they are; the others subtract the initial adapter from them.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_FROZEN_BASE = "expected a LoRA adapter that was trained on frozen base weights"


def read_peft_config(folder: Path) -> tuple[LoraConfig, str | None]:
    """The LoRA configuration of an adapter folder, and the name of its base model; raises for what cannot be gated."""
    _require_weights(folder)
    file = folder / PEFT_FILE
    entries = read_json(file)
    kind = entries.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {kind!r}: expected LORA, which can act on mask rows only")
    _refuse_others(file, entries)
    _check_values(file, entries)
    base = entries.get("base_model_name_or_path")
    chosen: dict[str, Any] = {name: entries[name] for name in _USED if entries.get(name) is not None}
    try:
        config = LoraConfig(**chosen, init_lora_weights=False)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(f"{file}: peft refuses it: {reason}: copy the adapter folder again") from error
    return config, base if isinstance(base, str) else None


def _require_weights(folder: Path) -> None:
    if not (folder / PEFT_FILE).is_file():
        raise CheckpointError(f"{folder}: no {PEFT_FILE} in it: expected an adapter folder as peft writes it")
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = any(folder.glob("adapter_model*.bin"))
        found = "its weights are pickles, which can run code when opened" if pickled else f"no {WEIGHTS_FILE} in it"
        raise CheckpointError(
            f"{folder}: {found}: expected {WEIGHTS_FILE}; save the adapter again with save_pretrained"
        )


def _refuse_others(file: Path, entries: Mapping[str, Any]) -> None:
    """Raise for an entry that changes more than the output of linear modules on mask rows."""
    usual = vars(LoraConfig())
    known = {each.name for each in fields(LoraConfig)}
    for name, value in entries.items():
        if name in (*_USED, *_NOTES) or value in (None, False, [], {}) or value == usual.get(name):
            continue
        reason = _REASONS.get(name, "it is not known how" if name not in known else "gated adapters cannot have it")
        raise CheckpointError(f"{file}: {name} is {value!r}, which is not supported: {reason}; {_FROZEN_BASE}")
    start = entries.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{file}: init_lora_weights is {start!r}, which is not supported: it changes the base weights; {_FROZEN_BASE}, or one "
            "that peft converted to plain LoRA (path_initial_model_for_weight_conversion)"
        )


def _check_values(file: Path, entries: Mapping[str, Any]) -> None:
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(entries.get(name) or {}, dict):
            raise CheckpointError(f"{file}: {name} is {entries[name]!r}: expected an object with names of modules")
    ranks = {"r": entries.get("r"), **(entries.get("rank_pattern") or {})}
    for name, rank in ranks.items():
        if not is_whole(rank, 1):
            raise CheckpointError(f"{file}: rank {name} is {rank!r}: expected a whole number of at least 1")
    alphas = {"lora_alpha": entries.get("lora_alpha"), **(entries.get("alpha_pattern") or {})}
    for name, alpha in alphas.items():
        number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
        if not number or not 0 < alpha < float("inf"):
            raise CheckpointError(f"{file}: {name} is {alpha!r}: expected a number above 0")
    if not entries.get("target_modules"):
        raise CheckpointError(f"{file}: target_modules is {entries.get('target_modules')!r}: expected names of modules")


_PREFIX = "base_model.model."  # peft's wrapper around a model
_NAME = "default"
_HALVES = {"A": "lora_A", "B": "lora_B"}
_ADVICE = "copy the adapter folder again"


@dataclass(frozen=True)
class LoraModule:
    """A low-rank adapter of one linear module, as its file has it."""

    rank: int
    scale: float  # of the product of B and A


def read_peft_adapter(folder: Path, checkpoint: Checkpoint, mask_ids: tuple[int, ...]) -> PublishedWeights:
    """The adapter in a folder, checked against the configuration of its base model; no weights are loaded."""
    config, base = read_peft_config(folder)
    modules = _modules(folder, config, checkpoint)
    rank = max(module.rank for module in modules.values())
    different = {module.scale for module in modules.values()}
    scale = different.pop() if len(different) == 1 else 1.0  # different ones are multiplied into B
    model = _empty_model(checkpoint)
    try:
        adapter = gate_model(model, mask_ids, rank, scale * rank, tuple(modules))
    except InputFault as error:
        raise CheckpointError(f"{folder}: {error}; an adapter on other modules cannot act on mask rows only") from error
    _check_shapes(folder, checkpoint, modules, shapes_of(adapter_state(model)), base)
    scales = {"scales": sorted({module.scale for module in modules.values()})}
    report = {"folder": str(folder), "named_base": base, "modules": len(modules), **adapter.entry, **scales}
    adapter_of = partial(_adapter_tensors, folder, modules, adapter)
    return PublishedWeights("adapter", folder, report, lambda: replace(adapter, tensors=adapter_of()))


def _adapter_tensors(folder: Path, modules: Mapping[str, LoraModule], adapter: MaskAdapter) -> dict[str, Tensor]:
    """A and B of each module with one rank and one scale, in the narrowest type that holds them exactly."""
    stored = read_tensors(folder / WEIGHTS_FILE, _ADVICE)
    rank, scale = adapter.rank, adapter.alpha / adapter.rank
    found: dict[str, Tensor] = {}
    types = set()
    for name, module in modules.items():
        a, b = (stored[_tensor(name, half)] for half in _HALVES)
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise CheckpointError(f"{folder / WEIGHTS_FILE}: {name} has numbers that are not finite; {_ADVICE}")
        types |= {a.dtype, b.dtype}
        missing = rank - module.rank  # rows and columns of zeros: the product is the same
        found[f"{name}.A"] = torch.nn.functional.pad(a.float(), (0, 0, 0, missing))
        factor = 1.0 if len({other.scale for other in modules.values()}) == 1 else module.scale / scale
        found[f"{name}.B"] = torch.nn.functional.pad(b.float(), (0, missing)) * factor
    own = types.pop() if len(types) == 1 else torch.float32
    exact = all(torch.equal(tensor.to(own).float(), tensor) for tensor in found.values())
    return {name: tensor.to(own if exact else torch.float32) for name, tensor in found.items()}


def _modules(folder: Path, config: LoraConfig, checkpoint: Checkpoint) -> dict[str, LoraModule]:
    """The modules that peft itself gives an adapter to, with their ranks and scales."""
    model = _empty_model(checkpoint)
    names = [name for name, _ in model.named_modules()]
    targets = config.target_modules
    listed = () if isinstance(targets, str) else targets or ()
    absent = sorted(one for one in listed if not any(name == one or name.endswith(f".{one}") for name in names))
    if absent:
        raise CheckpointError(_wrong_base(folder, checkpoint, f"has no module {absent[0]}, which target_modules names"))
    try:
        with warnings.catch_warnings():  # about weights of the base model that are tied
            warnings.simplefilter("ignore")
            adapted: Any = inject_adapter_in_model(config, model, _NAME, low_cpu_mem_usage=True)
    except (ValueError, TypeError, NotImplementedError, re.error) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise CheckpointError(_wrong_base(folder, checkpoint, f"cannot have this adapter: {reason}")) from error
    return {
        name: LoraModule(layer.r[_NAME], float(layer.scaling[_NAME]))
        for name, layer in adapted.named_modules()
        if isinstance(layer, LoraLayer)
    }


def _check_shapes(
    folder: Path,
    checkpoint: Checkpoint,
    modules: Mapping[str, LoraModule],
    padded: Shapes,
    base: str | None,
) -> None:
    """Raise unless the file has exactly the tensors of these modules; reads only its header."""
    file = folder / WEIGHTS_FILE
    found = tensor_shapes(file, "copy the file again")
    expected: dict[str, tuple[int, ...]] = {}
    for name, module in modules.items():
        expected[_tensor(name, "A")] = (module.rank, padded[f"{name}.A"][1])
        expected[_tensor(name, "B")] = (padded[f"{name}.B"][0], module.rank)
    if wrong := different_names(found.keys(), expected.keys()):
        raise CheckpointError(
            f"{file}: {wrong}: expected exactly A and B of the {len(modules)} modules that adapter_config.json selects in "
            f"{checkpoint.folder}; {_ADVICE}, or give its base model{_called(base)}"
        )
    for name, shape in found.items():
        if shape != expected[name]:
            rank = 0 if ".lora_A." in name else 1
            if len(shape) == 2 and shape[1 - rank] == expected[name][1 - rank]:
                advice = f"the rank in adapter_config.json is {expected[name][rank]}: {_ADVICE}"
            else:
                advice = f"the sizes are those of {checkpoint.folder}: give the adapter's base model{_called(base)}"
            raise CheckpointError(f"{file}: {name} has shape {shape}: expected {expected[name]}; {advice}")


def _tensor(module: str, half: str) -> str:
    """The name of a tensor in the file of an adapter."""
    return f"{_PREFIX}{module}.{_HALVES[half]}.weight"


def _called(base: str | None) -> str:
    return "" if base is None else f", which it calls {base}"


def _wrong_base(folder: Path, checkpoint: Checkpoint, reason: str) -> str:
    return f"{folder}: its base model {checkpoint.folder} {reason}: expected the base model that the adapter was trained on"


def _empty_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(checkpoint.config), attn_implementation="eager", trust_remote_code=checkpoint.remote_code
        )
    return model


def _recognize_gated(given: Given) -> str | None:
    if given.adapter is None:
        return None
    if given.request.mask_tokens:
        return f"--mask-token {' '.join(given.request.mask_tokens)}"
    entry = given.named_mask
    return None if entry is None else f"{entry.name} {entry.token} in config.json"


def _plan_gated(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    masks = mask_tokens(given, checkpoint)
    distinct = len(masks) > 1
    slots = given.request.max_mask_slots or (len(masks) if distinct else DEFAULT_MASK_SLOTS)
    check_slots(slots, len(masks) if distinct else MAX_MASK_SLOTS)
    peft = read_peft_adapter(given.owner, checkpoint, tuple(masks.values()))
    return AdoptionPlan(GATED_LORA.name, evidence, checkpoint, masks, slots, peft)


def mask_tokens(given: Given, checkpoint: Checkpoint) -> dict[str, int]:
    """The mask tokens, all of them rows of the base model's embedding table."""
    tokenizer = load_tokenizer(checkpoint)
    entry = given.named_mask
    named = given.request.mask_tokens or (() if entry is None else (str(entry.token),))
    found: dict[str, int] = {}
    for name in named:
        token = int(name) if is_id(name) else tokenizer.backend_tokenizer.token_to_id(name)
        _check_mask(given, checkpoint, tokenizer, name, token)
        found[tokenizer.backend_tokenizer.id_to_token(token) or str(token)] = token
    return found


def _check_mask(given: Given, checkpoint: Checkpoint, tokenizer: Any, name: str, token: int | None) -> None:
    vocab = int(checkpoint.config.get_text_config().vocab_size)
    if token is None or not 0 <= token < vocab:
        raise CheckpointError(
            f"{given.checkpoint}: mask token {name!r} is {'not in its tokenizer' if token is None else f'id {token}'}: "
            f"expected a token of this base model, or an id from 0 to {vocab - 1}; give --mask-token, or the base model "
            "that the adapter was trained on"
        )
    if token < len(tokenizer) and token not in tokenizer.added_tokens_decoder:
        raise CheckpointError(
            f"{given.checkpoint}: mask token {name!r} is id {token}, an ordinary token {tokenizer.convert_ids_to_tokens(token)!r}: "
            "expected one that no text has, because the adapter would act on it there too; give the right --mask-token"
        )
    if token in checkpoint.tokens.end:
        raise CheckpointError(
            f"{given.checkpoint}: mask token {name!r} is id {token}, which ends a text: expected another; give the right "
            "--mask-token"
        )


GATED_LORA = Method("gated-lora", _recognize_gated, _plan_gated)


_MANIFEST = "uno_training_manifest.json"  # written by UNO's own training, beside the adapter or one folder above


def _recognize_uno(given: Given) -> str | None:
    if given.adapter is None:
        return None
    if given.request.method == UNO.name:
        return f"--method {UNO.name}"
    if given.training.get("noise") == "uniform":
        return "noise uniform in config.json"
    folders = (given.adapter, given.adapter.absolute().parent)
    return _MANIFEST if any((folder / _MANIFEST).exists() for folder in folders) else None


def _plan_uno(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    slots = given.request.max_mask_slots or DEFAULT_MASK_SLOTS
    check_slots(slots, MAX_MASK_SLOTS)
    tokenizer = load_tokenizer(checkpoint)
    seed = given.request.noise_seed or 0
    noise = CopiedEmbeddings(_noise_ids(given, len(tokenizer), slots, seed), seed)
    masks = _noise_tokens(given, tokenizer, slots)
    peft = read_peft_adapter(given.owner, checkpoint, tuple(masks.values()))
    return AdoptionPlan(UNO.name, evidence, checkpoint, masks, slots, peft, noise=noise)


def _noise_ids(given: Given, tokens: int, count: int, seed: int) -> tuple[int, ...]:
    """Random token ids, uniform from 1 to below the mask token of the training, which is where UNO ends its noise."""
    entry = given.named_mask
    end = tokens if entry is None else min(entry.token, tokens)
    if end - 1 < count:
        raise CheckpointError(
            f"{given.checkpoint}: noise is selected from the ids 1 to {end - 1}: expected at least {count} of them; check "
            "mask_token_id in config.json, or lower --max-mask-slots"
        )
    return tuple(random.Random(seed).sample(range(1, end), count))


def _noise_tokens(given: Given, tokenizer: Any, count: int) -> dict[str, int]:
    """The ids that the tokenizer gives to new tokens, one for each mask slot."""
    texts = [f"<|noise_{slot}|>" for slot in range(1, count + 1)]
    backend = tokenizer.backend_tokenizer
    if any(backend.token_to_id(text) is not None for text in texts):
        raise CheckpointError(
            f"{given.checkpoint}: its tokenizer has the token {texts[0]} already: expected a base model without adopted noise"
        )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return {text: int(backend.token_to_id(text)) for text in texts}


UNO = Method("uno", _recognize_uno, _plan_uno, "UNO has random tokens instead", has_noise=True)
