"""Peft adapter: mask rows have the logits of peft's own forward pass, and what does not fit the base model is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spaceport.exporter.adapter import ADAPTER_FILE
from spaceport.exporter.checkpoint import SAR_FILE, TokenFlags, load_model, open_checkpoint
from spaceport.exporter.quiet import quiet_libraries
from spaceport.tools.adopt.given import PEFT_FILE
from spaceport.tools.adopt.peft_config import WEIGHTS_FILE
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK
from support.gguf_files import random_model, write_gguf
from support.published import MASK, VOCAB, random_adapter, random_base, reference_logits, write_checkpoint

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = r".*layers\.\d+\.self_attn\.(q|k|v|o)_proj"
UP = "model.layers.0.mlp.up_proj"

# Ways in which peft selects modules, ranks and scales.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": LINEAR},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "all-linear": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"},
    "regex": {"r": 4, "lora_alpha": 4, "target_modules": ATTENTION},
    "one layer": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"q_proj": 8, r"layers\.0\.mlp\.up_proj": 2},
        "alpha_pattern": {"v_proj": 3},
    },
    "patterns and rslora": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"up_proj": 9},
        "exclude_modules": r".*layers\.1\.mlp\.up_proj",
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_libraries()
    return write_checkpoint(tmp_path_factory.mktemp("peft") / "base", random_base(), mask_token_id=MASK)


@pytest.fixture(scope="module")
def published(base: Path) -> Path:
    folder = base.with_name("published")
    random_adapter(random_base(), **OPTIONS["plain"]).save_pretrained(folder)
    return folder


def text_with_masks() -> Tensor:
    """A text with a group of mask rows at its end, and one in its middle."""
    ids = torch.arange(40)[None] * 7 % VOCAB
    ids[:, 10:12] = MASK
    ids[:, 36:] = MASK
    return ids


def opened_logits(base: Path, adapter: Path, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = load_model(open_checkpoint(base, TokenFlags(), adapter=adapter), "float32")(ids).logits
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_mask_rows_have_the_logits_of_pefts_own_forward_pass(name: str, base: Path, tmp_path: Path) -> None:
    model, ids = random_base(), text_with_masks()
    adapted = random_adapter(model, **OPTIONS[name])
    adapted.save_pretrained(tmp_path / "published")
    assert run(["adopt", str(base), str(tmp_path / "published"), str(tmp_path / "adapter")]) == OK
    found, masks = opened_logits(base, tmp_path / "adapter", ids), ids == MASK
    torch.testing.assert_close(found, reference_logits(adapted, ids, masks.float()), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        plain = model(ids).logits
    assert torch.equal(found[:, :10], plain[:, :10])
    assert (found - plain)[masks].abs().amax(-1).min() > 0.1


def test_one_layer_and_a_pattern_select_no_other_module(base: Path, tmp_path: Path) -> None:
    random_adapter(random_base(), **OPTIONS["one layer"]).save_pretrained(tmp_path / "published")
    assert run(["adopt", str(base), str(tmp_path / "published"), str(tmp_path / "adapter")]) == OK
    names = {name.rpartition(".")[0] for name in load_file(tmp_path / "adapter" / ADAPTER_FILE)}
    assert names == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}
    entry = json.loads((tmp_path / "adapter" / SAR_FILE).read_text("utf-8"))["mask_adapter"]
    assert set(entry["targets"]) == names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_values_of_the_adapter_are_kept_as_they_are(
    dtype: torch.dtype, base: Path, published: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    tensors = {name: tensor.to(dtype) * 1e-4 for name, tensor in load_file(published / WEIGHTS_FILE).items()}
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / PEFT_FILE).write_bytes((published / PEFT_FILE).read_bytes())
    assert run(["adopt", str(base), str(folder), str(tmp_path / "adapter")]) == OK
    stored = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    for half in ("A", "B"):
        own = tensors[f"base_model.model.{UP}.lora_{half}.weight"]
        assert stored[f"{UP}.{half}"].dtype == dtype
        assert torch.equal(stored[f"{UP}.{half}"], own)


def test_a_gguf_file_can_be_the_base_model(tmp_path: Path) -> None:
    model, ids = random_model(), text_with_masks()
    base = write_gguf(tmp_path / "model.gguf", model)
    adapted = random_adapter(model, **OPTIONS["rslora"])
    adapted.save_pretrained(tmp_path / "published")
    paths = [str(base), str(tmp_path / "published"), str(tmp_path / "adapter")]
    assert run(["adopt", *paths, "--mask-token", "[M]"]) == OK
    (mask,) = open_checkpoint(base, TokenFlags(), adapter=tmp_path / "adapter").tokens.mask
    ids[ids == MASK] = mask
    expected = reference_logits(adapted, ids, (ids == mask).float())
    torch.testing.assert_close(opened_logits(base, tmp_path / "adapter", ids), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Asserts that the adapter in tmp_path is refused with this message."""

    def check(expected: str) -> None:
        assert run(["adopt", str(base), str(tmp_path), "--dry-run"]) == INPUT
        assert expected in capsys.readouterr().err

    return check


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(f"base_model.model.{UP}.{name}.weight")


