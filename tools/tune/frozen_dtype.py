"""Frozen dtype: frozen weights of a model in a smaller type while it trains, so that they are converted only once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def convert_frozen(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Convert the parameters without gradients; calling the result restores their exact values."""
    originals: dict[nn.Parameter, Tensor] = {
        parameter: parameter.data
        for parameter in model.parameters()
        if not parameter.requires_grad and parameter.is_floating_point()
    }
    for parameter, values in originals.items():
        parameter.data = values.to(dtype)

    def restore() -> None:
        for parameter, values in originals.items():
            parameter.data = values.to(parameter.device)

    return restore
