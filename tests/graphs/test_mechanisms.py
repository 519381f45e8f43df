"""Mechanisms: adapters change mask rows alone, heads add lines, tokens have input rows, and candidates are corrected."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from spaceport.exporter.checkpoint import CheckpointError, TokenFlags, load_model, open_checkpoint, quiet_libraries
from spaceport.exporter.draft_files import write_mechanisms
from spaceport.graphs.contract.signature import LOWERINGS, Lowering, Signature, logit_rows
from spaceport.graphs.gated import (
    ALL_LINEAR,
    GatedLinear,
    MaskAdapter,
    adapter_state,
    base_state,
    checkpoint_layers,
    fold_scale,
    gate_model,
    gate_of,
    low_rank_linear,
    trainable_parameters,
    unfold_scale,
    uniform_rows,
)
from spaceport.graphs.heads import Heads
from spaceport.graphs.mechanism import DraftCorrection, Factors, InputRows
from spaceport.graphs.traits import UnsupportedModel, require_equal_logits
from spaceport.runtime.bundle import open_bundle
from support.exported import bundle_of
from support.families import build, family_of
from support.gguf_files import HIDDEN, random_model
from support.mask_rows import bundle_engine, require_other_mask_rows_alone, rows_batch, torch_engine, walk
from support.paths import TINY
from support.published import random_heads, reference_lines

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


def test_a_bundle_has_the_parameters_of_its_adapter(tiny_bundle: Path, gated_bundle: Path, tuned: Path) -> None:
    base, gated = (open_bundle(bundle).manifest.parameters for bundle in (tiny_bundle, gated_bundle))
    assert gated - base == sum(tensor.numel() for tensor in load_file(tuned / ADAPTER_FILE).values())


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


MASKS = (600, 601)
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}
FORK, OTHER = 93, 12
MODELS = {
    "plain": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "scaled": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=16)),
}


def test_a_gate_is_open_for_mask_rows_while_its_model_runs() -> None:
    model = random_model("llama", tied=False)
    gate = gate_of(model, MASKS)
    seen: list[list[bool]] = []
    model.model.layers[1].register_forward_pre_hook(lambda *states: seen.append(gate.open_rows.flatten().tolist()))
    with torch.no_grad():
        model(torch.tensor([[3, 600, 5, 601]]))
        model(input_ids=torch.tensor([[601, 4, 6, 7]]))
    assert seen == [[False, True, False, True], [True, False, False, False]]
    with pytest.raises(RuntimeError, match="while its model does not run"):
        _ = gate.open_rows
    with pytest.raises(ValueError, match="was called without input_ids"):
        model(inputs_embeds=torch.zeros((1, 2, model.config.hidden_size)))


@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12)], ids=["rows", "batch"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_with_its_adapter_equals_the_sum_of_two_products(shape: tuple[int, ...], with_bias: bool) -> None:
    rng = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=rng).requires_grad_()

    states, weight, a, b = made(*shape), made(7, 12).detach(), made(4, 12), made(7, 4)
    bias = made(7).detach() if with_bias else None
    low = nn.functional.linear(nn.functional.linear(states, a), b)
    expected = nn.functional.linear(states, weight, bias) + 1.5 * low
    found = low_rank_linear(states, weight, bias, a, b, 1.5)
    torch.testing.assert_close(found, expected)
    outer = torch.randn(expected.shape, generator=rng)
    gradients = (torch.autograd.grad((one * outer).sum(), (states, a, b)) for one in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_matmuls_of_a_layer_with_its_adapter_run_in_the_type_of_the_frozen_weight() -> None:
    a, b = torch.randn(4, 12, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    states = torch.randn(5, 12, dtype=torch.bfloat16, requires_grad=True)
    found = low_rank_linear(states, torch.randn(7, 12, dtype=torch.bfloat16), None, a, b, 2.0)
    assert found.dtype == torch.bfloat16
    gradients = torch.autograd.grad(found.float().sum(), (states, a, b))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("masks", [True, False])
def test_uniform_rows_equal_rows_that_are_found_by_their_tokens(masks: bool) -> None:
    model = random_model("llama", tied=False)
    gate_model(model, MASKS, 4, 8.0, ["q_proj", "down_proj"])
    for parameter in trainable_parameters(model):
        nn.init.normal_(parameter, std=0.1)
    ids = torch.full((1, 6), MASKS[0]) if masks else torch.arange(6)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with uniform_rows(model, masks):
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
        with uniform_rows(model, not masks):
            assert not torch.allclose(model(input_ids=ids).logits, expected)
        assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.fixture(params=MODELS)
def tied(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = MODELS[request.param]().eval().requires_grad_(False)
    return made


def test_a_token_is_read_from_its_input_row_and_predicted_from_the_table(tied: PreTrainedModel) -> None:
    table = tied.get_input_embeddings().weight
    assert tied.get_output_embeddings().weight is table
    ids = torch.tensor([[5, FORK, 7], [5, OTHER, 7]])
    before = tied(input_ids=ids).logits
    InputRows((FORK,), table[[OTHER]].clone()).apply(tied)
    after = tied(input_ids=ids).logits
    torch.testing.assert_close(after[0], before[1])  # [Fork] now means what the other token means
    assert not torch.allclose(before[0, 1], before[1, 1])
    assert torch.equal(after[1], before[1])  # no other row and no logit changed


def test_input_rows_follow_the_type_of_the_model_and_are_not_stored_with_it(tied: PreTrainedModel) -> None:
    names = set(tied.state_dict())
    InputRows((FORK, OTHER), torch.randn(2, SIZES["hidden_size"])).apply(tied)
    assert set(tied.state_dict()) == names
    tied.to(torch.float16)
    assert tied(input_ids=torch.tensor([[FORK, OTHER, 3]])).logits.dtype == torch.float16


COUNT, BLOCKS = 3, 2


def test_the_lines_of_a_row_are_its_own_and_those_of_each_head() -> None:
    quiet_libraries()
    model, ids = random_model("llama", tied=False), [5, 99, 204, 17, 33, 8, 61]
    tensors = random_heads(COUNT, BLOCKS, HIDDEN, model.config.vocab_size)
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]  # behind the final norm
    plain = torch_engine(random_model("llama", tied=False))
    Heads(COUNT, BLOCKS, tensors).apply(model)
    heads = torch_engine(model)
    assert plain.signature.lines == 1
    assert heads.signature.lines == 1 + COUNT
    own, lines = (engine.run(rows_batch(ids))[0] for engine in (plain, heads))
    assert lines.shape == (len(ids) * (1 + COUNT), model.config.vocab_size)
    assert np.array_equal(lines[:: 1 + COUNT], own)
    for head, expected in enumerate(reference_lines(tensors, hidden, COUNT, BLOCKS), 1):
        assert np.abs(lines[head :: 1 + COUNT] - expected.numpy()).max() < 1e-4 * float(expected.abs().max())


def test_heads_count_as_logits_of_a_row() -> None:
    signature = Signature(2, 2, 8, 32_000, "float16", "scatter", lines=6)
    assert signature.row_logits == 6 * 32_000
    assert logit_rows(4096, 32_000) == 262
    assert logit_rows(4096, signature.row_logits) == 128
    assert signature.outputs[0].shape == ("B", "L", 32_000)


def test_the_tolerance_is_relative_to_the_largest_logit_and_no_logit_may_be_infinite() -> None:
    model = random_model()
    for largest in (0.5, 1.0, 50.0):
        expected = torch.linspace(-0.1, largest, 100)
        limit = 1e-4 * max(1.0, largest)
        require_equal_logits(model, "in another way", expected + 0.9 * limit, expected)
        for wrong in (-1.1 * limit, torch.nan, torch.inf):
            message = r"^the logits of LlamaForCausalLM in another way differ from .* \(expec"
            with pytest.raises(UnsupportedModel, match=message):
                require_equal_logits(model, "in another way", expected + wrong, expected)
    expected = torch.ones(3)
    require_equal_logits(random_model().bfloat16(), "in another way", expected + 0.09, expected)  # less precise


VOCAB, WIDTH, RANK = 50, 12, 5
TABLE = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1)) * 0.2


def factors() -> Factors:
    rng = torch.Generator().manual_seed(2)
    return Factors(*(torch.randn(WIDTH, RANK, generator=rng) for _ in range(2)))


def test_a_new_correction_changes_no_score_whatever_the_scale_of_the_embeddings() -> None:
    fresh = []
    for scale in (1.0, 1e-3, 100.0):
        torch.manual_seed(0)
        fresh.append(one := DraftCorrection(TABLE * scale, RANK))
        assert not one(TABLE, torch.arange(9), torch.arange(18).view(9, 2)).any()
        torch.testing.assert_close(one.before, fresh[0].before)
        size = float((TABLE * scale * one.scale @ one.before.detach()).std())
        assert 0.5 < size < 2  # neither vanishing nor large at the start


def test_corrections_are_products_of_the_vectors_in_the_tables() -> None:
    found = DraftCorrection(TABLE, RANK, factors())
    for given, kept in zip(factors().state().values(), found.factors().state().values(), strict=True):
        torch.testing.assert_close(kept, given)
    before, candidates = torch.tensor([3, 7]), torch.tensor([[1, 2, 3], [4, 9, 0]])
    left, right = found.factors().tables(TABLE)
    expected = torch.einsum("br,bcr->bc", left[before].float(), right[candidates].float())
    torch.testing.assert_close(found(TABLE, before, candidates), expected)


def test_the_loss_is_the_cross_entropy_over_the_candidates() -> None:
    found = DraftCorrection(TABLE, RANK, factors())
    before, candidates = torch.tensor([3, 7, 8]), torch.tensor([[1, 2, 3], [4, 9, 0], [4, 9, 0]])
    scores, targets = torch.randn(3, 3), torch.tensor([2, 9, 5])
    losses, correct = found.losses(TABLE, before, candidates, scores, targets)
    corrected = scores + found(TABLE, before, candidates)
    expected = torch.nn.functional.cross_entropy(corrected[:2], torch.tensor([1, 1]), reduction="none")
    torch.testing.assert_close(losses[:2], expected)
    assert losses[2] == 0  # the target is not among the candidates
    assert correct.tolist() == [*(corrected[:2].argmax(-1) == 1).float().tolist(), 0]