def narrow(tensors: dict[str, Tensor]) -> None:
    name = f"base_model.model.{UP}.lora_A.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()


def add_embeddings(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.weight"] = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            drop("lora_B"),
            f"has no tensor base_model.model.{UP}.lora_B.weight: expected exactly A and B of the 14 modules",
        ),
        (add_embeddings, "has the unknown tensor base_model.model.model.embed_tokens.weight"),
        (narrow, "give the adapter's base model"),
    ],
)
def test_a_file_with_other_tensors_is_refused(
    change: Callable[[dict[str, Tensor]], None],
    expected: str,
    published: Path,
    tmp_path: Path,
    refused: Callable[[str], None],
) -> None:
    tensors = load_file(published / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    (tmp_path / PEFT_FILE).write_bytes((published / PEFT_FILE).read_bytes())
    refused(expected)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"r": 8}, "the rank in adapter_config.json is 8"),
        ({"r": 0}, "rank r is 0: expected a whole number of at least 1"),
        ({"lora_alpha": 0}, "lora_alpha is 0: expected a number above 0"),
        (
            {"target_modules": ["q_proj", "c_attn"]},
            "has no module c_attn, which target_modules names: expected the base model",
        ),
        ({"target_modules": [*LINEAR, "lm_head"]}, "cannot have adapters on"),
        ({"target_modules": [*LINEAR, "embed_tokens"]}, "cannot have adapters on"),
        ({"target_modules": "(q_proj"}, "cannot have this adapter: missing ), unterminated subpattern"),
        ({"target_modules": ".*qkv"}, "cannot have this adapter: "),
        ({"layers_pattern": "layers"}, "peft refuses it: "),
        ({"rank_pattern": [4]}, "rank_pattern is [4]: expected an object with names of modules"),
        ({"target_modules": None}, "target_modules is None: expected names of modules"),
        ({"use_dora": True}, "use_dora is True, which is not supported: DoRA scales the base weights"),
        ({"bias": "all"}, "bias is 'all', which is not supported: trained biases would act on all rows"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True, which is not supported: its weights are transposed"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1], which is not supported"),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights is 'pissa', which is not supported: it changes the base weights",
        ),
        ({"peft_type": "IA3"}, "peft_type is 'IA3': expected LORA, which can act on mask rows only"),
        ({"use_new_thing": True}, "use_new_thing is True, which is not supported: it is not known how"),
    ],
)
def test_an_adapter_that_cannot_be_gated_is_refused_by_the_entry(
    entries: dict[str, Any], expected: str, published: Path, tmp_path: Path, refused: Callable[[str], None]
) -> None:
    (tmp_path / WEIGHTS_FILE).symlink_to(published / WEIGHTS_FILE)
    content = {**json.loads((published / PEFT_FILE).read_text("utf-8")), **entries}
    (tmp_path / PEFT_FILE).write_text(json.dumps(content), "utf-8")
    refused(expected)


def test_another_base_model_is_refused_by_its_sizes(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = copy.deepcopy(random_base().config)
    config.intermediate_size += 16
    other = write_checkpoint(tmp_path / "other", type(random_base())(config), mask_token_id=MASK)
    assert run(["adopt", str(other), str(published), "--dry-run"]) == INPUT
    assert "give the adapter's base model" in capsys.readouterr().err


def test_pickled_weights_are_refused(
    base: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / PEFT_FILE).write_bytes((published / PEFT_FILE).read_bytes())
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert run(["adopt", str(base), str(tmp_path), "--dry-run"]) == INPUT
    assert "pickles" in capsys.readouterr().err
