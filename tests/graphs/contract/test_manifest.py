"""Manifest: a manifest is read completely or refused, whatever its file contains, and any changed byte is noticed."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.manifest import MANIFEST_FILE, MODEL_FILE, SCHEMA, ManifestError
from spaceport.graphs.contract.manifest_file import manifest_content, manifest_in, with_digest
from spaceport.graphs.contract.mask_layout import MaskLayout
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
        (
            b'{"schema": 1}',
            "manifest lacks .*'files'.*: expected acceptance, activations, attention, embeddings, engines, files",
        ),
    ],
)
def test_a_file_that_is_not_a_manifest_is_refused(bundle: Path, content: bytes, message: str) -> None:
    (bundle / MANIFEST_FILE).write_bytes(content)
    refused(bundle, rf"manifest\.json: .*{message}.*copy the bundle again or export it again")


def test_a_huge_manifest_is_refused_before_it_is_read(bundle: Path) -> None:
    with (bundle / MANIFEST_FILE).open("r+b") as file:
        file.truncate(2**40)  # sparse: uses no disk space
    refused(bundle, f"{2**40} bytes: expected at most {2**24}")


def test_a_manifest_of_a_newer_schema_is_reported_as_such(bundle: Path) -> None:
    """A newer schema may have other fields."""
    (bundle / MANIFEST_FILE).write_text(json.dumps({"schema": 10, "shape": "unknown"}))
    refused(bundle, "schema is 10, this version reads up to 9: update spaceport")


NUMBER = "expected a whole number of at least"
WRONG: list[tuple[tuple[Any, ...], list[Any], str]] = [
    (("schema",), [0, "1", None, 1.0, True], NUMBER),
    (("fork_by_default",), ["no", 1, None], "expected true or false"),
    (("max_mask_slots",), [-1, "2", None, 2.0, True, [2]], NUMBER),
    (("max_mask_slots",), [65, 10**9], "expected at most 64"),
    (("max_mask_slots",), [3], "max_mask_slots is 3, tokens.mask has 2: expected one for all, or one for each"),
    (("acceptance",), [5, None, {}], "acceptance is .*: expected a list"),
    (("acceptance",), [[5], [None]], r"acceptance\[0\] is .*: expected an object"),
    (("acceptance",), [[{"rates": []}]], r"acceptance\[0\] lacks 'data', 'date', 'lookup', 'temperature', 'tokens'"),
    (("acceptance", 0, "rates"), [5, None, "0.5"], r"acceptance\[0\].rates is .*: expected a list"),
    (("acceptance", 0, "rates"), [["0.5"], [None], [True]], r"acceptance\[0\].rates\[0\] is .*: expected a number"),
    (("acceptance", 0, "rates"), [[1.5], [-0.1], [10**300]], "rates is .*: expected rates from 0 to 1"),
    (("acceptance", 0, "rates"), [[10**400]], "expected a number that a float can hold"),
    (("acceptance", 0, "rates"), [[0.5, 0.6]], "rates is .*: expected rates that do not increase with depth"),
    (("acceptance", 0, "rates"), [[0.5] * 65], "rates has 65 depths: expected at most 64"),
    (("acceptance", 0, "lookup"), [[0.5], [0.5] * 6], "lookup has [16] rates: expected 5 or none"),
    (("acceptance", 0, "lookup"), [[2, 0, 0, 0, 0]], "lookup is .*: expected rates from 0 to 1"),
    (("acceptance", 0, "temperature"), [-1, -0.5], "temperature is .*: expected a number of at least 0"),
    (("acceptance", 0, "temperature"), ["0", None, True], "temperature is .*: expected a number"),
    (("acceptance", 0, "tokens"), [-1, 0.5, None], f"tokens is .*: {NUMBER}"),
    (("acceptance", 0, "data"), ["a/b", "a\\b", "a\n", "a" * 201], "data is .*: expected a file name or"),
    (("acceptance", 0, "date"), ["yesterday", "2026-02-30", "20260101"], "date is .*: expected a day such as 2026"),
    (("preloaded_slots",), [-1, 0.5, None, "16"], "preloaded_slots is .*: expected a whole number"),
    (("mask_layout",), [5, None, []], "mask_layout is .*: expected an object"),
    (("mask_layout", "shift"), [0, "no", None], "shift is .*: expected true or false"),
    (("mask_layout", "group"), ["tree", None, True], "group is .*: expected causal or block"),
    (
        ("mask_layout", "shift"),
        [False],
        "tokens.mask has 2: expected one for all, or one for each of 3 mask rows",
    ),
    (("max_positions",), [0, "9", None, {}], NUMBER),
    (("max_positions",), [2**31, 10**300], f"max_positions is .*: expected at most {2**31 - 1}"),
    (("parameters",), [-1, "9", None], NUMBER),
    (("parameters",), [10**16], "parameters is .*: expected at most"),
    (("opset",), [0, "23", None], NUMBER),
    (("opset",), [1001], "opset is 1001: expected at most 1000"),
    (("model_type",), [5, None, ["llama"], {}], "model_type is .*: expected text"),
    (("attention",), [5, None, True], "attention is .*: expected text"),
    (("special_tokens",), [5, None, [], "<s>"], "special_tokens is .*: expected an object"),
    (("special_tokens", "bos_token"), [5, None, ["<s>"]], "bos_token is .*: expected text"),
    (("versions",), [5, None, []], "versions is .*: expected an object"),
    (("versions", "spaceport"), [5, None], "spaceport is .*: expected text"),
    (("provenance",), [5, None, []], "provenance is .*: expected an object"),
    (
        ("provenance",),
        [{"owner": "x"}],
        "provenance has the unknown 'owner': expected name, source, revision, licence, method, adapter",
    ),
    (("provenance", "name"), [5, None], "name is .*: expected text"),
    (("generation_config",), [5, None, []], "generation_config is .*: expected an object"),
    (("tokens",), [5, None, []], "tokens is .*: expected an object"),
    (
        ("tokens", "mask"),
        [4, None, ["4"], [4.0], [True], [-1], {"4": 4}],
        r"tokens\.mask is .*: expected a list of token",
    ),
    (
        ("tokens", "mask"),
        [[], [4, 5, 640], [640]],
        "expected one for all|tokens hold the id 640: expected ids from 0 to 639",
    ),
    (("tokens", "end"), [1, None, ["1"], [None]], r"tokens\.end is .*: expected a list of token"),
    (("tokens", "mask"), [[4, 6], [7], [3]], "token id [673] has two of the roles mask, fork, child and end"),
    (("tokens", "end"), [[6], [1, 4]], "token id [64] has two of the roles mask, fork, child and end"),
    (("tokens", "fork"), [7], "token id 7 has two of the roles"),
    (("tokens", "end"), [[640]], "tokens hold the id 640: expected ids from 0 to 639"),
    (("tokens", "fork"), ["6", 6.0, -1, True, []], NUMBER),
    (("tokens", "fork"), [None], "tokens.fork is None, tokens.child is 7: expected both or none"),
    (("tokens", "child"), ["7", -1, {}], NUMBER),
    (("tokens", "child"), [10**30], "tokens hold the id 1000000000000000000000000000000: expected ids"),
    (("signature",), [5, None, []], "signature is .*: expected an object"),
    (("signature", "layers"), [0, -1, "2", None, 2.0, True], f"signature: layers is .*: {NUMBER}"),
    (("signature", "kv_heads"), [0, None], f"signature: kv_heads is .*: {NUMBER}"),
    (("signature", "head_dim"), [0, None], f"signature: head_dim is .*: {NUMBER}"),
    (("signature", "vocab_size"), [0, None], f"signature: vocab_size is .*: {NUMBER}"),
    (("signature", "heads"), [-1, None, "3", True, 1.0], f"signature: heads is .*: {NUMBER}"),
    (("signature", "heads"), [65], "signature: heads is 65: expected at most 64"),
    (("signature", "heads"), [3], "max_mask_slots is 2, signature.heads is 3: expected one of them to be 0"),
    (("signature", "layers"), [4097, 10**300], "signature: layers is .*: expected at most 4096"),
    (("signature", "kv_heads"), [2**20], "signature: kv_heads is .*: expected at most 4096"),
    (("signature", "head_dim"), [2**17], "signature: head_dim is .*: expected at most 65536"),
    (("signature", "vocab_size"), [2**25], "signature: vocab_size is .*: expected at most 16777216"),
    (("signature", "window"), [2**31], "signature: window is .*: expected at most"),
    (("signature", "dtype"), ["float64", None, 32, ["float32"], {}], "signature: dtype is .*: expected one of float32"),
    (("signature", "lowering"), ["gather", None, 0], "signature: lowering is .*: expected one of scatter, append"),
    (("signature", "window"), [0, -1, "32", True, []], "signature: window is .*: expected null or a whole number"),
    (("files",), [5, None, []], "files is .*: expected an object"),
    (("files", MODEL_FILE), [5, None, "0" * 64], r"files\['model.onnx'\] is .*: expected an object"),
    (("files", MODEL_FILE, "sha256"), [5, None], "sha256 is .*: expected 64 hexadecimal digits"),
    (("files", MODEL_FILE, "sha256"), ["", "0" * 63, "G" * 64, "A" * 64], "expected 64 hexadecimal digits"),
    (("files", MODEL_FILE, "size"), [-1, "7", None, 7.0], f"size is .*: {NUMBER}"),
    (("weights",), [5, None, "int7", ["int4"]], "weights is .*: expected same or int8 or int4 or float8"),
    (("activations",), [5, None, "int4"], "activations is .*: expected int8x2 or int8 or float"),
    (("activations",), ["int8"], "activations is int8, weights is same: expected float activations"),
    (("embeddings",), [5, None, "float8"], "embeddings is .*: expected same or int8 or int4"),
    (("files", MODEL_FILE, "size"), [2**50 + 1], "size is .*: expected at most"),
    (("engines",), [5, None, []], "engines is .*: expected an object"),
    (("engines", ENGINE), [5, None, "0" * 64], "engines.* is .*: expected an object"),
    (("engines", ENGINE, "sha256"), ["", "G" * 64], "sha256 is .* expected 64 hexadecimal digits"),
    (("engines", ENGINE, "sha256"), [5, None], "sha256 is .*: expected 64 hexadecimal digits"),
    (("engines", ENGINE, "size"), [-1, "7", None], f"size is .*: {NUMBER}"),
    (("engines", ENGINE, "graph"), [5, None, "b" * 64], "expected a list of digests"),
    (("engines", ENGINE, "graph"), [[5], ["b" * 63], [None]], "expected 64 hexadecimal digits"),
    (("engines", ENGINE, "backend"), ["openvino", None, 5, []], "backend is .*: expected tensorrt or tensorrt-rtx"),
    (("engines", ENGINE, "version"), [5, None], "version is .*: expected text"),
    (("engines", ENGINE, "target"), [89, None], "target is .*: expected text"),
    (("engines", ENGINE, "capacity"), [0, None, "9", True], f"capacity is .*: {NUMBER}"),
    (("engines", ENGINE, "capacity"), [2**31], "capacity is .*: expected at most"),
    (("engines", ENGINE, "requests"), [0, None], f"requests is .*: {NUMBER}"),
    (("engines", ENGINE, "step_rows"), [0, None], f"step_rows is .*: {NUMBER}"),
    (("engines", ENGINE, "prefill_rows"), [0, None], f"prefill_rows is .*: {NUMBER}"),
    (("engines", ENGINE, "decomposed"), [-1, None], f"decomposed is .*: {NUMBER}"),
    (("engines", ENGINE, "refittable"), [0, "no", None], "refittable is .*: expected true or false"),
]


def test_every_field_of_a_manifest_has_a_test_of_its_type(bundle: Path) -> None:
    manifest_data = entries_of((bundle / MANIFEST_FILE).read_bytes())
    assert {path[0] for path, _, _ in WRONG} == set(manifest_data)
    for name in ("tokens", "signature", "mask_layout"):
        assert {path[1] for path, _, _ in WRONG if path[0] == name and len(path) > 1} == set(manifest_data[name])


@pytest.mark.parametrize(
    ("path", "values", "message"), WRONG, ids=lambda value: ".".join(map(str, value)) if type(value) is tuple else ""
)
def test_a_value_of_the_wrong_kind_is_refused(
    bundle: Path, path: tuple[Any, ...], values: list[Any], message: str
) -> None:
    *outer, last = path
    for value in values:

        def change(manifest_data: dict[str, Any], value: Any = value) -> None:
            for name in outer:
                manifest_data = manifest_data[name]
            assert last in manifest_data
            manifest_data[last] = value

        before = (bundle / MANIFEST_FILE).read_bytes()
        edit(bundle, change)
        refused(bundle, message)
        (bundle / MANIFEST_FILE).write_bytes(before)


@pytest.mark.parametrize(
    "path",
    [(), ("signature",), ("tokens",), ("mask_layout",), ("acceptance", 0), ("files", MODEL_FILE), ("engines", ENGINE)],
    ids=lambda path: ".".join(map(str, path)),
)
def test_a_manifest_with_a_missing_or_unknown_field_is_refused(bundle: Path, path: tuple[Any, ...]) -> None:
    """If unknown fields were ignored, a misspelt `end` would mean no end token, and a misspelt `window` no window."""
    before = (bundle / MANIFEST_FILE).read_bytes()
    manifest_data: Any = entries_of(before)
    for name in path:
        manifest_data = manifest_data[name]
    for name in manifest_data:

        def rename(manifest_data: dict[str, Any], name: str = name) -> None:
            for outer in path:
                manifest_data = manifest_data[outer]
            manifest_data[name + "s"] = manifest_data.pop(name)

        edit(bundle, rename)
        refused(bundle, f"lacks '{name}'|schema is None")
        (bundle / MANIFEST_FILE).write_bytes(before)

    def add(manifest_data: dict[str, Any]) -> None:
        for outer in path:
            manifest_data = manifest_data[outer]
        manifest_data["extra\x1b"] = 1

    edit(bundle, add)
    refused(bundle, r"has the unknown 'extra\\x1b': expected")


@pytest.mark.parametrize(
    "name", ["../x.engine", "x", "a/b.engine", ".engine", "A.engine", "x.engine\n", "-x.engine", "x" * 300 + ".engine"]
)
def test_an_engine_name_is_a_plain_file_name(bundle: Path, name: str) -> None:
    edit(bundle, lambda manifest_data: manifest_data["engines"].update({name: manifest_data["engines"][ENGINE]}))
    refused(bundle, "expected small letters, digits, dots and hyphens, ending in .engine")


def test_acceptance_has_one_entry_for_each_temperature(bundle: Path) -> None:
    edit(bundle, lambda manifest_data: manifest_data["acceptance"].append(manifest_data["acceptance"][0]))
    refused(bundle, "acceptance has temperature 0 twice: expected one entry for each temperature")


# For each older schema: the fields that it did not have, and what a bundle without them has.
ADDED: dict[int, tuple[tuple[str, ...], dict[str, Any]]] = {
    8: (("acceptance",), {"acceptance": ()}),
    7: (("preloaded_slots",), {"preloaded_slots": 0}),
    6: (("mask_layout", "signature.heads"), {"mask_layout": MaskLayout(shift=True, group="causal")}),
    5: (("provenance",), {"provenance": {}}),
    3: (("fork_by_default",), {}),
    2: (("activations", "embeddings"), {"activations": "float", "embeddings": "same"}),
    1: (("engines", "weights"), {"engines": {}, "weights": "same"}),
}


@pytest.mark.parametrize("all_at_once", [False, True], ids=["those of the schema", "all that came later"])
@pytest.mark.parametrize("schema", ADDED)
def test_a_bundle_of_an_older_schema_has_the_values_of_its_time(bundle: Path, schema: int, all_at_once: bool) -> None:
    added = [entry for number, entry in ADDED.items() if (number >= schema if all_at_once else number == schema)]
    expected = replace(open_bundle(bundle).manifest, schema=schema)
    for _, values in added:
        expected = replace(expected, **values)

    def older(manifest_data: dict[str, Any]) -> None:
        manifest_data["schema"] = schema
        for path in (path for names, _ in added for path in names):
            outer, _, name = path.rpartition(".")
            (manifest_data[outer] if outer else manifest_data).pop(name)

    edit(bundle, older)
    assert open_bundle(bundle).manifest == expected


def test_a_bundle_of_the_third_schema_opens_with_its_older_names(bundle: Path) -> None:
    def older(manifest_data: dict[str, Any]) -> None:
        manifest_data["schema"] = 3
        del manifest_data["fork_by_default"], manifest_data["provenance"], manifest_data["mask_layout"]
        manifest_data["family"] = manifest_data.pop("model_type")
        manifest_data["generation"] = manifest_data.pop("generation_config")
        for engine in manifest_data["engines"].values():
            engine["flavour"] = engine.pop("backend")
            engine["prompt_rows"] = engine.pop("prefill_rows")

    newest = replace(open_bundle(bundle).manifest, provenance={})
    edit(bundle, older)
    assert replace(open_bundle(bundle).manifest, schema=newest.schema) == newest
    edit(bundle, lambda manifest_data: manifest_data.update(model_type="llama"))
    refused(bundle, "has the unknown 'family'")


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


def require_exact_or_refused(folder: Path, content: bytes) -> None:
    """Verify that a manifest is refused, or opens with exactly its content."""
    (folder / MANIFEST_FILE).write_bytes(content)
    try:
        opened = open_bundle(folder)
    except BundleError:
        return
    manifest_data = entries_of(content)
    assert json.dumps(opened.manifest.as_dict(), sort_keys=True) == json.dumps(manifest_data, sort_keys=True)


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


@settings(max_examples=300)
@given(
    index=st.integers(0),
    length=st.integers(0, 9),
    content=st.binary(max_size=4) | st.text('"{}[],:0', max_size=4).map(str.encode),
)
def test_a_manifest_with_changed_bytes_opens_with_exactly_its_content_or_not_at_all(
    changed_bundle: Path, index: int, length: int, content: bytes
) -> None:
    manifest_data = changed_bundle.with_suffix(".json").read_bytes()
    index %= len(manifest_data)
    changed = manifest_data[:index] + content + manifest_data[index + length :]
    require_exact_or_refused(changed_bundle, changed)
    with suppress(ValueError, AttributeError, TypeError):  # as before, with a digest that fits
        require_exact_or_refused(changed_bundle, with_digest(entries_of(changed)))


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
