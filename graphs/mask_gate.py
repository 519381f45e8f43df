"""Mask gate: which rows of a call are mask rows, for all parts of a model that act on these only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Gate:
    """The mask rows of the current call; all parts of a model that act on them share one gate."""

    def __init__(self, mask_ids: Sequence[int]) -> None:
        self.mask_ids = tuple(dict.fromkeys(mask_ids))
        self.rows: Tensor | None = None  # B x T x 1, True = mask row; None outside of calls
        self.uniform: bool | None = None  # True: all rows are mask rows; False: none is; None: as the input ids say

    def open(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Forward pre-hook of a model: find the mask rows in its input ids."""
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if not isinstance(ids, Tensor):
            raise ValueError(
                f"{type(module).__name__} was called without input_ids: expected input_ids, to find the mask rows"
            )
        self.rows = reduce(torch.logical_or, (ids == token for token in self.mask_ids))[..., None]

    def close(self, module: nn.Module, arguments: tuple[Any, ...], output: object) -> None:
        """Forward hook of a model: forget the mask rows of the call."""
        self.rows = None

    @property
    def open_rows(self) -> Tensor:
        """The mask rows of the current call: B x T x 1."""
        if self.rows is None:
            raise RuntimeError(
                "a gated module was called while its model does not run: call the model with input_ids; "
                "for gradient checkpointing use checkpoint_layers"
            )
        return self.rows

    def rows_for(self, states: Tensor) -> Tensor:
        """The mask rows in the shape of a module's input: B x T x 1, or B * T x 1."""
        rows = self.open_rows
        return rows if states.dim() == rows.dim() else rows.flatten(0, 1)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for torch's gradient checkpointing: recompute with the mask rows of the original forward pass."""
        return nullcontext(), _Recomputation(self, self.rows)


class _Recomputation(AbstractContextManager[None]):
    """A gate set to the mask rows of an earlier forward pass."""

    def __init__(self, gate: Gate, rows: Tensor | None) -> None:
        self._gate = gate
        self._rows = rows
        self._previous: Tensor | None = None

    def __enter__(self) -> None:
        self._previous, self._gate.rows = self._gate.rows, self._rows

    def __exit__(self, *raised: object) -> None:
        self._gate.rows = self._previous


def gate_of(model: PreTrainedModel, mask_ids: Sequence[int]) -> Gate:
    """The gate of a model, which all its parts share; a new one opens with each call of the model."""
    owned = (getattr(module, "gate", None) for module in model.modules())
    found = next((gate for gate in owned if isinstance(gate, Gate)), None)
    if found is not None:
        return found
    gate = Gate(mask_ids)
    # The base model is hooked as well: callers may run it alone, for hidden states without logits.
    for caller in dict.fromkeys((model, model.base_model)):
        caller.register_forward_pre_hook(gate.open, with_kwargs=True)
        caller.register_forward_hook(gate.close)
    return gate
