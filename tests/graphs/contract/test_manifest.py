"""Manifest: a manifest is read completely or refused, whatever its file contains, and any changed byte is noticed."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.manifest import (
    MANIFEST_FILE,
    MODEL_FILE,
    SCHEMA,
    ManifestError,
    manifest_content,
    manifest_in,
    with_digest,
)
from spaceport.runtime.bundle import BundleError, open_bundle
from support.small_bundle import ENGINE, edit, entries_of, fill, new_bundle, refused


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return new_bundle(tmp_path / "bundle")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe{}", "codec can't decode byte 0xff"),
        (b"[]", "manifest is list: expected an object"),
        (b"null", "manifest is NoneType: expected an object"),
        (b"{}", "schema is None: expected a whole number of at least 1"),
        (b"[" * 200_000, "maximum recursion depth"),
        (b'{"schema": ' + b"1" * 5000 + b"}", "4300 digits"),
    ],
)
def test_a_file_that_is_not_a_manifest_is_refused(bundle: Path, content: bytes, message: str) -> None:
    (bundle / MANIFEST_FILE).write_bytes(content)
    refused(bundle, rf"manifest\.json: .*{message}.*copy the bundle again or export it again")


def test_a_huge_manifest_is_refused_before_it_is_read(bundle: Path) -> None:
    with (bundle / MANIFEST_FILE).open("r+b") as file:
        file.truncate(2**40)  # sparse: uses no disk space
    refused(bundle, f"{2**40} bytes: expected at most {2**24}")


@pytest.mark.parametrize(
    ("schema", "advice"), [(SCHEMA + 1, "update spaceport"), (SCHEMA - 1, "export it again"), (1, "export it again")]
)
def test_a_manifest_of_another_schema_is_refused(bundle: Path, schema: int, advice: str) -> None:
    """It may have other fields."""
    (bundle / MANIFEST_FILE).write_text(json.dumps({"schema": schema, "shape": "unknown"}))
    refused(bundle, f"schema is {schema}, this version reads {SCHEMA}: {advice}")


E, M, A = f"engines/{ENGINE}", f"files/{MODEL_FILE}", "drafts/acceptance/0"
# Fields of each kind with wrong values; all others are read in the same way, by the type that they have.
KINDS: dict[str, tuple[list[Any], str]] = {
    "expected a whole number of at least 0": ([-1, "2", 0.5, True, [2]], f"drafts/max_tokens tokens/fork {M}/size"),
    "expected a whole number of at least 1": ([0, "2", None, 1.5, True, {}], f"schema signature/layers {E}/capacity"),
    "expected text": ([5, None, ["a"], {}], f"model_type special_tokens/bos_token {E}/version"),
    "expected an object": (
        [5, None, [], "a"],
        f"drafts drafts/mechanisms/draft_correction generation_config files {M}",
    ),
    "expected true or false": ([0, "no", None], "fork_by_default"),
    "expected 64 hexadecimal digits": ([5, None, "", "0" * 63, "G" * 64, "A" * 64], f"{M}/sha256 {E}/sha256"),
}
MOST = {
    "drafts/max_tokens": 64,
    "max_positions": 2**31 - 1,
    "parameters": 10**15,
    "opset": 1000,
    "signature/lines": 65,
    "signature/layers": 4096,
    "signature/kv_heads": 4096,
    "signature/head_dim": 2**16,
    "signature/vocab_size": 2**24,
    "signature/window": 2**31 - 1,
    f"{M}/size": 2**50,
    f"{E}/capacity": 2**31 - 1,
}
WRONG: list[tuple[str, list[Any], str]] = [
    *((path, values, message) for message, (values, paths) in KINDS.items() for path in paths.split()),
    *((path, [most + 1, 10**300], f"expected at most {most}") for path, most in MOST.items()),
    ("drafts/max_tokens", [3], "drafts.max_tokens is 3, tokens.mask has 2: expected one for all, or one for each"),
    ("drafts/acceptance", [[{"rates": []}]], r"acceptance\[0\] lacks 'data', 'date', 'lookup'"),
    (f"{A}/rates", [["0.5"], [None], [True]], r"acceptance\[0\].rates\[0\] is .*: expected a number"),
    (f"{A}/rates", [[1.5], [-0.1], [10**300]], "rates is .*: expected rates from 0 to 1"),
    (f"{A}/rates", [[10**400]], "expected a number that a float can hold"),
    (f"{A}/rates", [[0.5, 0.6]], "rates is .*: expected rates that do not increase with depth"),
    (f"{A}/rates", [[0.5] * 65], "rates has 65 depths: expected at most 64"),
    (f"{A}/lookup", [[0.5], [0.5] * 6], "lookup has [16] rates: expected 5 or none"),
    (f"{A}/lookup", [[2, 0, 0, 0, 0]], "lookup is .*: expected rates from 0 to 1"),
    (f"{A}/temperature", [-1, -0.5], "temperature is .*: expected a number of at least 0"),
    (f"{A}/data", ["a/b", "a\\b", "a\n", "a" * 201], "data is .*: expected a file name or"),
    (f"{A}/date", ["yesterday", "2026-02-30", "20260101"], "date is .*: expected a day such as 2026"),
    ("drafts/layout/shift", [False], "tokens.mask has 2: expected one for all, or one for each of 3 mask rows"),
    ("drafts/layout/group", ["tree", None, True], "group is .*: expected causal or block"),
    ("provenance", [{"owner": "x"}], "has the unknown 'owner': expected name, source, revision, licence"),
    ("tokens/mask", [4, None, {"4": 4}], r"tokens\.mask is .*: expected a list"),
    ("tokens/mask", [["4"], [4.0], [True], [-1]], r"tokens\.mask\[0\] is .*: expected a whole number"),
    ("tokens/mask", [[]], "expected one for all"),
    ("tokens/mask", [[4, 5, 640], [640]], "tokens hold the id 640: expected ids from 0 to 639"),
    ("tokens/mask", [[4, 6], [7], [3]], "token id [673] has two of the roles mask, fork, child and end"),
    ("tokens/end", [1, None], r"tokens\.end is .*: expected a list"),
    ("tokens/end", [[6], [1, 4]], "token id [64] has two of the roles mask, fork, child and end"),
    ("tokens/end", [[640]], "tokens hold the id 640: expected ids from 0 to 639"),
    ("tokens/fork", [7], "token id 7 has two of the roles"),
    ("tokens/fork", [None], "tokens.fork is None, tokens.child is 7: expected both or none"),
    ("tokens/child", [10**30], "tokens hold the id 1000000000000000000000000000000: expected ids"),
    ("signature/lines", [3], "signature.lines is 3, drafts.max_tokens is 2 with the predictor mask: expected 1 lines"),
    ("drafts/predictor", ["head"], "signature.lines is 1, drafts.max_tokens is 2 with .* head: expected 3 lines"),
    ("drafts/adapter", [5, ["a"]], "adapter is .*: expected text"),
    ("signature/dtype", ["float64", None, 32, ["float32"], {}], "signature.dtype is .*: expected float32 or float16"),
    ("signature/window", [0, -1, "32", True, []], "signature.window is .*: expected a whole number"),
    ("format", [5, None, ["int4"]], "format is .*: expected text"),
    ("format", ["int7", "", "same"], "format is .*: expected stored, int4, int8, float32, float16"),
    ("format", ["float16"], "signature.dtype is float32, format is float16: expected float16"),
    ("signature/kv_cache", ["int8"], "signature.kv_cache is int8, format is float32: expected same"),
    (f"{E}/graph", [5, None, "b" * 64], "graph is .*: expected a list"),
    (f"{E}/graph", [[5], ["b" * 63], [None]], "expected 64 hexadecimal digits"),
    (f"{E}/backend", ["openvino", None, 5, []], "backend is .*: expected tensorrt or tensorrt-rtx"),
]


def part_of(manifest_data: Any, path: str) -> Any:
    """The part of a manifest at a path."""
    for name in filter(None, path.split("/")):
        manifest_data = manifest_data[int(name) if isinstance(manifest_data, list) else name]
    return manifest_data


@pytest.mark.parametrize(("path", "values", "message"), WRONG)
def test_a_value_of_the_wrong_kind_is_refused(bundle: Path, path: str, values: list[Any], message: str) -> None:
    outer, _, last = path.rpartition("/")
    before = (bundle / MANIFEST_FILE).read_bytes()
    for value in values:

        def change(manifest_data: dict[str, Any], value: Any = value) -> None:
            part = part_of(manifest_data, outer)
            assert last in part
            part[last] = value

        edit(bundle, change)
        refused(bundle, f"{re.escape(last)}.* is .*: {message}" if message in KINDS else message)
        (bundle / MANIFEST_FILE).write_bytes(before)


@pytest.mark.parametrize("path", ["", "signature", "tokens", "drafts", "drafts/layout", A, M, E])
def test_a_manifest_with_a_missing_or_unknown_field_is_refused(bundle: Path, path: str) -> None:
    """If unknown fields were ignored, a misspelt `end` would mean no end token, and a misspelt `window` no window."""
    before = (bundle / MANIFEST_FILE).read_bytes()
    for name in part_of(entries_of(before), path):

        def rename(manifest_data: dict[str, Any], name: str = name) -> None:
            part = part_of(manifest_data, path)
            part[name + "s"] = part.pop(name)

        edit(bundle, rename)
        refused(bundle, f"lacks '{name}'|schema is None")
        (bundle / MANIFEST_FILE).write_bytes(before)
    edit(bundle, lambda manifest_data: part_of(manifest_data, path).update({"extra\x1b": 1}))
    refused(bundle, r"has the unknown 'extra\\x1b': expected")


@pytest.mark.parametrize(
    "name", ["../x.engine", "x", "a/b.engine", ".engine", "A.engine", "x.engine\n", "-x.engine", "x" * 300 + ".engine"]
)
def test_an_engine_name_is_a_plain_file_name(bundle: Path, name: str) -> None:
    edit(bundle, lambda manifest_data: manifest_data["engines"].update({name: manifest_data["engines"][ENGINE]}))
    refused(bundle, "expected small letters, digits, dots and hyphens, ending in .engine")


def test_acceptance_has_one_entry_for_each_temperature(bundle: Path) -> None:
    edit(bundle, lambda manifest_data: part_of(manifest_data, "drafts/acceptance").append(part_of(manifest_data, A)))
    refused(bundle, "acceptance has temperature 0 twice: expected one entry for each temperature")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in parsed JSON."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [*((*path, key) for key in keys), *(p for key in keys for p in paths(value[key], (*path, key)))]


@pytest.fixture(scope="module")
def changed_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose manifest every example replaces."""
    folder = tmp_path_factory.mktemp("changed_bundle")
    fill(folder)
    shutil.copy(folder / MANIFEST_FILE, folder.with_suffix(".json"))
    return folder


