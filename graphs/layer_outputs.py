"""Layer outputs: outputs of the decoder layers and their attention, to find the layer where two runs differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from spaceport.graphs.decoder import Decoder


class DecoderWithLayerOutputs(nn.Module):
    """A decoder that appends its layer outputs to its outputs; its parameters keep their names."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.model = decoder.model
        self._forward = decoder.forward
        self._layers = decoder_layers(decoder.model, decoder.signature.layers)
        self.names: tuple[str, ...] = ()  # of the layer outputs that the last call returned

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with recorded_layer_outputs(self._layers) as recorded:
            outputs = self._forward(*inputs)
        self.names = tuple(recorded)
        return (*outputs, *recorded.values())


def attention_output_name(layer: int) -> str:
    """The name of the output of a layer's attention."""
    return f"layers.{layer}.attention"


def layer_output_name(layer: int) -> str:
    """The name of the output of a layer."""
    return f"layers.{layer}.output"


def decoder_layers(module: nn.Module, count: int) -> tuple[nn.Module, ...]:
    """The decoder layers: the outermost module list of this length; empty if there is none."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return tuple(part)
    return ()


@contextmanager
def recorded_layer_outputs(layers: tuple[nn.Module, ...]) -> Iterator[dict[str, Tensor]]:
    """A dictionary of layer outputs and attention outputs by name, filled while the model runs."""
    recorded: dict[str, Tensor] = {}
    handles = []
    for index, layer in enumerate(layers):
        handles += [
            child.register_forward_hook(_attention_hook(recorded, index), with_kwargs=True)
            for child in layer.children()
        ]
        handles.append(layer.register_forward_hook(_output_hook(recorded, index)))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _attention_hook(recorded: dict[str, Tensor], index: int) -> Any:
    """A hook that records the output of the child module that receives the KV cache: a layer's attention."""

    def record(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if any(isinstance(value, Cache) for value in (*arguments, *named.values())):
            recorded[attention_output_name(index)] = _first_tensor(output)

    return record


def _output_hook(recorded: dict[str, Tensor], index: int) -> Any:
    def record(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        recorded[layer_output_name(index)] = _first_tensor(output)

    return record


def _first_tensor(output: Any) -> Tensor:
    value = output[0] if isinstance(output, tuple) else output
    assert isinstance(value, Tensor)
    return value
