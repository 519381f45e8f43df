"""Sar_config: what the JSON files of a folder say about its drafts: special tokens, layout, method and rates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

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
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField, Rules, is_whole

SAR_FILE = "sar_config.json"
PARD = "pard"  # the method of a checkpoint whose config.json names its mask token
_ENTRIES = (
    *("mask_tokens", "mask_slots", "fork_token", "child_token", "fork_by_default"),
    *("shift", "group", "noise"),  # how mask slots draft
    *("mechanisms", "method", "adapter"),
    "acceptance",
)
_LARGEST = 2**26  # bytes of a JSON file; an index of weights has some megabytes
_ORIGIN_LENGTH = 200  # characters of the entries `method` and `adapter`
_MASK_ENTRIES = ("pard_token", "ptd_token_id", "mask_token_id")  # of config.json
# Entries of methods that draft in another way, which a checkpoint may have beside a mask token.
_BLOCKS = ("block_size", "dlm_type", "dlm_paradigm")
_SECOND_NETWORKS = (
    *("pard2", "pard2_target_dim", "spd_type", "dflash_config", "dspark_noise_token_id"),
    *("eagle_config", "speculators_model_type", "target_layer_ids", "draft_vocab_size"),
)


class CheckpointError(InputFault):
    """A folder that cannot be exported; the message states what was found, what was expected and what to do."""


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
    for name in _MASK_ENTRIES:
        token = config.get(name)
        if token is None:
            continue
        if not is_whole(token, 0):
            raise CheckpointError(f"{file}: {name} is {token!r}: expected a token id")
        return MaskEntry(name, token)
    return None


def other_method(config: Mapping[str, Any], whole: bool) -> OtherMethod | None:
    """The first entry of a method that is not supported; `whole`: of a checkpoint, not of an adapter."""
    found = next((name for name in _SECOND_NETWORKS if config.get(name)), None)
    if found is not None:
        return OtherMethod(found, "with a second network over hidden states")
    found = next((name for name in _BLOCKS if whole and config.get(name)), None)
    return None if found is None else OtherMethod(found, "blocks whose mask rows see each other")


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
