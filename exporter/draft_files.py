"""Draft files: with what a model drafts, in its folder, or in an adapter folder with the identity of the base model."""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from spaceport.exporter.checkpoint_files import (
    BASE_FILE,
    SAR_FILE,
    SarConfig,
    is_id,
    read_json,
    read_sar_config,
    require_adapter_folder,
    tensor_file,
    write_sar_config,
)
from spaceport.graphs.contract.faults import CheckpointError, InputFault
from spaceport.graphs.contract.json_fields import JsonField, Rules
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import PRECISIONS, Precision
from spaceport.graphs.gated import MaskAdapter
from spaceport.graphs.heads import Heads
from spaceport.graphs.mechanism import Factors, InputRows, Mechanism, MechanismError, Phrases
from spaceport.graphs.streamed_weights import values_of

# By name, in the order in which they are added to a model.
MECHANISMS: dict[str, type[Mechanism]] = {kind.name: kind for kind in (Factors, Phrases, InputRows, MaskAdapter, Heads)}

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_VALUES = 4096  # of each weight tensor, evenly spaced; a weight that any training changed differs in nearly all values
EMBEDDINGS_FILE = "token_embeddings.safetensors"  # rows of the special tokens and of padding
_SCHEMA = 1
_IDS = "ids"  # tensor with the token id of each row
_ADVICE = "copy the adapter folder again, or train it again with `spaceport tune --adapter-only`"


def read_mechanisms(folder: Path, sar: SarConfig) -> tuple[Mechanism, ...]:
    """The mechanisms of a checkpoint or adapter folder, whose tensors stay in their files until they are used."""
    entries = sar.mechanisms
    if unknown := sorted(entries.keys() - MECHANISMS.keys()):
        raise CheckpointError(f"{folder / SAR_FILE}: mechanisms has {unknown[0]!r}: expected {', '.join(MECHANISMS)}")
    return tuple(
        _read(folder, kind, entries[name])
        for name, kind in MECHANISMS.items()
        if _exists(folder, name, name in entries)
    )


def _exists(folder: Path, name: str, named: bool) -> bool:
    """Whether a folder has a mechanism; raises if it has its file alone, or is `named` in sar_config.json alone."""
    file = tensor_file(folder, name)
    if file.exists() and not named:
        raise CheckpointError(
            f"{file}: mechanisms in {SAR_FILE} has no entry {name} for it: expected the entry that belongs to the "
            "file; add it, or remove the file"
        )
    if named and not file.exists():
        raise CheckpointError(
            f"{folder}: {SAR_FILE} names {name}, but there is no {file.name}: copy it there, or set the entry to null "
            "to go on without it"
        )
    return named


def _read(folder: Path, kind: type[Mechanism], entry: object) -> Mechanism:
    file = tensor_file(folder, kind.name)
    tensors = read_tensors(file, advice(kind.name))
    if not tensors:
        raise CheckpointError(f"{file}: has no tensors; {advice(kind.name)}")
    with errors_of(f"{file}", advice(kind.name)):
        return kind.read(
            JsonField(entry, f"{folder / SAR_FILE}: {kind.name}", Rules(CheckpointError, f"; {advice(kind.name)}")),
            tensors,
        )


def check_mechanisms(folder: Path, mechanisms: Sequence[Mechanism], tokens: TokenIds) -> None:
    """Raise for mechanisms that do not fit the mask tokens of their model."""
    for mechanism in mechanisms:
        if mechanism.needs_mask_token and not tokens.mask:
            raise CheckpointError(
                f"{folder}: {SAR_FILE} names {mechanism.name}, which acts on mask rows only, but no mask token is "
                f"known: set one with --mask-token, or as mask_tokens in {SAR_FILE}"
            )
        if mechanism.needs_mask_token is False and tokens.mask:
            raise CheckpointError(
                f"{folder}: has {mechanism.name}, and mask tokens {', '.join(map(str, tokens.mask))}: expected one of "
                f"them, which drafts; leave --mask-token out, or remove mask_tokens or {mechanism.name} from {SAR_FILE}"
            )


def check_values(folder: Path, mechanisms: Sequence[Mechanism]) -> None:
    """Raise for tensors with numbers that are not finite."""
    for mechanism in mechanisms:
        with errors_in(folder, mechanism):
            require_finite(mechanism.state())


def apply_mechanisms(
    model: PreTrainedModel, folder: Path, mechanisms: Sequence[Mechanism], mask_ids: Sequence[int]
) -> None:
    """Add the mechanisms of a folder to its model."""
    for mechanism in mechanisms:
        with errors_in(folder, mechanism):
            mechanism.apply(model, mask_ids)


