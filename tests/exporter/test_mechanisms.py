"""A mechanism from outside the package is saved, opened, exported and named by the manifest once it is registered."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint import CheckpointError, TokenFlags, load_model, open_checkpoint
from spaceport.exporter.checkpoint_files import own_files
from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.mechanisms import MECHANISMS, write_mechanisms
from spaceport.graphs.contract.json_fields import JsonField
from spaceport.graphs.gated import gate_of
from spaceport.graphs.mechanism import Mechanism, MechanismError
from spaceport.runtime.bundle import read_manifest
from support.mask_rows import bundle_engine, require_other_mask_rows_alone, torch_engine, walk
from support.paths import TINY

MASK = 4  # of the tiny checkpoint


@dataclass(frozen=True, eq=False)
class MaskBias(Mechanism):
    """A vector that is added to the last hidden state of mask rows."""

    name: ClassVar[str] = "mask_bias"
    needs_mask_token: ClassVar[bool | None] = True

    factor: float
    bias: Tensor  # H

    @property
    def entry(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def state(self) -> Mapping[str, Tensor]:
        return {"bias": self.bias}

    @classmethod
    def read(cls, entry: JsonField, tensors: Mapping[str, Tensor]) -> MaskBias:
        return cls(entry.exactly("factor")["factor"].number(), tensors["bias"])

    def apply(self, model: PreTrainedModel, mask_ids: Sequence[int]) -> None:
        gate, hidden_size = gate_of(model, mask_ids), model.config.hidden_size
        if len(self.bias) != hidden_size:
            raise MechanismError(f"has a bias of size {len(self.bias)}: expected {hidden_size}")
        layer = cast(nn.Module, model.model.layers[-1])
        layer.register_buffer(self.name, self.bias * self.factor, persistent=False)

        def add(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
            return torch.where(gate.open_rows, output + getattr(module, self.name), output)

        layer.register_forward_hook(add)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny checkpoint with a bias of mask rows."""
    monkeypatch.setitem(MECHANISMS, MaskBias.name, MaskBias)
    folder = shutil.copytree(TINY, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("make.py", "__pycache__"))
    bias = torch.randn(96, generator=torch.Generator().manual_seed(0))
    write_mechanisms(folder, [MaskBias(3.0, bias)])
    return folder


def test_it_is_opened_as_it_was_saved(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_files(checkpoint) == (checkpoint / "mask_bias.safetensors",)
    opened = open_checkpoint(checkpoint, TokenFlags())
    assert opened.drafts.mechanisms == {"mask_bias": {"factor": 3.0}}
    assert (opened.drafts.predictor, opened.drafts.max_tokens) == ("mask", 5)
    bias = opened.mechanism(MaskBias)
    assert bias is not None
    assert bias.bias.shape == (96,)
    write_mechanisms(checkpoint, [MaskBias(3.0, torch.zeros(95))])
    with pytest.raises(
        CheckpointError, match=r"mask_bias.safetensors: has a bias of size 95: expected 96; copy the file"
    ):
        load_model(open_checkpoint(checkpoint, TokenFlags()), "float32")
    monkeypatch.delitem(MECHANISMS, MaskBias.name)
    with pytest.raises(
        CheckpointError, match="mechanisms has 'mask_bias': expected draft_correction, input_rows, mask_"
    ):
        open_checkpoint(checkpoint, TokenFlags())


@pytest.mark.slow
def test_it_is_exported_and_named_by_the_manifest(checkpoint: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "bundle", ExportOptions())
    drafts = read_manifest(tmp_path / "bundle").drafts
    assert drafts.mechanisms == {"mask_bias": {"factor": 3.0}}
    found = require_other_mask_rows_alone(bundle_engine(tiny_bundle), bundle_engine(tmp_path / "bundle"), MASK)
    model = load_model(open_checkpoint(checkpoint, TokenFlags()), "float32")
    np.testing.assert_allclose(found, walk(torch_engine(model), MASK)[1], atol=1e-3)
