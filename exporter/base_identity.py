"""Base identity: what an adapter folder records about its base model, to refuse any other model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.json_fields import JsonField
from spaceport.graphs.contract.signature import PRECISIONS, Precision
from spaceport.graphs.streamed_weights import values_of

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_VALUES = 4096  # of each weight tensor, evenly spaced; a weight that any training changed differs in nearly all values


@dataclass(frozen=True)
class BaseIdentity:
    """The sizes and weights of a base model."""

    name: str  # of its folder or file, for messages
    sizes: Mapping[str, int]  # of its configuration
    weights: Mapping[str, str]  # SHA-256 of sampled weights, by the data type that they are rounded to

    def check_config(self, config: PreTrainedConfig) -> None:
        """Raise if a model with this configuration has other sizes."""
        found = sizes_of(config)
        for name, size in self.sizes.items():
            if found.get(name) != size:
                raise CheckpointError(
                    f"its {name} is {found.get(name)}, the adapter was trained on {self.name} with {size}: expected that "
                    "model as base"
                )

    def check_weights(self, model: PreTrainedModel, dtype: Precision) -> None:
        """Raise if a model that was loaded in a data type has other weights."""
        found, expected = weights_digests(model, (dtype,))[dtype], self.weights[dtype]
        if found != expected:
            raise CheckpointError(
                f"its weights in {dtype} have the digest {found[:12]}, the adapter was trained on {self.name} with "
                f"{expected[:12]}: expected that model as base, neither fine-tuned nor quantized in another way"
            )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def identity_of(name: str, model: PreTrainedModel) -> BaseIdentity:
    """The identity of a model in float32, before anything is changed in it."""
    return BaseIdentity(name, sizes_of(model.config), weights_digests(model, PRECISIONS))


def identity_from(field: JsonField) -> BaseIdentity:
    """The identity in a parsed JSON file."""
    entries = field.entries(BaseIdentity)
    sizes = {name: size.whole(1) for name, size in entries["sizes"].members().items()}
    weights: dict[str, str] = {dtype: entries["weights"].entry(dtype).text() for dtype in PRECISIONS}
    return BaseIdentity(entries["name"].text(), sizes, weights)


def sizes_of(config: PreTrainedConfig) -> dict[str, int]:
    """The sizes of a configuration by name, without those that it lacks."""
    found = {name: getattr(config.get_text_config(), name, None) for name in _SIZES}
    return {name: size for name, size in found.items() if isinstance(size, int)}


def weights_digests(model: PreTrainedModel, dtypes: Sequence[Precision]) -> dict[str, str]:
    """SHA-256 of values of every weight tensor, rounded to each of these data types.

    They are equal for every file format of the same weights. Each tensor is read once."""
    digests = {dtype: hashlib.sha256() for dtype in dtypes}
    for name, parameter in sorted(model.named_parameters()):
        flat = values_of(parameter).flatten()
        values = flat[:: max(1, flat.numel() // _VALUES)].to("cpu")
        for dtype, digest in digests.items():
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(values.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().tobytes())
    return {dtype: digest.hexdigest() for dtype, digest in digests.items()}