def write_mechanisms(folder: Path, mechanisms: Sequence[Mechanism]) -> None:
    """Write mechanisms into a folder: the tensors, and the entries in sar_config.json."""
    if not mechanisms:
        return
    for mechanism in mechanisms:
        save_tensors(tensor_file(folder, mechanism.name), mechanism.state())
    entries = {mechanism.name: mechanism.entry for mechanism in mechanisms}
    write_sar_config(folder, {"mechanisms": {**read_sar_config(folder).mechanisms, **entries}})


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise for tensors with infinities or NaN."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise MechanismError(f"{name} has numbers that are not finite")


@contextmanager
def errors_of(where: str, what_to_do: str) -> Iterator[None]:
    """Raise an error about tensors as one about the file or folder that has them."""
    try:
        yield
    except CheckpointError:
        raise
    except InputFault as error:
        raise CheckpointError(f"{where}: {error}; {what_to_do}") from error


def errors_in(folder: Path, mechanism: Mechanism) -> AbstractContextManager[None]:
    """Raise an error about the tensors of a mechanism as one about its file."""
    return errors_of(f"{tensor_file(folder, mechanism.name)}", advice(mechanism.name))


def advice(name: str) -> str:
    """What to do about a file that does not fit."""
    return f"copy the file that belongs to this folder, or correct {name} in {SAR_FILE}, or set it to null to go on without it"


def read_tensors(file: Path, what_to_do: str) -> dict[str, Tensor]:
    """The tensors in a file; the error of one that cannot be read says what to do."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}: {what_to_do}") from error


def tensor_shapes(file: Path, what_to_do: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file by name; only its header is read."""
    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}: {what_to_do}") from error


def read_pickled_tensors(file: Path, what_to_do: str) -> dict[str, Tensor]:
    """The tensors in a pickle; anything but tensors in it is refused, so no code in it is run."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"{file}: cannot be read as a file of tensors: {reason}: expected tensors only; {what_to_do}, preferably as *.safetensors"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and type(tensor) in (Tensor, nn.Parameter) for name, tensor in content.items()
    ):
        raise CheckpointError(f"{file}: holds {type(content).__name__}: expected tensors by name; {what_to_do}")
    return content


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a file that everybody may read; safetensors itself makes it readable by its owner only."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    file.chmod(0o644)


def embedding_tables(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors with one row per vocabulary token by name (input, output, output_bias); tied tensors are listed once."""
    head = model.get_output_embeddings()
    tables = {
        "input": model.get_input_embeddings().weight,
        "output": cast(nn.Linear, head).weight,
        "output_bias": getattr(head, "bias", None),
    }
    distinct: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tables.items():
        if tensor is not None:
            distinct.setdefault(id(tensor), (name, cast(Tensor, tensor)))
    return dict(distinct.values())


def embedding_rows(model: PreTrainedModel) -> list[Tensor]:
    """Tensors with one row per vocabulary token; tied tensors are listed once."""
    return list(embedding_tables(model).values())


