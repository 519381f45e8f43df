"""Streamed checkpoint: a model whose weights stay in the safetensors files of its checkpoint until a layer runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from spaceport.exporter.checkpoint_files import load_with_own_attention
from spaceport.exporter.returned_memory import return_large_arrays
from spaceport.exporter.sar_config import read_json
from spaceport.graphs.layer_outputs import decoder_layers
from spaceport.graphs.streamed_weights import Parts, Streamed, in_parts, placeholder, read_when_called, stream

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class _Stored:
    """A tensor in a safetensors file."""

    file: Path
    name: str

    def parts(self) -> Parts:
        with safe_open(self.file, "pt") as opened:
            stored = opened.get_slice(self.name)
            yield from in_parts(stored.get_shape(), stored.__getitem__)


def load_streamed(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, scratch: Path
) -> tuple[Any, dict[str, Any]] | None:
    """The model with matrices that are read when they are needed, and the loading report of transformers.

    None if transformers computes matrices of the model from several tensors of the files."""
    files = _files(folder)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not files or not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        return None
    return_large_arrays()
    state, stored = _state(files, dtype)
    model, report = load_with_own_attention(
        kind.from_pretrained,
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported by name
    )
    sources = {state[name].data_ptr(): source for name, source in stored.items()}
    parameters = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    if any(parameter.dtype != dtype or parameter.data_ptr() not in sources for parameter in parameters):
        return None
    for parameter in parameters:
        stream(parameter, Streamed(sources[parameter.data_ptr()].parts, scratch))
    model.generation_config = _generation_config(folder)
    layers = int(config.get_text_config().num_hidden_layers)
    read_when_called(model, decoder_layers(model, layers))
    return model, report


def _files(folder: Path) -> list[Path]:
    """The weight files that transformers would read."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    names = read_json(folder / _INDEX).get("weight_map", {}).values() if (folder / _INDEX).is_file() else ()
    return [folder / name for name in dict.fromkeys(names)]


def _state(files: list[Path], dtype: torch.dtype) -> tuple[dict[str, Tensor], Mapping[str, _Stored]]:
    """The tensors of the files by name, with placeholders of matrices, and where those are."""
    state: dict[str, Tensor] = {}
    stored: dict[str, _Stored] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                if len(part.get_shape()) > 1 and part.get_dtype() in ("F64", "F32", "F16", "BF16"):
                    state[name] = placeholder(torch.Size(part.get_shape()), dtype)
                    stored[name] = _Stored(file, name)
                else:
                    state[name] = opened.get_tensor(name).clone()
    return state, stored


def _generation_config(folder: Path) -> GenerationConfig:
    """The generation config that transformers reads with the weights."""
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)
