"""Marks: the values inside a graph that tell in which layer two runs of it part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from spaceport.graphs.decoder import Decoder


class DecoderWithLayerOutputs(nn.Module):
    """A decoder that gives its marks behind its outputs; its parameters have the names that they have in the decoder."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.model = decoder.model
        self._forward = decoder.forward
        self._stack = decoder_layers(decoder.model, decoder.signature.layers)
        self.names: tuple[str, ...] = ()  # of the marks that the last call gave

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with recorded_layer_outputs(self._stack) as marks:
            outputs = self._forward(*inputs)
        self.names = tuple(marks)
        return (*outputs, *marks.values())


def attention_output_name(layer: int) -> str:
    """The name of what a layer's attention gives."""
    return f"layers.{layer}.attention"


def layer_output_name(layer: int) -> str:
    """The name of what a layer gives to the next one."""
    return f"layers.{layer}.output"


def decoder_layers(module: nn.Module, layers: int) -> tuple[nn.Module, ...]:
    """The decoder layers: the outermost list of as many modules as there are layers; nothing if there is none."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == layers:
            return tuple(part)
    return ()


@contextmanager
def recorded_layer_outputs(stack: tuple[nn.Module, ...]) -> Iterator[dict[str, Tensor]]:
    """What each layer makes of its rows, and what its attention does, by name, filled while the layers run."""
    marks: dict[str, Tensor] = {}
    handles = []
    for index, layer in enumerate(stack):
        handles += [
            child.register_forward_hook(_attention(marks, index), with_kwargs=True) for child in layer.children()
        ]
        handles.append(layer.register_forward_hook(_output(marks, index)))
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()


def _attention(marks: dict[str, Tensor], index: int) -> Any:
    """The part of a layer that is given the cache is its attention."""

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if any(isinstance(value, Cache) for value in (*given, *named.values())):
            marks[attention_output_name(index)] = _first(output)

    return note


def _output(marks: dict[str, Tensor], index: int) -> Any:
    def note(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        marks[layer_output_name(index)] = _first(output)

    return note


def _first(output: Any) -> Tensor:
    value = output[0] if isinstance(output, tuple) else output
    assert isinstance(value, Tensor)
    return value
