"""The files of a checkpoint that need neither torch nor transformers: JSON, the names of weights, and how it drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from spaceport.exporter.gguf_file import GgufFile, read_gguf
from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.draft_methods import (
    CAUSAL,
    GROUPS,
    DraftAcceptance,
    Group,
    MaskLayout,
    draft_acceptances,
    with_acceptance,
)
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.contract.json_fields import JsonField, Rules, is_whole, short

SAR_FILE = "sar_config.json"
PARD = "pard"  # the method of a checkpoint whose config.json names its mask token
_ENTRIES = (
    *("mask_tokens", "mask_slots", "fork_token", "child_token", "fork_by_default"),
    *("shift", "group", "noise"),  # how mask slots draft
    *("mechanisms", "method", "adapter"),
    "acceptance",
)
_CARD_BYTES = 2**16  # of a model card, whose first lines hold the licence
_LARGEST = 2**26  # bytes of a JSON file; an index of weights has some megabytes
_ORIGIN_LENGTH = 200  # characters of an entry that says where weights come from
_MASK_ENTRIES = ("pard_token", "ptd_token_id", "mask_token_id")  # of config.json
# Entries of methods that draft in another way, which a checkpoint may have beside a mask token.
_SECOND_NETWORKS = dict.fromkeys(
    (
        *("pard2", "pard2_target_dim", "spd_type", "dflash_config", "dspark_noise_token_id"),
        *("eagle_config", "speculators_model_type", "target_layer_ids", "draft_vocab_size"),
    ),
    "with a second network over hidden states",
)
_BLOCKS = dict.fromkeys(("block_size", "dlm_type", "dlm_paradigm"), "blocks whose mask rows see each other")
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


class MaskEntry(NamedTuple):
    """A mask token in config.json."""

    name: str  # of the entry
    token: int


class OtherMethod(NamedTuple):
    """An entry in config.json that shows a method which is not supported."""

    entry: str
    drafts: str  # how it drafts


@dataclass(frozen=True)
class CopiedEmbeddings:
    """Mask tokens whose embeddings are copies of other tokens' embeddings."""

    ids: tuple[int, ...]  # of the copied tokens, one for each mask token
    seed: int  # with which they were selected


@dataclass(frozen=True)
class SarConfig:
    """The entries of a sar_config.json, each of which may be missing. Tokens are named by id or by text."""

    mask_tokens: tuple[str, ...] | None = None  # None: the one that config.json names, if it does as PARD
    mask_slots: int | None = None
    fork_token: str | None = None
    child_token: str | None = None
    fork_by_default: bool = True  # whether a request may fork unless it says otherwise
    layout: MaskLayout = CAUSAL
    noise: CopiedEmbeddings | None = None
    mechanisms: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # the numbers of each by its name
    method: str | None = None
    adapter: str | None = None  # published weights with which the model drafts
    acceptance: tuple[DraftAcceptance, ...] = ()  # measured rates, by temperature

    def tensor_files(self, folder: Path) -> tuple[Path, ...]:
        """The files in a folder with the tensors of the mechanisms; transformers reads none of them."""
        return tuple(tensor_file(folder, name) for name in self.mechanisms)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The mask, fork and child tokens."""
        forking = (token for token in (self.fork_token, self.child_token) if token is not None)
        return (*(self.mask_tokens or ()), *forking)


def is_id(token: str) -> bool:
    """Whether a special token is named by its id instead of its text."""
    return token.isascii() and token.isdigit()


def is_origin(value: object) -> bool:
    """Whether a value can name a method or published weights."""
    return isinstance(value, str) and 0 < len(value) <= _ORIGIN_LENGTH and value.isprintable()


def tensor_file(folder: Path, name: str) -> Path:
    """The file with the tensors of a mechanism."""
    return folder / f"{name}.safetensors"


def read_sar_config(folder: Path) -> SarConfig:
    """The entries of a folder's sar_config.json; none if the file does not exist."""
    file = folder / SAR_FILE
    entries = _entries(file)

    def entry(name: str, advice: str = "") -> JsonField:
        return JsonField(entries.get(name), f"{file}: {name}", Rules(CheckpointError, advice))

    masks = entry("mask_tokens").or_none(lambda tokens: tokens.each(_token))
    forks = entry("fork_by_default").or_none(JsonField.boolean)
    remeasure = "; remove the entry, and measure again with `spaceport acceptance --save`"
    return SarConfig(
        mask_tokens=masks if masks is not None or "mask_tokens" not in entries else (),
        mask_slots=entry("mask_slots").or_none(lambda slots: slots.whole(1)),
        fork_token=entry("fork_token").or_none(_token),
        child_token=entry("child_token").or_none(_token),
        fork_by_default=forks is not False,
        layout=_layout(entry("shift"), entry("group")),
        noise=entry("noise").or_none(lambda noise: _noise(noise, len(masks or ()))),
        mechanisms=entry("mechanisms").or_none(_mechanisms) or {},
        method=entry("method").or_none(_origin),
        adapter=entry("adapter").or_none(_origin),
        acceptance=entry("acceptance", remeasure).or_none(draft_acceptances) or (),
    )


def write_sar_config(folder: Path, changes: dict[str, Any]) -> None:
    """Set entries in a folder's sar_config.json; all other entries stay."""
    file = folder / SAR_FILE
    replace_text(file, json.dumps({**_entries(file), **changes}, indent=2, ensure_ascii=False) + "\n")


