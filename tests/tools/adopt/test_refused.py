"""Refused: published weights that do not fit, and options without effect, with the reason and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint, quiet_libraries
from spaceport.exporter.checkpoint_files import BASE_FILE, write_sar_config
from spaceport.exporter.draft_files import EMBEDDINGS_FILE
from spaceport.tools.adopt.adapters import WEIGHTS_FILE
from spaceport.tools.adopt.plan import PEFT_FILE
from spaceport.tools.cli import INPUT, OK, USAGE, run
from support.published import BASE, METHODS, PADDED, PublishedModel, random_base, write_checkpoint

Capture = pytest.CaptureFixture[str]
Change = Callable[[Tensor], Tensor] | Tensor | None
HEADS_FILE = "medusa_lm_head.pt"
# The files of each method with tensors and with entries.
FILES = {"gated-lora": (WEIGHTS_FILE, PEFT_FILE), "medusa": (HEADS_FILE, "config.json")}
LORA_A, LORA_B = (f"base_model.model.model.decoder.layers.0.fc2.lora_{half}.weight" for half in "AB")
HEAD_1 = ("1.0.linear.weight", "1.0.linear.bias", "1.1.weight")

WEIGHTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("medusa", {"1.1.weight": None}, {}, "has no tensor 1.1.weight: expected 9 of heads"),
    ("medusa", {"0.0.linear.weight": torch.zeros(32, 48)}, {}, f"which config.json calls {BASE}"),
    ("medusa", {"2.1.weight": torch.zeros(PADDED + 1, 32)}, {}, f"({PADDED + 1}, 32): expected ({PADDED}, 32)"),
    ("medusa", dict.fromkeys(HEAD_1), {}, "has the heads [0, 2] with output matrices at [1]: expected the heads 0, 1"),
    ("medusa", {"cross.q": torch.zeros(2)}, {}, "has the tensor cross.q: expected names"),
    ("medusa", {}, {"medusa_num_heads": 4}, "medusa_num_heads is 4: expected 1 to 3, the heads in the"),
    ("medusa", {}, {"medusa_num_layers": 2}, "medusa_num_layers is 2: expected 1, the residual blocks"),
    ("medusa", {"0.1.weight": lambda head: head * torch.nan}, {}, "0.1.weight has numbers that are not finite"),
    ("gated-lora", {LORA_B: None}, {}, f"has no tensor {LORA_B}: expected exactly A and B of the 1 modules"),
    ("gated-lora", {"base_model.model.embed": torch.zeros(4, 4)}, {}, "has the unknown tensor base_model.model.embed"),
    ("gated-lora", {LORA_A: lambda half: half[:, :-1]}, {}, "give the adapter's base model"),
    ("gated-lora", {LORA_A: lambda half: half * torch.inf}, {}, "fc2 has numbers that are not finite; copy"),
    *(
        ("gated-lora", {}, entries, message)
        for entries, message in [
            ({"r": 8}, "the rank in adapter_config.json is 8"),
            ({"r": 0}, "rank r is 0: expected a whole number of at least 1"),
            ({"lora_alpha": 0}, "lora_alpha is 0: expected a number above 0"),
            ({"target_modules": ["fc2", "c_attn"]}, "has no module c_attn, which target_modules names: expected the"),
            ({"target_modules": ["fc2", "lm_head"]}, "cannot have adapters on"),
            ({"target_modules": "(fc2"}, "cannot have this adapter: missing ), unterminated subpattern"),
            ({"layers_pattern": "layers"}, "peft refuses it: "),
            ({"rank_pattern": [4]}, "rank_pattern is [4]: expected an object with names of modules"),
            ({"target_modules": None}, "target_modules is None: expected names of modules"),
            ({"use_dora": True}, "use_dora is True, which is not supported: DoRA scales the base weights"),
            ({"bias": "all"}, "bias is 'all', which is not supported: trained biases would act on all rows"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not supported"),
            ({"fan_in_fan_out": True}, "fan_in_fan_out is True, which is not supported: its weights are transposed"),
            ({"trainable_token_indices": [1]}, "trainable_token_indices is [1], which is not supported"),
            ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not supported: it changes the"),
            ({"peft_type": "IA3"}, "peft_type is 'IA3': expected LORA, which can act on mask rows only"),
            ({"use_new_thing": True}, "use_new_thing is True, which is not supported: it is not known how"),
        ]
    ),
]
OPTIONS = [
    ("gated-lora", "--mask-token [nothing]", "mask token '[nothing]' is not in its tokenizer: expected a token of"),
    ("gated-lora", f"--mask-token {PADDED}", f"is id {PADDED}: expected a token of this base model, or an id"),
    ("gated-lora", "--mask-token 40", "an ordinary token"),
    ("gated-lora", "--mask-token 1", "which ends a text: expected another"),
    ("gated-lora", "--method eagle", "is 'eagle': expected one of medusa, pard, uno, gated-lora"),
    ("gated-lora", "--method uno --mask-token [M]", "--mask-token has no effect: UNO has random tokens instead"),
    ("gated-lora", "--max-mask-slots 400", "--max-mask-slots is 400: expected 1 to"),
    ("gated-lora", "--mask-token 639 --mask-token 638 --max-mask-slots 3", "--max-mask-slots is 3: expected 1 to 2"),
    ("medusa", "--max-mask-slots 4", "--max-mask-slots is 4: expected 1 to 3, the heads in"),
    ("medusa", "--mask-token 638", "--mask-token has no effect: heads draft without mask"),
    ("pard", "--mask-token 638", "--mask-token has no effect: config.json names the mask token"),
    *((method, "--noise-seed 0", "--noise-seed has no effect") for method in ("gated-lora", "medusa", "pard")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PublishedModel]:
    quiet_libraries()
    return {method: build(tmp_path_factory.mktemp(method)) for method, build in METHODS.items()}


def copied(model: PublishedModel, folder: Path) -> tuple[PublishedModel, Path]:
    """A copy of a model that can be changed, and the folder of its weights."""
    source = model.base.parent
    shutil.copytree(source, folder)
    assert model.weights is not None
    weights = folder / model.weights.relative_to(source)
    return PublishedModel(folder / model.base.name, weights), weights


def spoil(file: Path, tensors: dict[str, Change]) -> None:
    """Change tensors of a file, or remove them."""
    pickled = file.suffix == ".pt"
    stored: dict[str, Any] = torch.load(file) if pickled else load_file(file)
    for name, change in tensors.items():
        stored[name] = change(stored[name]) if callable(change) else change
    kept = {name: tensor.contiguous() for name, tensor in stored.items() if tensor is not None}
    if pickled:
        torch.save(kept, file)
    else:
        save_file(kept, file)


def adopt(model: PublishedModel, *options: object) -> int:
    return run(["adopt", *(str(path) for path in (model.base, model.weights, *options) if path is not None)])


@pytest.mark.parametrize(("method", "tensors", "entries", "message"), WEIGHTS)
def test_weights_that_do_not_fit_are_refused(
    method: str,
    tensors: dict[str, Change],
    entries: dict[str, Any],
    message: str,
    models: dict[str, PublishedModel],
    tmp_path: Path,
    capsys: Capture,
) -> None:
    model, weights = copied(models[method], tmp_path / "models")
    tensor_file, entry_file = (weights / name for name in FILES[method])
    spoil(tensor_file, tensors)
    entry_file.write_text(json.dumps({**json.loads(entry_file.read_text("utf-8")), **entries}), "utf-8")
    assert adopt(model, tmp_path / "adapter") == INPUT
    assert message in capsys.readouterr().err
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(("method", "options", "message"), OPTIONS)
def test_options_without_effect_are_refused(
    method: str, options: str, message: str, models: dict[str, PublishedModel], capsys: Capture
) -> None:
    assert adopt(models[method], *options.split()) in (INPUT, USAGE)
    assert message in capsys.readouterr().err


class Code:
    def __reduce__(self) -> Any:
        return print, ("this pickle runs code",)


def test_code_in_pickles_and_weights_without_their_base_model_are_refused(
    models: dict[str, PublishedModel], tmp_path: Path, capsys: Capture
) -> None:
    base, lora, heads = models["medusa"].base, models["gated-lora"].weights, models["medusa"].weights
    _, pickled = copied(models["gated-lora"], tmp_path / "gated-lora")
    (pickled / WEIGHTS_FILE).rename(pickled / "adapter_model.bin")
    _, code = copied(models["medusa"], tmp_path / "medusa")
    torch.save(Code(), code / HEADS_FILE)
    other = write_checkpoint(tmp_path / "other", random_base())
    for paths, message in (
        ((base, pickled), "its weights are pickles, which can run code when opened: expected"),
        ((base, code), "expected tensors only"),
        ((base, tmp_path / "nowhere.pt", tmp_path / "new"), "nowhere.pt: no such file or folder: expected CHECK"),
        ((heads, tmp_path / "new"), f"expected CHECKPOINT [ADAPTER] TARGET, with the folder of {BASE}"),
        ((other, lora), "has no module fc2, which target_modules names"),
        ((other, heads), "give the base model that the heads were trained on"),
        ((models["pard"].base, heads), "has mask tokens, which draft already"),
    ):
        assert run(["adopt", *map(str, paths)]) == INPUT
        shown = capsys.readouterr()
        assert message in shown.err
        assert "runs code" not in shown.out


NO_HEADS = {"mechanisms": {"draft_heads": {"count": 0, "blocks": 1}}}


@pytest.mark.parametrize(
    ("method", "entries", "message"),
    [
        ("gated-lora", {}, "has mask_adapter already: expected its base model"),
        ("medusa", {}, "has draft_heads already: expected its base model"),
        ("medusa", {"mask_tokens": ["638"]}, "has draft_heads, and mask tokens 638: expected one of them"),
        ("medusa", NO_HEADS, "draft_heads.count is 0: expected a whole number of"),
    ],
)
def test_a_base_model_that_drafts_already_is_refused(
    method: str,
    entries: dict[str, Any],
    message: str,
    models: dict[str, PublishedModel],
    tmp_path: Path,
    capsys: Capture,
) -> None:
    model, _ = copied(models[method], tmp_path / "models")
    assert adopt(model, tmp_path / "adapter") == OK
    for file in (tmp_path / "adapter").iterdir():
        if file.name not in (BASE_FILE, EMBEDDINGS_FILE):
            shutil.copy(file, model.base / file.name)
    write_sar_config(model.base, entries)
    assert adopt(model) == INPUT
    assert message in capsys.readouterr().err


def test_the_heads_of_an_adapter_folder_have_to_fit_the_base_model(
    models: dict[str, PublishedModel], tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    assert adopt(models["medusa"], adapter) == OK
    write_sar_config(adapter, {"mechanisms": {"draft_heads": {"count": 4, "blocks": 1}}})
    checkpoint = open_checkpoint(models["medusa"].base, TokenFlags(), adapter=adapter)
    with pytest.raises(ValueError, match=r"has no tensor 3.0.linear.bias and 2 more: expected 12 of heads"):
        load_model(checkpoint, "float32")
