"""Gated adapters: mask rows change, all other rows stay bit-identical, in PyTorch and in the graph."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint, quiet_libraries
from spaceport.exporter.draft_files import write_mechanisms
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.contract.manifest import MODEL_FILE
from spaceport.graphs.contract.signature import LOWERINGS, Lowering
from spaceport.graphs.gated import (
    ALL_LINEAR,
    GatedLinear,
    MaskAdapter,
    adapter_state,
    base_state,
    checkpoint_layers,
    fold_scale,
    gate_model,
    trainable_parameters,
    unfold_scale,
)
from spaceport.graphs.traits import UnsupportedModel
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from support.exported import bundle_of
from support.families import build, family_of
from support.mask_rows import bundle_engine, require_other_mask_rows_alone, torch_engine, walk
from support.paths import TINY

ADAPTER_FILE = "mask_adapter.safetensors"

MASK = 4  # the tiny checkpoint's


def fill(model: PreTrainedModel, size: float) -> None:
    """Set the adapters to seeded random values."""
    random = torch.Generator().manual_seed(3)
    for tensor in adapter_state(model).values():
        tensor.copy_(size * torch.randn(tensor.shape, generator=random))


def tiny() -> PreTrainedModel:
    quiet_libraries()
    return load_model(open_checkpoint(TINY, TokenFlags()), "float32")


def gated_tiny(size: float = 0.2) -> PreTrainedModel:
    """The tiny model, frozen, with adapters on all linear modules."""
    model = tiny().requires_grad_(False)
    gate_model(model, [MASK], 4, 8, [ALL_LINEAR])
    fill(model, size)
    return model


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with an adapter."""
    folder = tmp_path_factory.mktemp("tuned") / "checkpoint"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("make.py", "README.md", "__pycache__"))
    model = tiny()
    adapter = gate_model(model, [MASK], 4, 8, [ALL_LINEAR])
    fill(model, 0.2)
    write_mechanisms(folder, [replace(adapter, tensors=adapter_state(model))])
    return folder


@pytest.fixture(scope="module")
def gated_bundle(tuned: Path) -> Path:
    return bundle_of(tuned)


@pytest.mark.slow
def test_an_exported_adapter_changes_mask_rows_only(tiny_bundle: Path, gated_bundle: Path, tuned: Path) -> None:
    found = require_other_mask_rows_alone(bundle_engine(tiny_bundle), bundle_engine(gated_bundle), MASK)
    in_torch = walk(torch_engine(load_model(open_checkpoint(tuned, TokenFlags()), "float32")), MASK)[1]
    np.testing.assert_allclose(found, in_torch, atol=1e-3)


def test_drafts_with_an_adapter_do_not_change_the_output(tiny_bundle: Path, gated_bundle: Path) -> None:
    prompts = json.loads((TINY / "prompts.json").read_text("utf-8"))
    steps = [0, 0]
    with (
        Runtime.open(tiny_bundle, max_seq_len=256, step_costs="free") as base,
        Runtime.open(gated_bundle, max_seq_len=256, step_costs="free") as gated,
    ):
        for prompt in list(prompts.values())[:3]:
            expected = base.generate(prompt, Decoding(max_tokens=40, mask_slots=5))
            for mask_slots in (0, 1, 5):
                found = gated.generate(prompt, Decoding(max_tokens=40, mask_slots=mask_slots))
                assert found.tokens == expected.tokens
            steps = [steps[0] + expected.statistics.steps, steps[1] + found.statistics.steps]
    assert steps[0] < steps[1]  # random adapters draft worse, so the exported one is in use


def test_a_bundle_has_the_parameters_of_its_adapter_and_the_matmuls_of_its_base(
    tiny_bundle: Path, gated_bundle: Path, tuned: Path
) -> None:
    base, gated = (open_bundle(bundle).manifest.parameters for bundle in (tiny_bundle, gated_bundle))
    assert gated - base == sum(tensor.numel() for tensor in load_file(tuned / ADAPTER_FILE).values())

    def weights(bundle: Path) -> set[tuple[int, ...]]:
        graph = onnx.load(str(bundle / MODEL_FILE), load_external_data=False).graph
        products = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
        return {tuple(tensor.dims) for tensor in graph.initializer if tensor.name in products}

    adapters = {(96, 4), (192, 4), (4, 96), (4, 32), (4, 192)}  # A of matrices with 96 and 192 inputs; B
    assert weights(gated_bundle) - weights(tiny_bundle) == adapters
    assert weights(tiny_bundle) <= weights(gated_bundle)


