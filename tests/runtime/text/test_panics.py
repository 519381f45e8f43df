"""Panics: a Rust panic of a library becomes a typed error of the text that caused it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from time import sleep

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from spaceport.graphs.contract.faults import LibraryPanic, SpaceportError, is_panic, raise_panic
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Request
from spaceport.runtime.text.tokenizer import TextStream, context_of, decode, encode
from support.hash_engine import Language
from support.hash_runtime import hash_runtime


def words(**parts: object) -> Tokenizer:
    """A tokenizer of two words, with these parts of its file."""
    settings = json.loads(Tokenizer(models.WordLevel({"a": 0, "": 1, "é": 2}, "a")).to_str())
    return Tokenizer.from_str(json.dumps({**settings, **parts}))


def stripping() -> Tokenizer:
    """A tokenizer whose decoder panics with short tokens."""
    return words(decoder={"type": "Strip", "content": "a", "start": 5, "stop": 5})


def malformed() -> Tokenizer:
    """A tokenizer with a truncated table of normalized characters."""
    table = base64.b64encode(b"\x00\x00\x00\x00XYZ").decode()
    return words(normalizer={"type": "Precompiled", "precompiled_charsmap": table})


def splitting() -> Tokenizer:
    """A tokenizer with an expression that tries too often: Llama 3's panics with 12 million spaces."""
    tokenizer = words()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a|a)*\z|(a*)*c"), "isolated")
    return tokenizer


CASES: dict[str, Callable[[], object]] = {
    "decoder": lambda: decode(stripping(), [0]),
    "text stream": lambda: TextStream(stripping()).push(0),
    "context of a text stream": lambda: context_of(stripping(), [0]),
    "normalizer": lambda: encode(malformed(), "aé b", special=False),
    "splitting expression": lambda: encode(splitting(), "a" * 40 + "b", special=False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_panic_is_a_typed_error(name: str) -> None:
    message = r"a panic while tokenizers .*: change the input, or update the library"
    with pytest.raises(LibraryPanic, match=message) as caught:
        CASES[name]()
    assert isinstance(caught.value, SpaceportError)
    assert is_panic(caught.value.__cause__ or caught.value)


class Panicking:
    """A token selector that panics."""

    def token(self, *_: object) -> int:
        stripping().decode([0])
        return 0

    def candidates(self, *_: object) -> tuple[Candidates, ...]:
        return ()


def test_a_panic_in_a_step_fails_only_its_request() -> None:
    with hash_runtime(Language(3), requests=2) as runtime:
        alone = runtime.generate([3, 4], Decoding(max_tokens=30))
        other = runtime.stream([3, 4], Decoding(max_tokens=30, timeout=60))
        request = Request([5, 6], Decoding(max_tokens=30))
        sequences = runtime._admission.prepare(request)
        assert sequences is not None
        sequences.selector = Panicking()
        runtime._worker.submit(request, sequences)
        assert other.completion().text == alone.text
        while not request.done:
            sleep(0.001)
    assert isinstance(request.error, LibraryPanic)


def test_other_errors_are_left_alone() -> None:
    raise_panic(KeyboardInterrupt(), "tokenizers encoded a text")
    raise_panic(ValueError("PanicException"), "tokenizers encoded a text")
