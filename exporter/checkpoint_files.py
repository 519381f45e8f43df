"""Checkpoint files: the checks of a checkpoint's files that need neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from spaceport.exporter.sar_config import CheckpointError, SarConfig, read_json, read_sar_config, tensor_file
from spaceport.graphs.contract.json_fields import short

T = TypeVar("T")
# Upper limits of the sizes in a configuration, by the names that families give them; far above every known model.
_LIMITS = {
    r"(num|n)_\w*layers?|n_layer|\w+_layers|depth": 4096,
    r"\w*heads?|\w*experts?|\w*experts_per_tok|\w*groups?": 2**16,
    r"\w*(size|dim|rank|embd|inner|ctx|positions?|embeddings|window)|d_\w+|dff": 2**31 - 1,
}
_ATTENTION = ("sdpa", "eager")

BASE_FILE = "base.json"  # of an adapter folder
INDEX_FILE = "model.safetensors.index.json"  # of weights in several files

_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
# Published with code of their own for these values of model_type; loaded as families that transformers ships.
CONVERTED_TYPES = ("chatglm", "internlm", "qwen")
TIKTOKEN_FILE = "qwen.tiktoken"
_EXPECTED = "expected a checkpoint (config.json, *.safetensors, tokenizer)"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class ModelFiles:
    """The checkpoint folder or GGUF file of a model; what is read of it, is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[object, Any] = {}

    @property
    def is_gguf(self) -> bool:
        return is_gguf(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return self.json("config.json")

    @property
    def is_converted(self) -> bool:
        """Whether it is a published checkpoint that is loaded as one of another family."""
        return self.config.get("model_type") in CONVERTED_TYPES

    @property
    def sar_config(self) -> SarConfig:
        """The entries of sar_config.json."""
        return self.once(read_sar_config)

    @property
    def own(self) -> tuple[Path, ...]:
        """The files beside the weights that its sar_config.json names.

        Transformers does not read them: it loads model*.safetensors."""
        return tuple(tensor_file(self.path, name) for name in self.sar_config.mechanisms)

    def json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file in the folder."""
        if name not in self._read:
            self._read[name] = read_json(self.path / name)
        content: dict[str, Any] = self._read[name]
        return content

    def json_or_none(self, name: str) -> dict[str, Any]:
        """The same; empty without the file."""
        return self.json(name) if (self.path / name).exists() else {}

    def once(self, read: Callable[[Path], T]) -> T:
        """What a function reads from the path."""
        if read not in self._read:
            self._read[read] = read(self.path)
        found: T = self._read[read]
        return found


def files_of(model: Path | ModelFiles) -> ModelFiles:
    """The files of a model that is given by its path, or by its files, some of which may be read already."""
    return model if isinstance(model, ModelFiles) else ModelFiles(model)


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def hub_advice(path: Path) -> str:
    """How to download the model that a missing path may name on the Hugging Face hub; empty for other paths."""
    if _HUB_NAME.fullmatch(str(path)) is None or path.parent.exists():
        return ""
    return f"; download a model of the Hugging Face hub first: hf download {path} --local-dir {path.name}"


def require_checkpoint(model: Path | ModelFiles) -> ModelFiles:
    """The files of a checkpoint: a GGUF file, or a folder with configuration, weights and tokenizer; raise if it is none."""
    files = files_of(model)
    path = files.path
    if files.is_gguf:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file: expected a GGUF file or a checkpoint folder")
        return files
    if not path.is_dir():
        got = "is a file" if path.exists() else "no such folder"
        raise CheckpointError(f"{path}: {got}: {_EXPECTED} or a GGUF file{hub_advice(path)}")
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path}: no config.json in it: {_EXPECTED}")
    refuse_special_files(path)
    refuse_sizes(path / "config.json", files.config)
    if (path / INDEX_FILE).is_file():
        indexed_files(files, INDEX_FILE)  # transformers would open what it names, wherever that is
    if not (files.is_converted and converted_weights(files)):
        _require_weights(files)
    names = (*_TOKENIZERS, TIKTOKEN_FILE) if files.is_converted else _TOKENIZERS
    if not any((path / name).exists() for name in names):
        raise CheckpointError(
            f"{path}: no tokenizer in it: expected tokenizer.json, or tokenizer.model to convert from"
        )
    return files


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


def indexed_files(files: ModelFiles, name: str) -> list[str]:
    """The names of the weight files in the index of this name, each once; raise for one outside the folder."""
    index, weight_map = files.path / name, files.json(name).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            f"{index}: weight_map is invalid: expected the file of each tensor; copy or download it again"
        )
    names = list(dict.fromkeys(weight_map.values()))
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CheckpointError(
                f"{index}: weight_map has the file {short(name)}: expected the names of files beside the index; copy or "
                "download it again"
            )
    return names


def refuse_special_files(folder: Path) -> None:
    """Raise for FIFOs, sockets and devices in a checkpoint folder: a library that opens them could wait forever."""
    for file in sorted(folder.iterdir()):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise CheckpointError(f"{file}: not a regular file: expected files and folders only; remove it")


def refuse_sizes(file: Path, entries: dict[str, Any]) -> None:
    """Raise for sizes in a configuration that would fill the memory before the weights are read."""
    for name, value in _integers(entries):
        for pattern, most in _LIMITS.items():
            if abs(value) > most and re.fullmatch(pattern, name):
                shown = value if abs(value) < 10**30 else f"a number of {len(str(abs(value)))} digits"
                raise CheckpointError(f"{file}: {name} is {shown}: expected at most {most}")


def load_with_own_attention(load: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model and its loading report, with an attention implementation of transformers itself.

    The implementation is always passed, because a configuration can name one that is fetched or not installed.
    """
    for implementation in _ATTENTION:
        try:
            model, report = load(*arguments, attn_implementation=implementation, **options)
        except ValueError as error:
            if implementation == _ATTENTION[-1] or "scaled_dot_product_attention" not in str(error):
                raise
        else:
            return model, report
    raise AssertionError("the last implementation returns or raises")


def converted_weights(files: ModelFiles) -> tuple[Path, ...]:
    """The weight files of a checkpoint that is converted: its safetensors files, otherwise the pickles of its model."""
    folder, own = files.path, files.own
    weights = tuple(file for file in sorted(folder.glob("*.safetensors")) if file not in own)
    return weights or tuple(sorted(folder.glob("pytorch_model*.bin")))


def _require_weights(files: ModelFiles) -> None:
    folder, own = files.path, files.own
    if any(file not in own for file in folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder}: its weights are pickles, which can run code when opened: expected *.safetensors; "
            "save it again with save_pretrained"
        )
    raise CheckpointError(f"{folder}: no weights in it: expected *.safetensors")


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
