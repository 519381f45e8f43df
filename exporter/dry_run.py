"""What an export of a checkpoint would write and need, computed from its configuration without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.exporter.checkpoint_files import INDEX_FILE, indexed_files, is_gguf
from spaceport.exporter.checkpoint_source import model_config, model_without_values
from spaceport.exporter.export import ExportOptions, check_activations, exact_activations, kv_cache_of
from spaceport.exporter.export_sizes import ExportMemory, StoredBytes, export_memory, is_streamed, stored_bytes
from spaceport.exporter.mechanisms import MECHANISMS, DraftAdditions
from spaceport.exporter.sar_config import CheckpointError, read_sar_config, tensor_file
from spaceport.exporter.to_onnx import check_opset
from spaceport.graphs.contract.signature import Signature
from spaceport.graphs.decoder import expected_signature, probed_traits
from spaceport.graphs.traits import Traits, class_name, refuse_by_config

_GRAPH, _GRAPH_LAYER = 12_000, 6_000  # approximate bytes of model.onnx: in all, and per layer


def added_by(checkpoint: Checkpoint) -> DraftAdditions:
    """What the adapter folder of a checkpoint adds to its base model; raises for tensors that are not counted."""
    folder = checkpoint.adapter_folder
    if folder is None:
        raise ValueError("the checkpoint has no adapter folder: expected one, whose additions are counted")
    for mechanism in checkpoint.mechanisms:
        if mechanism.refines:
            raise CheckpointError(
                f"{tensor_file(folder.path, mechanism.name)}: has tensors that --dry-run does not count: expected an adapter "
                "or heads only; run it without --adapter"
            )
    return DraftAdditions(checkpoint.tokens.mask, folder.vocab_size, checkpoint.mechanisms)


@dataclass(frozen=True)
class DryRun:
    """What an export would write and need."""

    model_type: str
    model: str  # class of transformers
    options: ExportOptions  # with the activation format that would be used
    signature: Signature
    max_positions: int
    heads: int  # query heads
    parameters: int
    quantized: int  # parameters that would be quantized
    files: Mapping[str, int]  # bytes by name; only model.onnx.data is exact
    temporary: int  # bytes of files without a name that the export needs beside the bundle
    memory: ExportMemory
    checked_headers: bool  # whether the headers of the weight files were compared with the configuration

    @property
    def bundle(self) -> int:
        """Bytes of the bundle."""
        return sum(self.files.values())


def dry_run(folder: Path, options: ExportOptions, additions: DraftAdditions | None = None) -> DryRun:
    """What an export of the checkpoint in a folder would write; the folder may have its config.json only."""
    check_opset(options.opset, options.lowering)
    check_activations(options)
    _refuse_additions(folder)
    config = model_config(folder, options.remote_code)
    options = exact_activations(config, options)
    model = model_without_values(config, options.dtype)
    refuse_by_config(model)
    headers = {} if is_gguf(folder) else _weight_headers(folder)
    checked = _check_headers(folder, model, headers)
    streamed = is_streamed(folder, options.remote_code, model, headers)
    base_parameters = sum(parameter.numel() for parameter in model.parameters())
    if additions is not None:
        with torch.device("meta"), torch.no_grad():
            additions.add_to(model)
    traits = probed_traits(model, options.attention_implementation)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    stored = stored_bytes(model, options.dtype, options.weights, options.activations, options.lowering)
    text = config.get_text_config()
    heads = 0 if additions is None else sum(mechanism.heads for mechanism in additions.mechanisms)
    return DryRun(
        str(config.model_type),
        class_name(model),
        options,
        replace(
            expected_signature(traits, options.dtype, options.lowering, heads),
            kv_cache=kv_cache_of(model, options),
        ),
        traits.max_positions,
        int(getattr(text, "num_attention_heads", None) or traits.kv_heads),
        parameters,
        stored.quantized,
        _files(folder, stored, traits),
        stored.unnamed if streamed else 0,
        export_memory(
            model,
            options.dtype,
            traits.layers,
            streamed,
            base_parameters,
            rounds=options.rounds,
        ),
        checked,
    )


def _files(folder: Path, stored: StoredBytes, traits: Traits) -> dict[str, int]:
    """Bytes of the files of a bundle, by name."""
    files = {"model.onnx.data": stored.data, "model.onnx": _GRAPH + _GRAPH_LAYER * traits.layers}
    if (tokenizer := folder / "tokenizer.json").is_file():
        files["tokenizer.json"] = tokenizer.stat().st_size
    return files


def _refuse_additions(folder: Path) -> None:
    """Raise for a checkpoint with tensors beside its model."""
    named = {} if is_gguf(folder) else {**read_sar_config(folder).mechanisms, **MECHANISMS}
    for file in (tensor_file(folder, name) for name in named):
        if not file.exists():
            continue
        raise CheckpointError(
            f"{file}: has tensors beside the model, which --dry-run does not count: expected the base model; "
            "run it on that folder"
        )


def _weight_headers(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a folder's weight files; empty if it has none."""
    index = folder / INDEX_FILE
    names = sorted(indexed_files(index)) if index.is_file() else []
    present = [folder / name for name in names if (folder / name).is_file()]
    if names and present and len(present) < len(names):
        lost = next(name for name in names if not (folder / name).is_file())
        raise CheckpointError(
            f"{folder}: {len(names) - len(present)} of {len(names)} weight files are missing, such as {lost}: expected all "
            f"files of {INDEX_FILE}; download them"
        )
    single = folder / "model.safetensors"
    return _headers(present or ([single] if single.is_file() else []))


def _check_headers(folder: Path, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Compare the headers of safetensors files with the model; False if none fits its names."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    common = expected.keys() & shapes.keys()
    if wrong := sorted(name for name in common if shapes[name] != expected[name]):
        raise CheckpointError(
            f"{folder}: {wrong[0]} has shape {shapes[wrong[0]]}, config.json describes {expected[wrong[0]]}: expected the "
            "configuration of these weights; copy the config.json that belongs to them"
        )
    _check_output_embedding(folder, model, expected.keys() - shapes.keys() if common else set())
    return bool(common)


def _check_output_embedding(folder: Path, model: PreTrainedModel, missing: set[str]) -> None:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head and f"{name}.weight" in missing:
            raise CheckpointError(
                f"{folder}: has no {name}.weight, and tie_word_embeddings is false: expected an output embedding, or true; "
                "set tie_word_embeddings to true in config.json if the model was trained with tied embeddings"
            )


def _headers(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}: download it again") from error
    return shapes
