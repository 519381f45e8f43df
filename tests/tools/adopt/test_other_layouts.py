"""Other layouts: published methods that cannot be run are refused by name, with the reason and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.sar_config import CheckpointError
from spaceport.tools.adopt.given import Paths, Request, read_given
from spaceport.tools.adopt.other_layouts import refuse_other_layouts


def folder_of(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path


def refuse(checkpoint: Path, adapter: Path | None = None) -> None:
    refuse_other_layouts(read_given(Paths(checkpoint, adapter, None), Request()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            r"is EAGLE \(architecture LlamaForCausalLMEagle3 in config.json\)",
        ),
        ({"dflash_config": {"mask_token_id": 3}}, r"is DFlash or another speculator"),
        ({"pard_token": 9, "pard2_target_dim": 64}, r"is PARD-2 .*hidden states of another model"),
        (
            {"dlm_paradigm": "bidirectional", "mask_token_id": 100},
            r"is Nemotron-Labs-Diffusion without its .*linear_spec_lora into",
        ),
        (
            {"model_type": "qwen3_next"},
            r"is a model with recurrent layers .*cannot drop the tokens of a rejected draft",
        ),
        ({"layer_types": ["linear_attention", "full_attention"]}, r"is a model with recurrent layers"),
        ({"model_type": "sdar", "mask_token_id": 9, "block_size": 3}, r"is SDAR, .*give the base model as CHECKPOINT"),
        (
            {"model_type": "qwen3", "mask_token_id": 9, "block_size": 4},
            r"is block diffusion .*config.json does not say .*write sar_config.json",
        ),
    ],
)
def test_a_configuration_of_another_method_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        refuse(folder_of(tmp_path / "model", **config))


def test_an_adapter_is_judged_by_its_own_configuration_too(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", model_type="llama")
    with pytest.raises(CheckpointError, match="is EAGLE"):
        refuse(base, folder_of(tmp_path / "eagle", draft_vocab_size=32000))
    # block_size is in the configuration of every I-DLM adapter, whose base model is an ordinary one
    refuse(base, folder_of(tmp_path / "idlm", model_type="sdar", block_size=3, mask_token_id=9))


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "qwen3", "pard_token": 9}])
def test_ordinary_models_and_pard_are_not_refused(config: dict[str, Any], tmp_path: Path) -> None:
    refuse(folder_of(tmp_path / "model", **config))