def save_acceptance(folder: Path, measured: DraftAcceptance) -> None:
    """Store measured acceptance rates in a folder's sar_config.json, in place of those at the same temperature."""
    rates = with_acceptance(read_sar_config(folder).acceptance, measured)
    write_sar_config(folder, {"acceptance": [asdict(entry) for entry in rates]})


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file}: not a regular file: expected a JSON file")
    if file.exists() and (size := file.stat().st_size) > _LARGEST:
        raise CheckpointError(f"{file}: {size} bytes: expected a JSON file of at most {_LARGEST}")
    try:
        data = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:  # ValueError: not JSON, not UTF-8, too many digits
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: contains {type(data).__name__}: expected an object")
    return cast(dict[str, Any], data)


def read_optional_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; empty if there is no file."""
    return read_json(file) if file.exists() else {}


def mask_entry(file: Path, config: Mapping[str, Any]) -> MaskEntry | None:
    """The mask token that a configuration names, whatever the method."""
    name = next((name for name in _MASK_ENTRIES if config.get(name) is not None), None)
    if name is not None and not is_whole(config[name], 0):
        raise CheckpointError(f"{file}: {name} is {config[name]!r}: expected a token id")
    return None if name is None else MaskEntry(name, config[name])


def other_method(config: Mapping[str, Any], whole: bool) -> OtherMethod | None:
    """The first entry of a method that is not supported; `whole`: of a checkpoint, not of an adapter."""
    methods = {**_SECOND_NETWORKS, **(_BLOCKS if whole else {})}
    return next((OtherMethod(name, drafts) for name, drafts in methods.items() if config.get(name)), None)


def config_mask_token(file: Path, config: Mapping[str, Any], vocab: int) -> int | None:
    """The mask token in the content of a config.json, if its mask rows are those of PARD: causal, and with shift."""
    mask = mask_entry(file, config) if other_method(config, whole=True) is None else None
    if mask is not None and mask.token >= vocab:
        raise CheckpointError(
            f"{file}: {mask.name} is {mask.token}, the model's vocabulary ends at {vocab - 1}: expected an id within it"
        )
    return None if mask is None else mask.token


def _entries(file: Path) -> dict[str, Any]:
    entries = read_optional_json(file)
    unknown = sorted(set(entries) - set(_ENTRIES))
    if unknown:
        raise CheckpointError(
            f"{file}: unknown entries {', '.join(unknown)}: expected {', '.join(_ENTRIES)}; tune or adopt again what an "
            "earlier version wrote"
        )
    return entries


def _token(name: JsonField) -> str:
    if not isinstance(name.value, str) and not is_whole(name.value, 0):
        name.refuse("a token by its id or its text")
    return str(name.value)


def _layout(shift: JsonField, group: JsonField) -> MaskLayout:
    shifts = shift.or_none(JsonField.boolean)
    seen: Group | None = group.or_none(lambda name: name.one_of(GROUPS))
    return MaskLayout(CAUSAL.shift if shifts is None else shifts, seen or CAUSAL.group)


def _noise(noise: JsonField, masks: int) -> CopiedEmbeddings:
    entries = noise.exactly("ids", "seed")
    ids = entries["ids"].wholes()
    if len(ids) != masks:
        noise.refuse(f"null, or ids, one for each of the {masks} mask_tokens, and seed")
    return CopiedEmbeddings(ids, entries["seed"].whole())


def _mechanisms(mechanisms: JsonField) -> dict[str, dict[str, Any]]:
    members = mechanisms.members().items()
    return {name: numbers.object() for name, numbers in members if numbers.value is not None}


def _origin(name: JsonField) -> str:
    if not is_origin(name.value):
        name.refuse(f"null, or a printable text of 1 to {_ORIGIN_LENGTH} characters")
    return cast(str, name.value)


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


def _integers(entries: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """All integers in parsed JSON, with the names of their entries."""
    waiting: list[tuple[str, Any]] = list(entries.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend((str(key), inner) for key, inner in value.items())
        elif isinstance(value, list):
            waiting.extend((name, inner) for inner in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def provenance_of(folder: Path, metadata: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Name, source, revision and licence of a checkpoint, without those that are not known.

    A folder in the cache of a model hub says its source and revision; a model card says the licence, and a GGUF file
    (`metadata`) can say all of them.
    """
    path = folder.absolute()
    origin: dict[str, Any] = {"name": path.stem if metadata is not None else path.name}
    cached = re.search(r"/models--([^/]+)/snapshots/([0-9a-f]{40})(?:/|$)", str(path))
    if cached is not None:
        source = cached[1].replace("--", "/", 1)
        origin |= {"name": source.rpartition("/")[2], "source": source, "revision": cached[2]}
    if metadata is not None:
        keys = {"name": "general.name", "source": "general.source.url", "licence": "general.license"}
        origin |= {entry: metadata.get(key) or origin.get(entry) for entry, key in keys.items()}
    elif (licence := _licence(path / "README.md")) is not None:
        origin["licence"] = licence
    return {
        entry: value[:_ORIGIN_LENGTH]
        for entry, value in origin.items()
        if isinstance(value, str) and value.isprintable()
    }


def _licence(card: Path) -> str | None:
    """The licence in the first block of a model card."""
    try:
        if not card.is_file():
            return None
        with card.open("rb") as stream:
            text = stream.read(_CARD_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    block = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    line = re.search(r"^license:[ \t]*[\"']?([^\s\"']+)", block[1], re.MULTILINE) if block else None
    return line[1] if line else None