def gated_family(name: str) -> PreTrainedModel:
    model = build(family_of(name))
    adapter = gate_model(model, [5, 3], 3, 6, [ALL_LINEAR])
    assert len(adapter_state(model)) == 2 * 2 * len(adapter.targets)  # halves, layers
    fill(model, 0.5)
    fold_scale(model)
    return model


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "opt", "gemma2"])
def test_ordinary_rows_of_every_family_are_bit_identical_with_an_adapter(name: str, lowering: Lowering) -> None:
    base, gated = (torch_engine(model, lowering) for model in (build(family_of(name)), gated_family(name)))
    require_other_mask_rows_alone(base, gated, 5, 0.1)


def test_adapters_are_initialized_from_the_seed_and_have_no_effect() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(11)
        model = tiny()
        gate_model(model, [MASK], 4, 8, ["q_proj", "down_proj"])
        states.append(adapter_state(model))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert all(tensor.any() == name.endswith(".A") for name, tensor in states[0].items())
    ids = torch.tensor([[9, 8, MASK, MASK]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, tiny()(input_ids=ids).logits)


def test_base_parameters_keep_their_names_and_values(tmp_path: Path) -> None:
    base, model = tiny(), gated_tiny()
    assert base_state(model).keys() == base.state_dict().keys()
    assert model.state_dict().keys() == base_state(model).keys() | adapter_state(model).keys()
    model.save_pretrained(tmp_path, state_dict=base_state(model))
    write_mechanisms(tmp_path, [MaskAdapter(4, 8, ("q_proj",), adapter_state(model))])
    again = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not again[1]["unexpected_keys"]  # transformers ignores the adapter file
    assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in again[0].state_dict().items())


def loss_of(model: PreTrainedModel, ids: Tensor, rows: slice) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, rows].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))


DRAFT = torch.tensor([[0, 10, 20, 30, MASK, MASK, MASK]])


def test_gradients_flow_to_the_adapters_and_other_trainable_parameters() -> None:
    model = gated_tiny()
    model.get_input_embeddings().weight.requires_grad_(True)
    loss_of(model, DRAFT, slice(4, None)).backward()
    given = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert given == {*adapter_state(model), "model.embed_tokens.weight"}
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trainable_parameters(model))
    model = gated_tiny()
    loss_of(model, DRAFT, slice(0, 4)).backward()  # rows that see no mask row
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in trainable_parameters(model))


def test_gradient_checkpointing_gives_the_same_gradients_with_calls_in_between() -> None:
    found = []
    for prepare in (lambda model: None, checkpoint_layers):
        model = gated_tiny().train()
        model.enable_input_require_grads()
        prepare(model)
        # the second call has other mask rows: recomputing with them would give wrong gradients
        loss = loss_of(model, DRAFT, slice(4, None)) + loss_of(model, DRAFT.flip(1), slice(0, None))
        loss.backward()
        found.append([parameter.grad for parameter in trainable_parameters(model)])
    assert all(layer.gradient_checkpointing for layer in model.base_model.layers)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    model.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(RuntimeError, match="for gradient checkpointing use checkpoint_layers"):
        loss_of(model, DRAFT, slice(4, None)).backward()


def test_the_base_model_can_be_called_for_hidden_states() -> None:
    model = gated_tiny()
    inside = model.base_model(DRAFT, use_cache=False).last_hidden_state
    assert torch.equal(model.lm_head(inside), model(input_ids=DRAFT, use_cache=False).logits)


