"""GGUF layout: no part may exceed the file; damaged files are loaded or refused with a typed error."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
from gguf import GGML_QUANT_SIZES as QUANTIZED
from gguf import GGUFReader

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint, quiet_libraries
from spaceport.exporter.gguf_file import GgufTensor, TensorType, read_gguf, read_layout
from spaceport.graphs.contract.faults import CheckpointError, InputFault
from support.gguf_files import metadata_of, random_model, tokenizer_metadata, write_gguf
from support.traced_memory import least_peak

TYPES = {0: TensorType("F32", 1, 4), 8: TensorType("Q8_0", 32, 34)}

# Cases of each run, and those of the nightly one
CASES = (pytest.param(0, 20), pytest.param(20, 280, marks=pytest.mark.nightly))


def text(content: str | bytes) -> bytes:
    data = content if isinstance(content, bytes) else content.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def content(entries: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: int = 0, version: int = 3) -> bytes:
    """A file with these metadata entries, tensors and bytes of data."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join((*entries, *tensors))
    return head + bytes(-len(head) % 32 + data)


SOUND = {
    "nothing": content(),
    "version 2": content(version=2),
    "values": content(
        (entry("a", 4, b"1234"), entry("b", 8, text("x")), entry("c", 7, b"1"), entry("d", 12, b"12345678"))
    ),
    "arrays": content((entry("a", 9, array(4, 2, b"12345678")), entry("b", 9, array(8, 2, text("") + text("xyz"))))),
    "tensors": content((), (tensor("a", (32, 2), 8), tensor("b", (4,), 0, 96)), 112),
    "alignment": content((entry("general.alignment", 4, struct.pack("<I", 8)),), (tensor("a", (4,)),), 16),
}

BROKEN = {
    "empty": (b"", "it is empty"),
    "another format": (b"PK\3\4" + bytes(40), "it does not begin with GGUF"),
    "version 4": (content(version=4), "it has version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "its numbers are big-endian"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "the number of tensors at byte 8 has 8 bytes, the file has 0 more"),
    "many entries": (content()[:16] + struct.pack("<Q", 2**9), "the length of a metadata key at byte 24 has 8"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**16, 0), "the length of a tensor name at byte 24 has 8 bytes"),
    "long key": (content((struct.pack("<Q", 2**63) + b"a",)), "a metadata key at byte 32 has 9223372036854775808"),
    "long text": (content((entry("a", 8, struct.pack("<Q", 1000)),)), "a at byte 45 has 1000 bytes"),
    "long array": (content((entry("a", 9, array(4, 1_500_000, b"")),)), "a at byte 49 has 6000000 bytes, the file"),
    "long item": (content((entry("a", 9, array(8, 1, struct.pack("<Q", 99))),)), "an item of a at byte 57 has 99"),
    "nested array": (content((entry("a", 9, array(9, 1, b"")),)), "a is an array of type 9"),
    "unknown value": (content((entry("a", 13, b""),)), "a has type 13"),
    "no dimensions": (content((), (tensor("a", ()),)), "tensor a has 0 dimensions"),
    "many dimensions": (content((), (tensor("a", (1,) * 5),)), "tensor a has 5 dimensions"),
    "unknown tensor type": (content((), (tensor("a", (4,), 99),), 64), "tensor a has type 99"),
    "half a block": (content((), (tensor("a", (16,), 8),), 64), "tensor a has shape [16], its rows have blocks of 32"),
    "no weights": (content((), (tensor("a", (0,)),)), "tensor a has shape [0], its rows have blocks of 1"),
    "cut data": (content((), (tensor("a", (4,)),), 15), "tensor a ends at byte 80, the file has 79"),
    "late data": (content((), (tensor("a", (4,), 0, 2**63),), 16), f"tensor a ends at byte {2**63 + 80}, the file has"),
    "a key twice": (content((entry("a", 0, b"1"),) * 2), "it has a twice"),
    "a tensor twice": (content((), (tensor("a", (4,)),) * 2, 16), "it has the tensor a twice"),
    "alignment": (
        content((entry("general.alignment", 4, struct.pack("<I", 3)),)),
        "general.alignment is 3, not a power",
    ),
    "alignment of another type": (content((entry("general.alignment", 0, b"\x20"),)), "general.alignment is 32, not"),
    "huge tensor": (content((), (tensor("a", (2**40, 2**40)),), 16), f"tensor a ends at byte {2**82 + 96}, the file"),
    "text that is not UTF-8": (content((entry("a", 8, text(b"\xff")),)), "a at byte 45 is not UTF-8"),
    "key that is not UTF-8": (
        content((text(b"\xff") + struct.pack("<I", 7) + b"1",)),
        "a metadata key at byte 32 is not UTF-8",
    ),
}
ITEMS = entry("b", 9, array(0, 10**6, bytes(10**6)))
LARGE = {
    f"{2**60} items in the arrays up to a: expected at most 1600000": content((entry("a", 9, array(4, 2**60, b"")),)),
    "2000000 items in the arrays up to a: ": content((ITEMS, entry("a", 9, array(0, 10**6, bytes(10**6))))),
    "1700000 items in the arrays up to a: ": content((ITEMS, entry("a", 9, array(8, 700_000, b"")))),  # empty texts
    f"{2**9 + 1} metadata entries: expected at most 512": content((entry("a", 0, b"1"),) * (2**9 + 1)),
    f"{2**16 + 1} tensors: expected at most 65536": content((), (tensor("a", (4,)),) * (2**16 + 1)),
}


