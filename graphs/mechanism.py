"""Mechanism: what a model needs to draft besides its base weights, as named tensors and a few numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField
from spaceport.graphs.traits import different_names

Shapes = Mapping[str, tuple[int, ...]]
M = TypeVar("M", bound="Mechanism")


class MechanismError(InputFault):
    """Tensors or numbers that do not belong together or to the model; the message names them."""


class Rotation(Protocol):
    """An orthogonal matrix Q by which the hidden states of an exported model are multiplied."""

    def times(self, rows: Tensor) -> Tensor:
        """rows @ Q."""


class Mechanism(ABC):
    """A part of a model with which it drafts: a subclass in its own file, and an entry of `exporter.mechanisms`."""

    # Of its entry in sar_config.json and in a manifest, and of its file of tensors.
    name: ClassVar[str]
    # Whether it acts on mask rows, so that a mask token is needed; False: it drafts instead of them; None: neither.
    needs_mask_token: ClassVar[bool | None] = None
    # Whether it only refines the drafts of others, and adds no parameters to the model.
    refines: ClassVar[bool] = False
    # Whether it replaces the attention of layers, whose keys and values then have the type of the graph.
    replaces_attention: ClassVar[bool] = False

    @property
    @abstractmethod
    def entry(self) -> dict[str, Any]:
        """Its numbers, as sar_config.json and a manifest have them."""

    @abstractmethod
    def state(self) -> Mapping[str, Tensor]:
        """Its tensors by name, as its file has them."""

    @classmethod
    @abstractmethod
    def read(cls: type[M], entry: JsonField, tensors: Mapping[str, Tensor]) -> M:
        """The mechanism with these numbers and tensors; raises if they do not belong together."""

    @abstractmethod
    def apply(self, model: PreTrainedModel, mask_ids: Sequence[int]) -> None:
        """Add it to a model, on torch's meta device by its sizes only; raises if it does not fit."""

    @property
    def heads(self) -> int:
        """Draft heads: lines of logits that it adds to each row."""
        return 0

    def check(self, config: PreTrainedConfig) -> None:  # noqa: B027
        """Raise unless it fits a model with this configuration, as far as that says."""

    def write_files(  # noqa: B027
        self, bundle: Path, model: PreTrainedModel, vocab_size: int, rotation: Rotation | None = None
    ) -> None:
        """Write what a runtime needs besides the graph into a bundle's folder."""


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has neither infinities nor NaN; one without values has none."""
    return tensor.is_meta or bool(torch.isfinite(tensor).all())


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """The shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def require_shapes(shapes: Shapes, expected: Shapes, what: str) -> None:
    """Raise unless tensors have exactly the names and shapes that a base model needs; `what` says what they are."""
    if wrong := different_names(shapes.keys(), expected.keys()):
        raise MechanismError(f"{wrong}: expected {len(expected)} {what}")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise MechanismError(f"{name} has shape {shape}: expected {expected[name]}, which the base model has")


def wrong_shapes(tensors: Mapping[str, Tensor], expected: str) -> MechanismError:
    """The error for tensors that do not have the expected names and shapes."""
    return MechanismError(f"has tensors with the shapes {shapes_of(tensors)}: expected {expected}")