@dataclass(frozen=True)
class BaseIdentity:
    """The sizes and weights of a base model."""

    name: str  # of its folder or file, for messages
    sizes: Mapping[str, int]  # of its configuration
    weights: Mapping[str, str]  # SHA-256 of sampled weights, by the data type that they are rounded to

    def check_config(self, config: PreTrainedConfig) -> None:
        """Raise if a model with this configuration has other sizes."""
        sizes = sizes_of(config)
        for name, size in self.sizes.items():
            if sizes.get(name) != size:
                raise CheckpointError(
                    f"its {name} is {sizes.get(name)}, the adapter was trained on {self.name} with {size}: expected "
                    "that model as base"
                )

    def check_weights(self, model: PreTrainedModel, dtype: Precision) -> None:
        """Raise if a model that was loaded in a data type has other weights."""
        digest, expected = weights_digests(model, (dtype,))[dtype], self.weights[dtype]
        if digest != expected:
            raise CheckpointError(
                f"its weights in {dtype} have the digest {digest[:12]}, the adapter was trained on {self.name} with "
                f"{expected[:12]}: expected that model as base, neither fine-tuned nor quantized in another way"
            )


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
    sizes = {name: getattr(config.get_text_config(), name, None) for name in _SIZES}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


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


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter folder without its tensors."""

    path: Path
    sar_config: SarConfig
    base: BaseIdentity
    tokens: Mapping[str, int]  # ids of the special tokens by text, or by id where the tokenizer has no text for one
    vocab_size: int  # embedding rows of the base model with these tokens


def read_adapter_folder(path: Path) -> AdapterFolder:
    """The adapter folder at a path, checked as far as possible without its base model."""
    require_adapter_folder(path)
    file = path / BASE_FILE
    content = JsonField(read_json(file), f"{file}:", Rules(CheckpointError, f"; {_ADVICE}"), prefix=f"{file}: ")
    content.entry("schema").one_of((_SCHEMA,))
    tokens = {text: token.whole() for text, token in content.entry("tokens").members().items()}
    config = read_sar_config(path)
    drafting = [name for name, kind in MECHANISMS.items() if not kind.refines]
    if config.mechanisms.keys().isdisjoint(drafting):
        raise CheckpointError(
            f"{path}: {SAR_FILE} has none of {', '.join(drafting)}: expected one of them in an adapter folder; "
            f"{_ADVICE}"
        )
    unknown = sorted(set(config.special_tokens) - tokens.keys())
    if unknown:
        raise CheckpointError(
            f"{path}: {SAR_FILE} names the token {unknown[0]!r}: expected one of {', '.join(tokens)}, as in "
            f"{BASE_FILE}; {_ADVICE}"
        )
    base, vocab_size = identity_from(content.entry("base")), content.entry("vocab_size").whole(1)
    return AdapterFolder(path, config, base, tokens, vocab_size)


def add_special_tokens(tokenizer: Any, folder: AdapterFolder) -> None:
    """Add the special tokens of an adapter folder to the tokenizer of its base model; raise if they get other ids."""
    backend = tokenizer.backend_tokenizer
    new = [text for text in folder.tokens if not is_id(text) and backend.token_to_id(text) is None]
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in new])
    for text, token in folder.tokens.items():
        actual = int(text) if is_id(text) else backend.token_to_id(text)
        if actual != token:
            raise CheckpointError(
                f"token {text!r} gets the id {actual}, the adapter in {folder.path} was trained with {token}: "
                f"expected the tokenizer of {folder.base.name}"
            )


def add_embeddings(model: PreTrainedModel, folder: AdapterFolder, dtype: Precision) -> None:
    """Verify that a model is the base of an adapter folder, and add the embeddings of the special tokens to it."""
    folder.base.check_weights(model, dtype)
    stored = _stored_rows(folder)
    if model.get_input_embeddings().num_embeddings != folder.vocab_size:
        model.resize_token_embeddings(folder.vocab_size, mean_resizing=False)
    tables = embedding_tables(model)
    expected = {name: (len(stored[_IDS]), *tensor.shape[1:]) for name, tensor in tables.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items() if name != _IDS}
    if shapes != expected:
        raise CheckpointError(
            f"{folder.path / EMBEDDINGS_FILE}: has tensors with the shapes {shapes}: expected {expected}; {_ADVICE}"
        )
    with torch.no_grad():
        for name, tensor in tables.items():
            tensor[stored[_IDS]] = stored[name].to(tensor.dtype)


def write_adapter_folder(
    folder: Path,
    base: BaseIdentity,
    model: PreTrainedModel,
    tokens: Mapping[str, int],
    mechanisms: Sequence[Mechanism],
    sar_config: Mapping[str, Any],
) -> None:
    """Write an adapter folder, with the model's embeddings of the tokens in float32."""
    folder.mkdir(exist_ok=True)
    tables = embedding_tables(model)
    vocab_size = len(next(iter(tables.values())))
    ids = torch.tensor(sorted({*tokens.values(), *range(base.sizes["vocab_size"], vocab_size)}), dtype=torch.int64)
    rows = {name: tensor.cpu().float()[ids] for name, tensor in tables.items()}
    save_tensors(folder / EMBEDDINGS_FILE, {_IDS: ids, **rows})
    write_sar_config(folder, dict(sar_config))
    write_mechanisms(folder, mechanisms)
    content = {"schema": _SCHEMA, "base": asdict(base), "tokens": dict(tokens), "vocab_size": vocab_size}
    (folder / BASE_FILE).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _stored_rows(folder: AdapterFolder) -> dict[str, Tensor]:
    file = folder.path / EMBEDDINGS_FILE
    stored = read_tensors(file, _ADVICE)
    ids = stored.get(_IDS)
    needed = {*folder.tokens.values(), *range(folder.base.sizes["vocab_size"], folder.vocab_size)}
    if ids is None or ids.tolist() != sorted(needed):
        raise CheckpointError(
            f"{file}: has rows of {'no' if ids is None else len(ids)} tokens: expected the {len(needed)} tokens that "
            f"{BASE_FILE} adds; {_ADVICE}"
        )
    return stored


def narrowed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in float16 if their values allow it, else in float32."""
    most = torch.finfo(torch.float16).max
    fits = all(float(tensor.abs().max()) <= most for tensor in tensors.values() if tensor.numel())
    return {name: tensor.to(torch.float16 if fits else torch.float32) for name, tensor in tensors.items()}
