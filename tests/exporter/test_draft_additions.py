"""Draft additions: a model without values gets the tensors that an adopted one has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint
from spaceport.exporter.draft_additions import add_without_values, added_by
from spaceport.tools.adopt.adopt import additions_of, plan_adoption, write_adoption
from spaceport.tools.adopt.given import Paths, Request, read_given
from support.published_methods import METHODS


@pytest.mark.parametrize("name", ["uno", "medusa"])
def test_an_adopted_model_has_these_tensors(name: str, tmp_path: Path) -> None:
    model = METHODS[name](tmp_path)
    slots = 13 if name == "uno" else None  # more new tokens than free rows of the embedding table
    found = plan_adoption(read_given(Paths(model.base, model.weights, None), Request(max_mask_slots=slots)))
    write_adoption(*found, tmp_path / "adapter", overwrite=False)
    opened = open_checkpoint(model.base, TokenFlags(), adapter=tmp_path / "adapter")
    adopted = load_model(opened, "float32")
    _, plan, checkpoint = found
    for additions in (additions_of(plan, checkpoint), added_by(opened)):
        with torch.device("meta"), torch.no_grad():
            empty = AutoModelForCausalLM.from_config(checkpoint.config)
            add_without_values(empty, additions)
        assert {name: tensor.shape for name, tensor in empty.named_parameters()} == {
            name: tensor.shape for name, tensor in adopted.named_parameters()
        }