@pytest.mark.parametrize("message", LARGE)
def test_more_metadata_than_any_model_has_is_refused_before_it_is_read(message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(LARGE[message])
    with pytest.raises(CheckpointError, match=f"^{file}: it has {message}.*; export the original checkpoint$"):
        read_layout(file, TYPES)


def test_bytes_of_metadata_are_limited_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spaceport.exporter.gguf_file._MOST_BYTES", 1000)
    file = tmp_path / "model.gguf"
    for value in (entry("a", 8, text(bytes(990))), entry("a", 9, array(8, 2, text(bytes(490)) * 2))):
        file.write_bytes(content((value,)))
        with pytest.raises(CheckpointError, match=r"it has 10\d\d bytes up to the end of a: expected at most 1000"):
            read_layout(file, TYPES)


def test_the_metadata_of_a_vocabulary_of_300_000_tokens_is_accepted(tmp_path: Path) -> None:
    tokens, merges = text("a" * 10) * 300_000, text("a" * 10 + " " + "a" * 10) * 500_000
    numbers = bytes(4 * 300_000)
    file = tmp_path / "model.gguf"
    entries = (
        entry("tokens", 9, array(8, 300_000, tokens)),
        entry("merges", 9, array(8, 500_000, merges)),
        *(entry(key, 9, array(kind, 300_000, numbers)) for key, kind in (("scores", 6), ("token_type", 5))),
    )
    file.write_bytes(content(entries))
    read_layout(file, TYPES)


def test_an_item_of_metadata_takes_few_bytes_of_memory(tmp_path: Path) -> None:
    """With the reader of the package gguf it takes a kilobyte and more."""
    file, count = tmp_path / "model.gguf", 20_000
    texts = b"".join(text(f"token {number}") for number in range(count))
    numbers, names = array(6, count, bytes(4 * count)), array(8, count, texts)
    file.write_bytes(content((entry("a", 9, names), entry("b", 9, numbers))))
    assert least_peak(lambda: read_layout(file, TYPES)) < 100 * 2 * count


def test_metadata_are_those_of_the_package_gguf(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model())
    reader = GGUFReader(file)
    metadata, tensors = read_layout(file, {int(kind): TensorType(kind.name, *size) for kind, size in QUANTIZED.items()})
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert metadata == expected
    assert {type(value) for value in metadata.values()} == {type(value) for value in expected.values()}
    assert tensors == {
        each.name: GgufTensor(
            each.tensor_type.name, tuple(map(int, each.shape)), each.data_offset, each.data_offset + each.n_bytes
        )
        for each in reader.tensors
    }


def test_files_whose_parts_fit_are_accepted_and_refused_wherever_they_are_cut(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for whole in SOUND.values():
        file.write_bytes(whole)
        read_layout(file, TYPES)
    for size in range(len(SOUND["tensors"])):
        file.write_bytes(SOUND["tensors"][:size])
        with pytest.raises(CheckpointError, match="not a complete GGUF file"):
            read_layout(file, TYPES)


@pytest.mark.parametrize("name", BROKEN)
def test_parts_that_exceed_the_file_are_refused(name: str, tmp_path: Path) -> None:
    data, message = BROKEN[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(file)
    assert str(caught.value).startswith(f"{file}: not a complete GGUF file ({message}")
    assert str(caught.value).endswith("): expected version 2 or 3; download or convert it again")


NUMBERS = (0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
# fmt: off
VALUES: tuple[Any, ...] = (0, 1, 3, 2**31, 2**32 - 1, 0.0, -1.5, math.nan, math.inf, True, "", "x", [1], ["a"], [0.5], None)
# fmt: on


def damage(dice: random.Random, data: bytearray, head: int) -> None:
    """Change bits, a number or 16 bytes before `head`, or remove bytes there or at the end."""
    kind, start = dice.randrange(5), dice.randrange(head)
    if kind == 0:
        for _ in range(dice.choice((1, 1, 2, 8))):
            data[dice.randrange(head)] ^= 1 << dice.randrange(8)
    elif kind == 1:
        form = dice.choice(("<I", "<Q"))
        value = dice.choice([number for number in NUMBERS if number < 2 ** (8 * struct.calcsize(form))])
        struct.pack_into(form, data, start, value)
    elif kind == 2:
        data[start : start + 16] = dice.randbytes(16)
    elif kind == 3:
        del data[start : start + dice.choice((1, 4, 8, 100))]
    else:
        del data[dice.choice((start, dice.randrange(len(data)))) :]


def load(file: Path) -> str:
    """What loading a file ends with: "loaded", or the message of a typed error."""
    try:
        load_model(open_checkpoint(file, TokenFlags()), "float32")
    except InputFault as error:
        return str(error)
    return "loaded"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of scales that are not finite
@pytest.mark.parametrize(("first", "count"), CASES)
def test_damaged_files_and_other_metadata_are_loaded_or_refused(first: int, count: int, tmp_path: Path) -> None:
    quiet_libraries()
    model, file = random_model(), tmp_path / "model.gguf"
    sound = write_gguf(file, model).read_bytes()
    tensors, tokens = sound.rindex(b"output_norm.weight") + 40, sound.index(b"tokenizer.ggml.tokens") + 60
    general = ("general.name", "general.type", "split.count", "general.alignment", "llama.attention.key_length")
    keys = (*metadata_of(model), *tokenizer_metadata(), *general, "tokenizer.ggml.eot_token_id")
    damaged, other = [], []
    for case in range(first, first + count):
        dice, data = random.Random(case), bytearray(sound)
        damage(dice, data, dice.choice((tensors, tokens)))  # before the data, or up to the hyperparameters
        file.write_bytes(data)
        damaged.append(load(file))
        key, value = keys[case % len(keys)], dice.choice(VALUES)
        other.append((key, value, load(write_gguf(file, model, changes={key: value}))))
    assert all(one == "loaded" or (str(file) in one and ": expected" in one) for one in damaged), damaged
    assert all(one == "loaded" or ": expected" in one for _, _, one in other), other
    for found in (damaged, [one for _, _, one in other]):
        assert 0 < found.count("loaded") < count
