"""Mask gate: the mask rows of a call, in one gate for all parts of a model."""

from __future__ import annotations

import pytest
import torch

from spaceport.graphs.decoder import decoder_of
from spaceport.graphs.gated import gate_model
from spaceport.graphs.mask_gate import Gate, gate_of
from spaceport.graphs.preloaded_slots import PreloadedSlots, add_preloaded_slots, slots_of
from support.gguf_files import random_model

MASKS = (600, 601)


def test_an_adapter_and_slots_share_one_gate() -> None:
    model = random_model("llama", tied=False)
    gate_model(model, MASKS, 2, 4.0, ["q_proj"])
    config = model.config
    shape = (config.num_hidden_layers, config.num_key_value_heads, 5, config.head_dim)
    add_preloaded_slots(model, MASKS, PreloadedSlots(torch.ones(shape), torch.ones(shape)))
    gates = {id(module.gate) for module in model.modules() if isinstance(getattr(module, "gate", None), Gate)}
    assert len(gates) == 1
    assert [found.count for found in slots_of(model)] == [5] * 2
    decoder_of(model, "scatter", "plain")  # the comparison with the unmodified model


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
