"""Parameters whose values are read when a layer runs, so that one layer at a time is in memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

_ATTRIBUTE = "streamed"  # of a parameter
# Values of a parameter that are read or computed together: the arrays stay in the CPU's caches. Larger ones would leave
# gaps in the memory that the process does not return.
_PART = 1 << 18
_ALIGNMENT = 64  # bytes, as of a tensor that PyTorch allocates
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc
_LARGE = 1 << 21  # bytes; above the parts of weights that are computed together, which use the same memory again

# Some values of a parameter: those with these indices of its first axis, in any type.
ReadRows = Callable[[slice], Tensor]
Parts = Iterator[tuple[slice, Tensor]]  # indices of the first axis in order, and the values there
ReadParts = Callable[[], Parts]  # in any type


@dataclass(frozen=True)
class Streamed:
    """Where the values of a parameter come from."""

    parts: ReadParts
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
    source: Streamed | None = getattr(parameter, _ATTRIBUTE, None)
    return source


def values_of(parameter: Tensor) -> Tensor:
    """The values of a parameter, read if it is streamed."""
    if source_of(parameter) is None:
        return parameter.detach()
    return _read_into(parameter, torch.empty(parameter.shape, dtype=parameter.dtype))


def transposed_values_of(parameter: Tensor) -> Tensor:
    """The transposed values of a matrix, without another copy of it in memory."""
    values = torch.empty(parameter.shape[::-1], dtype=parameter.dtype)
    for rows, part in rows_of(parameter):
        values[:, rows] = part.T
    return values


def rows_of(parameter: Tensor) -> Parts:
    """The values of a parameter in parts, read if it is streamed."""
    source = source_of(parameter)
    if source is None:
        return in_parts(parameter.shape, parameter.detach().__getitem__)
    return ((rows, part.to(parameter.dtype)) for rows, part in source.parts())


def in_parts(shape: Sequence[int], read: ReadRows) -> Parts:
    """The values of a parameter of this shape in parts of about 262,144."""
    step = max(1, _PART // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        rows = slice(start, min(start + step, shape[0]))
        yield rows, read(rows)


def keep_values(parameter: Tensor) -> None:
    """Hold the values of a parameter in memory from now on."""
    source = source_of(parameter)
    if source is not None:
        parameter.data = values_of(parameter)
        delattr(parameter, _ATTRIBUTE)


def replace_values(parameter: Tensor, compute: ReadRows) -> None:
    """Replace the values of a parameter; those of a streamed parameter are computed whenever they are needed."""
    source = source_of(parameter)
    if source is not None:
        stream(parameter, Streamed(partial(in_parts, parameter.shape, compute), source.folder))
        return
    for rows, values in in_parts(parameter.shape, compute):
        parameter.data[rows] = values


def stored_beside(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that was computed from a parameter: on disk if the parameter is streamed, otherwise unchanged."""
    source = source_of(parameter)
    return tensor if source is None or not tensor.numel() else on_disk(tensor, source.folder)


def on_disk(tensor: Tensor, folder: Path) -> Tensor:
    """A copy of a tensor in a file without a name, mapped into memory: its pages can be reclaimed at any time."""
    with TemporaryFile(dir=folder) as file:
        file.write(tensor.contiguous().view(torch.uint8).numpy().data)  # tofile hides why it fails
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)


def read_when_called(model: PreTrainedModel, layers: tuple[nn.Module, ...]) -> None:
    """Read the streamed parameters of each decoder layer, and of each module outside of them, while it runs."""
    inner = {id(module) for layer in layers for module in layer.modules()}
    owners = [module for module in model.modules() if id(module) not in inner and _own(module, recurse=False)]
    buffer = _Buffer([(layer, True) for layer in layers] + [(module, False) for module in owners])
    model.register_forward_pre_hook(buffer.allocate)
    model.register_forward_hook(buffer.release)


class _Buffer:
    """Memory for the streamed parameters of the module that runs, used again by the next one.

    New memory for each module would take most of the time of reading: the system clears each page of it first."""

    def __init__(self, modules: list[tuple[nn.Module, bool]]) -> None:
        self._modules = modules  # and whether the parameters of their parts belong to them
        self._memory = torch.empty(0, dtype=torch.uint8)  # empty while the model does not run
        self._used = 0  # bytes; modules that run inside of others have the following part
        for module, recurse in modules:
            module.register_forward_pre_hook(partial(self._load, recurse))
            module.register_forward_hook(partial(self._drop, recurse))

    def allocate(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not torch.compiler.is_exporting():  # a traced module has no values
            sizes = [sum(map(_size, _own(module, recurse))) for module, recurse in self._modules]
            self._memory, self._used = torch.empty(max(sizes, default=0), dtype=torch.uint8), 0

    def release(self, model: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _load(self, recurse: bool, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not torch.compiler.is_exporting():
            for parameter in _own(module, recurse):
                parameter.data = _read_into(parameter, self._take(parameter))

    def _drop(self, recurse: bool, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_exporting():
            for parameter in _own(module, recurse):
                parameter.data = placeholder(parameter.shape, parameter.dtype)
                self._used = max(0, self._used - _size(parameter))

    def _take(self, parameter: Tensor) -> Tensor:
        """Memory for a parameter: new memory if the module was called without its model."""
        start, self._used = self._used, self._used + _size(parameter)
        if self._used > len(self._memory):
            return torch.empty(parameter.shape, dtype=parameter.dtype)
        return self._memory[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)


def _own(module: nn.Module, recurse: bool) -> list[Tensor]:
    return [parameter for parameter in module.parameters(recurse) if source_of(parameter) is not None]


def _size(parameter: Tensor) -> int:
    """Bytes of a parameter in the memory of its layer."""
    return -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT


def _read_into(parameter: Tensor, memory: Tensor) -> Tensor:
    source = source_of(parameter)
    assert source is not None
    for rows, part in source.parts():
        memory[rows] = part
    return memory


def _stored_parts(file: Path, name: str) -> Parts:
    with safe_open(file, "pt") as opened:
        stored = opened.get_slice(name)
        yield from in_parts(stored.get_shape(), stored.__getitem__)


def with_placeholders(files: Sequence[Path], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[int, ReadParts]]:
    """The tensors of safetensors files by name, with placeholders of matrices, and how those are read, by address."""
    state: dict[str, Tensor] = {}
    sources: dict[int, ReadParts] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                if len(part.get_shape()) > 1 and part.get_dtype() in ("F64", "F32", "F16", "BF16"):
                    state[name] = placeholder(torch.Size(part.get_shape()), dtype)
                    sources[state[name].data_ptr()] = partial(_stored_parts, file, name)
                else:
                    state[name] = opened.get_tensor(name).clone()
    return state, sources


def stream_matrices(
    model: PreTrainedModel, layers: tuple[nn.Module, ...], sources: Mapping[int, ReadParts], folder: Path
) -> bool:
    """Stream the matrices of a model that was loaded with placeholders, whose sources are by their addresses.

    False, and nothing is changed, if one of the matrices is not a placeholder itself."""
    parameters = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    if any(parameter.data_ptr() not in sources for parameter in parameters):
        return False
    for parameter in parameters:
        stream(parameter, Streamed(sources[parameter.data_ptr()], folder))
    read_when_called(model, layers)
    return True


def return_large_arrays() -> None:
    """Allocate arrays of 2 MB and more each in memory of its own, from now on.

    By default, glibc raises its limit up to 32 MB. Layers then leave gaps between small tensors that stay: an export
    of 0.57 billion parameters with int8 layers reached 1.0 GB instead of 0.64 GB. Other C libraries are not changed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
