"""Tokenizer files: those of published models open; those with which little text costs much are refused at once."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from spaceport.graphs.contract import tokenizer_bounds
from spaceport.graphs.contract.faults import LibraryPanic, PanicsContained
from spaceport.graphs.contract.manifest import TOKENIZER_FILE, Manifest, TokenIds
from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.bundle import Bundle, BundleError
from spaceport.runtime.text.tokenizer import open_tokenizer, with_small_cache
from support.paths import TINY
from support.small_tokenizers import BYTES, FALLBACK

WORDS: dict[str, Any] = json.loads(Tokenizer(models.WordLevel({"a": 0, "b": 1, "": 2}, "a")).to_str())
Json = dict[str, Any]


def opened(folder: Path, content: str | bytes | Json) -> Tokenizer:
    """The tokenizer of a bundle with this tokenizer.json; a table has parts of the one of two words."""
    if isinstance(content, dict):
        content = json.dumps({**WORDS, **content})
    (folder / TOKENIZER_FILE).write_bytes(content.encode() if isinstance(content, str) else content)
    manifest = Manifest(Signature(1, 1, 1, 1, "float32", "scatter"), TokenIds(), 0, 1, "llama", 1, 23, "plain")
    return open_tokenizer(Bundle(folder, manifest))


def replacing(text: str, pattern: str = "a", kind: str = "String") -> Json:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": text}


def splitting(expression: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def table(text: bytes) -> str:
    """A table that replaces no character, with this text for one."""
    return base64.b64encode(struct.pack("<I", 8) + bytes(8) + b"a\0" + text + b"\0").decode()


def added(count: int, text: str) -> list[Json]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return [{"id": 2 + index, "content": f"{text}{index}", "normalized": True, **flags} for index in range(count)]


def in_sequence(name: str, components: list[Json]) -> Json:
    return {"type": "Sequence", name: components}


def post_processor(template: list[Json], tokens: Sequence[str] = ()) -> Json:
    """A template of a text and of a special token `a` that stands for these tokens."""
    special = {"a": {"id": "a", "ids": [0] * len(tokens), "tokens": tokens}} if tokens else {}
    return {"post_processor": {"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": special}}


_BERT = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
_LATIN = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PUBLISHED = {
    "GPT-2": splitting(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
    "Llama 3": splitting(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-oss": splitting(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "DeepSeek V3": splitting(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    ),
    "Kimi K2": splitting(rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_LATIN}*{_LATIN}+(?i:'s|'t)?|\p{{N}}{{1,3}}"),
    "digits in threes": splitting(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))"),
}
ACCEPTED: dict[str, str | Json] = {
    "byte level": BYTES.to_str(),
    "byte fallback": FALLBACK.to_str(),
    "over several lines": FALLBACK.to_str(pretty=True),
    "the model first": json.dumps(dict(reversed(json.loads(FALLBACK.to_str()).items()))),
    "a file of a checkpoint": (TINY / "tokenizer.json").read_text("utf-8"),
    **{name: {"pre_tokenizer": part} for name, part in PUBLISHED.items()},
    "XGLM": {
        "normalizer": in_sequence(
            "normalizers",
            [{"type": "Precompiled", "precompiled_charsmap": table(b"x" * 33)}, replacing(" ", " {2,}", "Regex")],
        ),
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    },
    "BERT": {
        "normalizer": {"type": "BertNormalizer", **_BERT},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["a", 0], "cls": ["b", 1]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    },
}
PADDING = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
TEXT = [{"Sequence": {"id": "A", "type_id": 0}}]
LONG_WORDS = {"continuing_subword_prefix": "", "max_input_chars_per_word": 10**6}
SEVENFOLD = in_sequence("normalizers", [replacing("a" * 10)] * 7)
REFUSED: dict[str, tuple[str | Json, str]] = {
    "seven normalizers": ({"normalizer": SEVENFOLD}, "a character may become 10000000 times as long, 256 times"),
    "nine decoders": (
        {"decoder": in_sequence("decoders", [replacing("a" * 10)] * 9)},
        "a token may become 1000000000 times as long, 16 times",
    ),
    "a prefix of 12 MB": ({"normalizer": {"type": "Prepend", "prepend": "a" * 12_000_000}}, "more than 4096 bytes"),
    "a prefix of 12 MB of quotes": ({"normalizer": {"type": "Prepend", "prepend": '"' * 6_000_000}}, "4096 bytes"),
    "a token of 12 MB": ({"model": {**WORDS["model"], "vocab": {"a": 0, "b" * 12_000_000: 1}}}, "4096 bytes"),
    "prefixes behind each other": (
        {"normalizer": in_sequence("normalizers", [{"type": "Prepend", "prepend": "a" * 200}] * 2)},
        "a character may become 401 times as long",
    ),
    "sequences in sequences": (
        {"normalizer": in_sequence("normalizers", [SEVENFOLD, SEVENFOLD])},
        "a character may become 1e[+]14|a character may become 100000000000000 times",
    ),
    "normalizers and pre-tokenizers": (
        {"normalizer": {"type": "NFKD"}, "pre_tokenizer": in_sequence("pretokenizers", [{"type": "ByteLevel"}] * 5)},
        "a character may become 383 times as long",
    ),
    "a replacement at each place": ({"normalizer": replacing("a" * 300, "", "Regex")}, "601 times as long"),
    "an empty pattern": ({"normalizer": replacing("a" * 300, "")}, "601 times as long"),
    "a table": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": table(b"x" * 5000)}},
        "a character may become 5000 times as long",
    ),
    "many added tokens": (
        {"normalizer": replacing("a" * 255), "added_tokens": added(1000, "a" * 1000)},
        "its added tokens may have 25[0-9]+ bytes after the normalizer",
    ),
    "more components than needed": (
        {"normalizer": in_sequence("normalizers", [{"type": "Strip"}] * 65)},
        "normalizer has more than 64 components",
    ),
    "padding": ({"padding": {**PADDING, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}}, "padding is .*none"),
    "truncation": ({"truncation": {"max_length": 1}}, "truncation is .*expected none"),
    "a template": (post_processor(TEXT * 65), "the post-processor may become 65 times as long"),
    "ids of a template": (
        post_processor([{"SpecialToken": {"id": "a", "type_id": 0}}, *TEXT], ["a"] * 1000),
        "the post-processor may become 1001 times as long",
    ),
    "long words": (
        {"model": {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0}, **LONG_WORDS}},
        "max_input_chars_per_word is 1000000, 256 are allowed",
    ),
    "a normalizer after the model": (
        FALLBACK.to_str()[:-1] + ', "normalizer": ' + json.dumps({"type": "Prepend", "prepend": 'a"' * 5000}) + "}",
        "more than 4096 bytes",
    ),
    "an unknown type": ({"normalizer": {"type": "Repeat"}}, "normalizer has the type 'Repeat', expected one of Strip,"),
    "a component that is none": ({"decoder": [1]}, r"decoder has the component \[1\], expected a table"),
    "a component without its fields": ({"decoder": {"type": "Replace"}}, "decoder has the component .*not valid"),
}
EXPRESSIONS = {
    "choices in a repetition": (r"(?:\w|\w){0,20}\W", "repeats something with choices"),
    "repetitions in each other": ("(a*)*c", "repeats something with choices"),
    "a repeated repetition": (r"\p{N}{1,3}+b", "repeats something with choices"),
    "repetitions behind each other": (r"\w*\w*\w*\w*\W", "may try too often"),
    "options behind each other": ("a?" * 30, "may try too often"),
    "alternatives behind each other": ("(?:a|a)" * 20, "may try too often"),
    "a repetition behind a class": ("[]a](a*)*[]]", "repeats something"),
    "a comment": ("(?#[)(a*)*", "not allowed"),
    "comments behind an option": ("(?x)#[\n(a*)*", "not allowed"),
    "an option in the middle": ("a(?i)b|c", "not allowed"),
    "a class without an end": ("[[:b](a*)*", "an unknown class"),
    "a reference": (r"(a*)\1", "not allowed"),
    "a call": (r"(?<n>a|b\g<n>)", "not allowed"),
}
REFUSED |= {name: ({"pre_tokenizer": splitting(text)}, why) for name, (text, why) in EXPRESSIONS.items()}
REFUSED["an expression of a normalizer"] = ({"normalizer": replacing("b", "(a*)*", "Regex")}, "repeats something")


@pytest.mark.parametrize("name", ACCEPTED)
def test_tokenizers_of_published_models_open_as_they_are(name: str, tmp_path: Path) -> None:
    content = ACCEPTED[name]
    text = content if isinstance(content, str) else json.dumps({**WORDS, **content})
    assert json.loads(opened(tmp_path, text).to_str()) == json.loads(Tokenizer.from_str(text).to_str())


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_with_which_little_text_costs_much_is_refused_at_once(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    with pytest.raises(BundleError, match=rf"tokenizer\.json: .*({message}).*: expected the tokenizer of a published"):
        opened(tmp_path, content)


def test_of_a_part_that_a_file_has_twice_the_checked_one_is_used(tmp_path: Path) -> None:
    normalizer = json.dumps({"type": "Prepend", "prepend": "x"})
    found = opened(tmp_path, FALLBACK.to_str()[:-1] + f', "norm\\u0061lizer": {normalizer}}}')
    assert found.normalizer.normalize_str("a") == "▁a"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2", b"\xff\xfe", b'{"version": "1.0"}', b'"a"', b"[" * 100_000])
def test_a_file_that_is_no_tokenizer_is_an_error_that_names_it(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a readable tokenizer"):
        opened(tmp_path, content)


TEXTS = st.text("a bé你ﷺİ\u0390", min_size=1, max_size=8)
COMPONENTS = st.sampled_from(
    [
        *({"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")),
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "BertNormalizer", **_BERT},
        {"type": "Prepend", "prepend": "▁x"},
        replacing("▁", " "),
        replacing("ﷺ"),
        replacing("bc", "", "Regex"),
        replacing("", "a*", "Regex"),
        replacing("xy", ""),
    ]
)


@given(components=st.lists(COMPONENTS, max_size=4), text=TEXTS)
def test_no_normalizer_makes_a_text_longer_than_the_bound(components: list[Json], text: str) -> None:
    part = in_sequence("normalizers", components)
    growth = tokenizer_bounds._growth_of(part, "normalizer", tokenizer_bounds._TEXT)
    normalizer = Tokenizer.from_str(json.dumps({**WORDS, "normalizer": part})).normalizer
    try:
        with PanicsContained("tokenizers normalized a text"):
            size = len(normalizer.normalize_str(text).encode())
    except LibraryPanic:  # some expressions that match nothing
        assume(False)
    assert size <= growth.factor * len(text.encode()) + growth.added


def test_the_checks_know_all_components_of_the_library() -> None:
    special = {"Normalizer", "PreTokenizer", "Decoder", "DecodeStream", "Sequence"}
    for module, known in (
        (normalizers, tokenizer_bounds._TEXT),
        (pre_tokenizers, tokenizer_bounds._TEXT),
        (decoders, tokenizer_bounds._DECODERS),
    ):
        names = {name for name, kind in vars(module).items() if isinstance(kind, type)} - special
        assert names <= known.keys()


def test_the_tokenizer_has_a_cache_of_few_words() -> None:
    """With its own one of 10,000 words, prompts of ever new words fill 57 MiB."""
    assert hasattr(BYTES.model, "_resize_cache")
    sizes: list[int] = []
    stub: Any = SimpleNamespace(model=SimpleNamespace(_resize_cache=sizes.append))
    assert with_small_cache(stub) is stub
    assert 0 < sizes[0] < 3000
