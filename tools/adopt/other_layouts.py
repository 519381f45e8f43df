"""Other layouts: published methods that cannot be run yet, recognized by their files, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from spaceport.exporter.sar_config import CheckpointError
from spaceport.tools.adopt.given import Given

_RECURRENT = ("qwen3_next", "mamba", "mamba2", "falcon_mamba", "falcon_h1", "jamba", "bamba", "rwkv", "recurrent_gemma")
_OWN_CODE = ("sdar", "sdar_moe")


class OtherLayout(NamedTuple):
    """A method that is recognized and refused."""

    name: str
    sign: Callable[[Given], str | None]  # what shows it
    reason: str
    advice: str = "export the checkpoint without it: it drafts with prompt lookup, or train it with `spaceport tune`"


def refuse_other_layouts(given: Given) -> None:
    """Raise if what was given is of a method that cannot be run."""
    for layout in _LAYOUTS:
        sign = layout.sign(given)
        if sign is not None:
            raise CheckpointError(
                f"{given.adapter or given.checkpoint}: is {layout.name} ({sign}), which is not supported: {layout.reason}; "
                f"{layout.advice}"
            )


def _entries(*names: str) -> Callable[[Given], str | None]:
    """A sign: one of these entries in a config.json."""

    def sign(given: Given) -> str | None:
        found = (name for config in (given.config, given.training) for name in names if config.get(name))
        name = next(found, None)
        return None if name is None else f"{name} in config.json"

    return sign


def _recurrent(given: Given) -> str | None:
    kind = given.config.get("model_type")
    kinds = given.config.get("layer_types") or ()
    if kind in _RECURRENT or "linear_attention" in kinds:
        return f"model_type {kind}"
    return None


def _own_code(given: Given) -> str | None:
    kind = given.config.get("model_type")
    return f"model_type {kind}" if kind in _OWN_CODE else None


def _eagle(given: Given) -> str | None:
    for config in (given.config, given.training):
        name = next((name for name in config.get("architectures") or () if "eagle" in str(name).lower()), None)
        if name is not None:
            return f"architecture {name} in config.json"
    return _entries("eagle_config", "draft_vocab_size")(given)


def _dflash(given: Given) -> str | None:
    return _entries("dflash_config", "dspark_noise_token_id", "speculators_model_type")(given)


def _nemotron(given: Given) -> str | None:
    return _entries("dlm_type", "dlm_paradigm")(given) if given.adapter is None else None


def _block_diffusion(given: Given) -> str | None:
    return _block(given.config) if given.adapter is None else None


def _block(config: Mapping[str, Any]) -> str | None:
    return (
        "block_size and mask_token_id in config.json"
        if config.get("block_size") and "mask_token_id" in config
        else None
    )


_LAYOUTS = (
    OtherLayout(
        "a model with recurrent layers",
        _recurrent,
        "a recurrent state cannot drop the tokens of a rejected draft",
        "expected a model whose layers all have attention",
    ),
    OtherLayout("EAGLE", _eagle, "its drafts come from a second network over hidden states"),
    OtherLayout("DFlash or another speculator", _dflash, "its drafts come from a second network over hidden states"),
    OtherLayout(
        "PARD-2", _entries("pard2", "pard2_target_dim", "spd_type"), "its drafts need hidden states of another model"
    ),
    OtherLayout(
        "Nemotron-Labs-Diffusion without its adapter linear_spec_lora",
        _nemotron,
        "no adapter drafts, and the base model's own drafts need no adapter folder",
        "copy linear_spec_lora into the folder; or write sar_config.json there, with mask_tokens, mask_slots, shift false "
        "and group block, and export it",
    ),
    OtherLayout(
        "SDAR, I-DLM or UNO as a whole checkpoint",
        _own_code,
        "it has code of its own instead of its base model's",
        "give the base model as CHECKPOINT, such as Qwen3-8B in the format of transformers, and the adapter's folder as "
        "ADAPTER",
    ),
    OtherLayout(
        "block diffusion",
        _block_diffusion,
        "config.json does not say what a mask row predicts, and which rows of its block it sees",
        "if the checkpoint also generates with causal attention, write sar_config.json, with mask_tokens, mask_slots, shift "
        "and group, and export it",
    ),
)
