"""Checkpoint files: the checks of a checkpoint's files that need neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from spaceport.exporter.gguf_file import GgufFile, read_gguf
from spaceport.exporter.sar_config import CheckpointError, SarConfig, read_json, read_optional_json, read_sar_config
from spaceport.graphs.contract.json_fields import short

# Upper limits of the sizes in a configuration, by the names that families give them; far above every known model.
_LIMITS = {
    r"(num|n)_\w*layers?|n_layer|\w+_layers|depth": 4096,
    r"\w*heads?|\w*experts?|\w*experts_per_tok|\w*groups?": 2**16,
    r"\w*(size|dim|rank|embd|inner|ctx|positions?|embeddings|window)|d_\w+|dff": 2**31 - 1,
}

BASE_FILE = "base.json"  # of an adapter folder
GENERATION_FILE, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
INDEX_FILE = "model.safetensors.index.json"  # of weights in several files
_SINGLE, _PICKLES_INDEX = "model.safetensors", "pytorch_model.bin.index.json"

_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
# Published with code of their own for these values of model_type; loaded as families that transformers ships.
CONVERTED_TYPES = ("chatglm", "internlm", "qwen")
TIKTOKEN_FILE = "qwen.tiktoken"
_EXPECTED = "expected a checkpoint (config.json, *.safetensors, tokenizer)"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint folder or GGUF file, and what its small files hold."""

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json; empty for a GGUF file
    sar_config: SarConfig = field(default_factory=SarConfig)
    weights: tuple[Path, ...] = ()  # of a folder: with the model's own weights
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json; empty without it
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json; the same

    @cached_property
    def gguf(self) -> GgufFile | None:
        """The metadata of a GGUF file, read when it is used; None for a folder."""
        return read_gguf(self.path) if is_gguf(self.path) else None

    @property
    def is_converted(self) -> bool:
        """Whether it is a published checkpoint that is loaded as one of another family."""
        return self.config.get("model_type") in CONVERTED_TYPES


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def hub_advice(path: Path) -> str:
    """How to download the model that a missing path may name on the Hugging Face hub; empty for other paths."""
    if _HUB_NAME.fullmatch(str(path)) is None or path.parent.exists():
        return ""
    return f"; download a model of the Hugging Face hub first: hf download {path} --local-dir {path.name}"


def require_checkpoint(path: Path) -> ModelFiles:
    """The files of a checkpoint: a GGUF file, or a folder with configuration, weights and tokenizer; raise if it is none."""
    if is_gguf(path):
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file: expected a GGUF file or a checkpoint folder")
        return ModelFiles(path)
    if not path.is_dir():
        got = "is a file" if path.exists() else "no such folder"
        raise CheckpointError(f"{path}: {got}: {_EXPECTED} or a GGUF file{hub_advice(path)}")
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path}: no config.json in it: {_EXPECTED}")
    _refuse_special_files(path)
    config, sar_config = read_json(path / "config.json"), read_sar_config(path)
    generation, tokenizer_config = (read_optional_json(path / name) for name in (GENERATION_FILE, TOKENIZER_CONFIG))
    refuse_sizes(path / "config.json", config)
    converted = config.get("model_type") in CONVERTED_TYPES
    weights = weight_files(path, sar_config.tensor_files(path), pickles=converted)
    names = (*_TOKENIZERS, TIKTOKEN_FILE) if converted else _TOKENIZERS
    if not any((path / name).exists() for name in names):
        raise CheckpointError(
            f"{path}: no tokenizer in it: expected tokenizer.json, or tokenizer.model to convert from"
        )
    return ModelFiles(path, config, sar_config, weights, generation, tokenizer_config)


def require_adapter_folder(path: Path) -> None:
    """Raise if a path is no adapter folder."""
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such folder: expected an adapter folder, or published weights to export with"
        )
    if not (path / BASE_FILE).exists():
        raise CheckpointError(
            f"{path}: no {BASE_FILE} in it: expected an adapter folder, as `spaceport adopt` and `spaceport tune --adapter-only` "
            "write it"
        )


def _refuse_special_files(folder: Path) -> None:
    """Raise for FIFOs, sockets and devices in a checkpoint folder: a library that opens them could wait forever."""
    for file in sorted(folder.iterdir()):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise CheckpointError(f"{file}: not a regular file: expected files and folders only; remove it")


def refuse_sizes(file: Path, entries: Mapping[str, Any]) -> None:
    """Raise for sizes in a configuration that would fill the memory before the weights are read."""
    for name, value in _integers(entries):
        for pattern, most in _LIMITS.items():
            if abs(value) > most and re.fullmatch(pattern, name):
                shown = value if abs(value) < 10**30 else f"a number of {len(str(abs(value)))} digits"
                raise CheckpointError(f"{file}: {name} is {shown}: expected at most {most}")


def weight_files(folder: Path, drafting: Collection[Path] = (), pickles: bool = False) -> tuple[Path, ...]:
    """The files with the weights of a folder's model, without those that are `drafting`; raise if it has none.

    These are safetensors files, otherwise pickles if they are allowed."""
    own = tuple(file for file in sorted(folder.glob("*.safetensors")) if file not in drafting)
    if own:
        return _indexed(folder / INDEX_FILE, own)  # transformers would open what it names, wherever that is
    if pickles and (pickled := tuple(sorted(folder.glob("pytorch_model*.bin")))):
        return _indexed(folder / _PICKLES_INDEX, pickled)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder}: its weights are pickles, which can run code when opened: expected *.safetensors; "
            "save it again with save_pretrained"
        )
    raise CheckpointError(f"{folder}: no weights in it: expected *.safetensors")


def _indexed(index: Path, weights: tuple[Path, ...]) -> tuple[Path, ...]:
    """The weight files that an index names, or all if there is no index; raise for one that is not beside it.

    A file with all weights comes before both: what an index beside it names may have been removed."""
    single = index.with_name(_SINGLE)
    if not index.is_file():
        return (single,) if single in weights else weights
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            f"{index}: weight_map is invalid: expected the file of each tensor; copy or download it again"
        )
    names = dict.fromkeys(weight_map.values())
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CheckpointError(
                f"{index}: weight_map has the file {short(name)}: expected the names of files beside the index; copy or "
                "download it again"
            )
    if single in weights:
        return (single,)
    if missing := sorted(names.keys() - {file.name for file in weights}):
        raise CheckpointError(
            f"{index.parent}: the weight file {missing[0]} is missing: expected {len(names)} files, as {index.name} says; "
            "copy or download it"
        )
    return tuple(index.with_name(name) for name in names)


def _integers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """All integers in parsed JSON, with the names of their entries."""
    waiting = [(name, value)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend((str(key), inner) for key, inner in value.items())
        elif isinstance(value, list):
            waiting.extend((name, inner) for inner in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value
