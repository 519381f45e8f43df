"""Export memory: an estimate of the peak memory of an export, from the shapes of its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint_files import is_converted, is_gguf
from spaceport.graphs.calibration import sample_bytes
from spaceport.graphs.contract.dtypes import DTYPES
from spaceport.graphs.contract.signature import Precision
from spaceport.graphs.decoder import decoder_layers

# See docs/dry_run.md for the measurements.
_LIBRARIES, _PARTS = 300_000_000, 50_000_000  # of a streamed export: libraries, and parts of 16 MB in several forms
_GRAPH_LAYER = 8_000_000  # of the traced graph, per layer
_MATRICES = 1.3  # the largest layer or embedding, with what is computed from it
_IN_MEMORY, _COPIES = 600_000_000, 2  # of an export of a model in memory: libraries and graph; bytes per byte of it


@dataclass(frozen=True)
class ExportMemory:
    """Estimated peak memory of an export, in bytes."""

    streamed: bool  # whether weights are read layer by layer; otherwise the model is in memory
    libraries: int
    graph: int  # traced graph
    weights: int

    @property
    def total(self) -> int:
        return self.libraries + self.graph + self.weights


def is_streamed(
    folder: Path, remote_code: bool, model: PreTrainedModel, headers: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether an export reads the weights of a base model layer by layer.

    `headers` has the shapes of the tensors in its safetensors files; it is empty if there are no such files yet."""
    if is_gguf(folder) or is_converted(folder) or remote_code:
        return False
    matrices = Counter(tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() > 1)
    stored = Counter(shape for shape in headers.values() if len(shape) > 1)
    return not headers or matrices <= stored


def export_memory(
    model: PreTrainedModel, dtype: Precision, layers: int, streamed: bool, base_parameters: int, rounds: bool = False
) -> ExportMemory:
    """The memory of an export of a model, whose base model has this number of parameters.

    If drafts add others, these and both embeddings are in memory; so are sampled texts if it `rounds` weights by GPTQ."""
    size, parameters = DTYPES[dtype].bytes, _count(model)
    if not streamed:
        return ExportMemory(False, _IN_MEMORY, 0, _COPIES * parameters * size)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    outer = {id(module.weight): module.weight.numel() for module in embeddings if module is not None}
    largest = max([*map(_count, decoder_layers(model, layers)), *outer.values()])
    held = sum(outer.values()) + max(0, parameters - base_parameters) if parameters != base_parameters else 0
    weights = int(size * (_MATRICES * largest + held)) + (sample_bytes(model) if rounds else 0)
    return ExportMemory(True, _LIBRARIES + _PARTS, layers * _GRAPH_LAYER, weights)


def _count(module: nn.Module) -> int:
    """Parameters of a module, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())