def test_folding_the_scale_changes_no_logit_and_can_be_undone() -> None:
    model = gated_tiny()
    before, state = model(input_ids=DRAFT).logits, {name: half.clone() for name, half in adapter_state(model).items()}
    fold_scale(model)
    assert {module.scale for module in model.modules() if isinstance(module, GatedLinear)} == {1}
    assert torch.equal(model(input_ids=DRAFT).logits, before)
    unfold_scale(model, MaskAdapter(4, 8, ("q_proj",)))
    assert {module.scale for module in model.modules() if isinstance(module, GatedLinear)} == {2}
    assert all(torch.equal(half, state[name]) for name, half in adapter_state(model).items())


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("gpt2", [ALL_LINEAR], r"GPT2LMHeadModel .* on c_attn \(Conv1D\), c_fc .*, which are none"),
        ("gpt2", ["c_attn"], r"adapters on c_attn \(Conv1D\): expected names"),
        ("qwen3_moe", [ALL_LINEAR], r"adapters on experts \(Qwen3MoeExperts\), gate .* are k_proj, o_proj"),
        ("falcon, 7B style", ["dense"], r"adapters on dense \(FalconLinear\): expected names of linear modules"),
        ("llama", ["q_proj", "w1"], "LlamaForCausalLM .* on w1: expected .* down_proj, gate_proj, k_proj, o_proj"),
        ("llama", ["lm_head"], "on lm_head: expected names of linear modules in its decoder layers"),
        ("llama", ["mlp"], "on mlp: expected names of linear modules in its decoder layers"),
        ("llama", [], "expected names of linear modules in its decoder layers"),
        ("llama without masks", [ALL_LINEAR], "no mask token: an adapter for mask rows needs at least one"),
    ],
)
def test_modules_that_cannot_have_adapters_are_refused_by_name(name: str, targets: list[str], message: str) -> None:
    family, _, without = name.partition(" without ")
    with pytest.raises(UnsupportedModel, match=message):
        gate_model(build(family_of(family)), [] if without else [5], 2, 4, targets)
    if family == "qwen3_moe":
        assert gate_model(build(family_of(family)), [5], 2, 4, ["q_proj", "v_proj"]).targets == ("q_proj", "v_proj")


HALF = "model.layers.1.mlp.up_proj.A"
NO_ENTRY = r"mechanisms in sar_config\.json has no entry mask_adapter for it: expected"
# Entries of sar_config.json, or of its mask_adapter, that do not fit.
ENTRIES: list[tuple[dict[str, Any], str]] = [
    ({"mechanisms": {"mask_adapter": None}}, NO_ENTRY),
    ({"mechanisms": {"mask_adapter": {}}}, "mask_adapter lacks 'alpha', 'rank', 'targets': expected alpha"),
    ({"mask_tokens": []}, "no mask token is known: set one with --mask-token, or as"),
    ({"bias": 1}, "mask_adapter has the unknown 'bias': expected alpha, rank, targets"),
    ({"rank": 0}, r"mask_adapter\.rank is 0: expected a whole number of at least 1"),
    ({"rank": 8}, r"the rank is 8: expected rank x in for A .*, or correct mask_adapter in sar_config"),
    ({"alpha": 0}, r"mask_adapter\.alpha is 0: expected a number above 0"),
    ({"targets": "q_proj"}, r"mask_adapter\.targets is 'q_proj': expected a list of names"),
    ({"targets": ["q_proj", "w1"]}, "LlamaForCausalLM cannot have adapters on w1: expected names .*; copy the file"),
    ({"targets": ["q_proj"]}, r"the unknown tensor model\.layers\.0\S+\.A and 35 more: expected 6 tensors .*; copy"),
]
FILES: list[tuple[Callable[[Path], object], str]] = [
    (lambda c: (c / ADAPTER_FILE).unlink(), r"no mask_adapter\.safetensors: copy it there, or set the entry to null"),
    (lambda c: os.truncate(c / ADAPTER_FILE, 5000), r"mask_adapter\.safetensors: cannot be read: .*: copy the file"),
    (lambda c: tensors(c, None), rf"no tensor {HALF}: expected 42 tensors such as \S+\.A, one A and one B"),
    (lambda c: tensors(c, torch.zeros(4)), r"up_proj\.A has shape \(4,\), the rank is 4: expected rank x in"),
    (lambda c: tensors(c, torch.zeros(4, 95)), r"\(4, 95\): expected \(4, 96\), which the base model has"),
]


def tensors(folder: Path, changed: Tensor | None) -> None:
    """Change a tensor of the adapter; None: change its name."""
    found = load_file(folder / ADAPTER_FILE)
    old = found.pop(HALF)
    found |= {"other.A": old} if changed is None else {HALF: changed}
    save_file(found, folder / ADAPTER_FILE)


@pytest.mark.parametrize(("change", "message"), [*ENTRIES, *FILES])
def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(
    tuned: Path, tmp_path: Path, change: dict[str, Any] | Callable[[Path], object], message: str
) -> None:
    folder = shutil.copytree(tuned, tmp_path / "checkpoint")
    if isinstance(change, dict):
        file = folder / "sar_config.json"
        config = json.loads(file.read_text("utf-8"))
        for name, value in change.items():
            (config if name in config else config["mechanisms"]["mask_adapter"])[name] = value
        file.write_text(json.dumps(config), "utf-8")
    else:
        change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(open_checkpoint(folder, TokenFlags()), "float32")
    assert str(folder) in str(caught.value)