def canonical(entries: object) -> str:
    """Entries as text, with 0 as 0.0, since a temperature may be written in both ways."""
    return json.dumps(json.loads(json.dumps(entries), parse_int=float), sort_keys=True)


def require_exact_or_refused(folder: Path, content: bytes) -> None:
    """Verify that a manifest is refused, or opens with exactly its content."""
    (folder / MANIFEST_FILE).write_bytes(content)
    try:
        opened = open_bundle(folder)
    except BundleError:
        return
    assert canonical(opened.manifest.as_dict()) == canonical(entries_of(content))


@settings(max_examples=300)
@given(data=st.data())
def test_a_manifest_with_changed_values_opens_with_exactly_its_content_or_not_at_all(
    changed_bundle: Path, data: st.DataObject
) -> None:
    manifest_data = entries_of(changed_bundle.with_suffix(".json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        *outer, last = data.draw(st.sampled_from(paths(manifest_data)))
        part = manifest_data
        for key in outer:
            part = part[key]
        match data.draw(st.sampled_from(("replace", "remove", "rename"))):
            case "replace":
                part[last] = data.draw(JSON | st.integers(0, 700))
            case "remove":
                part.pop(last)
            case "rename" if isinstance(part, dict):
                part[data.draw(st.text(max_size=5))] = part.pop(last)
    require_exact_or_refused(changed_bundle, with_digest(manifest_data))


@pytest.fixture
def content(bundle: Path) -> bytes:
    return (bundle / MANIFEST_FILE).read_bytes()


def test_every_flipped_bit_is_noticed(content: bytes) -> None:
    """Without the digest, 73 of 600 flips changed a value, such as a token id, and the bundle opened."""
    manifest = manifest_in(content)
    assert (manifest.schema, manifest_content(manifest)) == (SCHEMA, content)
    choices = random.Random(0)
    for _ in range(600):
        flipped = bytearray(content)
        flipped[choices.randrange(len(flipped))] ^= 1 << choices.randrange(8)
        with pytest.raises(ValueError, match=r"\w"):
            manifest_in(bytes(flipped))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"\n", b"\r\n", r"sha256 is .*…, the digest of its content is .*…: it was changed"),
        (b"}\n", b"}\n ", "it was changed"),
        (b'"mit"', b'"gpl"', "it was changed"),
        (b'"opset": 23', b'"opset": 23, "opset": 24', "has the entry 'opset' twice: expected each entry once"),
        *(
            (b'"temperature": 0.5', b'"temperature": ' + number, f"contains {number.decode()}: expected JSON numbers")
            for number in (b"NaN", b"Infinity", b"-Infinity")
        ),
    ],
)
def test_changed_content_is_refused(content: bytes, old: bytes, new: bytes, message: str) -> None:
    """JSON readers disagree on which of two equal entries counts."""
    assert old in content
    with pytest.raises(ManifestError, match=message):
        manifest_in(content.replace(old, new))


@pytest.mark.parametrize("digest", ["null", "5", '""', '"\u00e9"', '"' + "0" * 63 + '"', "[]"])
def test_a_manifest_without_a_proper_digest_is_refused(content: bytes, digest: str) -> None:
    start = content.rindex(b'"sha256": ') + len(b'"sha256": ')
    with pytest.raises(ManifestError, match="expected the digest of the manifest"):
        manifest_in(content[:start] + digest.encode() + b"\n}\n")
