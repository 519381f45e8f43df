"""Streamed weights: parameters whose values are read when a layer runs, so that one layer at a time is in memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_ATTRIBUTE = "streamed"  # of a parameter


@dataclass(frozen=True)
class Streamed:
    """Where the values of a parameter come from."""

    read: Callable[[], Tensor]  # the values, in the type of the parameter
    folder: Path  # for what is computed from them


def placeholder(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape without memory of its own: NaN, so that a use without values changes every logit."""
    return torch.full((), float("nan"), dtype=dtype).expand(shape)


def stream(parameter: Tensor, source: Streamed) -> None:
    """Replace the values of a parameter by a placeholder; they are read from now on."""
    parameter.data = placeholder(parameter.shape, parameter.dtype)
    setattr(parameter, _ATTRIBUTE, source)


def source_of(parameter: Tensor) -> Streamed | None:
    """The source of a streamed parameter; None for a parameter with values in memory."""
    found: Streamed | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def values_of(parameter: Tensor) -> Tensor:
    """The values of a parameter, read if it is streamed."""
    source = source_of(parameter)
    return parameter.detach() if source is None else source.read()


def keep_values(parameter: Tensor) -> None:
    """Hold the values of a parameter in memory from now on."""
    source = source_of(parameter)
    if source is not None:
        parameter.data = source.read().clone()
        delattr(parameter, _ATTRIBUTE)


def replace_values(parameter: Tensor, compute: Callable[[], Tensor]) -> None:
    """Replace the values of a parameter; those of a streamed parameter are computed whenever they are needed."""
    source = source_of(parameter)
    if source is None:
        parameter.data.copy_(compute())
    else:
        dtype = parameter.dtype
        stream(parameter, Streamed(lambda: compute().to(dtype).contiguous(), source.folder))


def copy_of(parameter: Tensor) -> nn.Parameter:
    """A parameter with the same values that shares nothing with the given one."""
    source = source_of(parameter)
    if source is None:
        return nn.Parameter(parameter.detach().clone(), requires_grad=False)
    copied = nn.Parameter(parameter.detach(), requires_grad=False)
    stream(copied, source)
    return copied


def stored_beside(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that was computed from a parameter: on disk if the parameter is streamed, otherwise unchanged."""
    source = source_of(parameter)
    return tensor if source is None or not tensor.numel() else on_disk(tensor, source.folder)


def on_disk(tensor: Tensor, folder: Path) -> Tensor:
    """A copy of a tensor in a file without a name, mapped into memory: its pages can be reclaimed at any time."""
    with TemporaryFile(dir=folder) as file:
        tensor.contiguous().view(torch.uint8).numpy().tofile(file)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)


def read_when_called(model: PreTrainedModel, layers: tuple[nn.Module, ...]) -> None:
    """Read the streamed parameters of each decoder layer, and of each module outside of them, while it runs."""
    inner = {id(module) for layer in layers for module in layer.modules()}
    owners = [module for module in model.modules() if id(module) not in inner and _own(module, recurse=False)]
    for module, recurse in [(layer, True) for layer in layers] + [(module, False) for module in owners]:
        module.register_forward_pre_hook(_load(recurse))
        module.register_forward_hook(_drop(recurse))


def _own(module: nn.Module, recurse: bool) -> list[Tensor]:
    return [parameter for parameter in module.parameters(recurse) if source_of(parameter) is not None]


def _load(recurse: bool) -> Any:
    def load(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not torch.compiler.is_exporting():  # a traced module has no values
            for parameter in _own(module, recurse):
                parameter.data = values_of(parameter)

    return load


def _drop(recurse: bool) -> Any:
    def drop(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_exporting():
            for parameter in _own(module, recurse):
                parameter.data = placeholder(parameter.shape, parameter.dtype)

    return drop
