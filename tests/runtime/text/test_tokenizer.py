"""Text: a stream shows what its tokens say and nothing of a stop string, and a panic of a library is an error of its text."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from time import sleep

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from spaceport.graphs.contract.faults import LibraryPanic, OptionFault, SpaceportError, is_panic, raise_panic
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Request
from spaceport.runtime.text.tokenizer import StopSearch, TextStream, context_of, decode, encode
from spaceport.runtime.text.transcript import Segment
from support.hash_engine import Language
from support.hash_runtime import hash_runtime
from support.small_tokenizers import BROKEN, BYTES, FALLBACK, cut_at, full, one_byte_each

BOTH = pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte_level", "byte_fallback"])

TEXTS = st.lists(
    st.sampled_from(
        ["the answer", " ", "  ", "\n", "你好", "😀", "👨‍👩‍👧", "e\u0301", "שלום", "مرحبا", "\u200f", "0", "ab"]
    )
    | st.text(max_size=4),
    max_size=12,
).map("".join)


def shown_by(stream: TextStream | Segment, tokens: Iterable[int]) -> list[str]:
    """The pieces up to a stop string or the end, the last one being what finish lets out."""
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if isinstance(stream, Segment) and stream.search.stopped:
            break
    return [*pieces, stream.finish()]


def stopping(*stops: str) -> Segment:
    return Segment(TextStream(BYTES), StopSearch(stops))


@BOTH
@given(text=TEXTS)
def test_the_pieces_of_a_text_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    assume("▁" not in text and "s>" not in text)  # sentencepiece's own sign for a space, and part of special tokens
    tokens = encode(tokenizer, text, special=False)
    stream = TextStream(tokenizer)
    pieces = shown_by(stream, tokens)
    assert "".join(pieces) == full(tokenizer, tokens) == text
    assert all(text.startswith("".join(pieces[:count])) for count in range(len(pieces)))


@settings(max_examples=400)
@given(tokens=st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=40))
def test_all_that_is_complete_is_shown_at_once_and_nothing_else(tokens: list[int]) -> None:
    stream = TextStream(BYTES)
    shown = ""
    for count, token in enumerate(tokens, 1):
        shown += stream.push(token)
        assert shown == full(BYTES, tokens[:count]).rstrip(BROKEN)
    assert shown + stream.finish() == full(BYTES, tokens)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("<0xC3>", "<0xA9>", "<0xFF>", "a"), "é�a"),
        (("<0xC3>", "<0xA9>", "<0xE4>", "<0xBD>"), "é��"),
        (("<0xC3>", "<0xA9>", "<0xC3>", "<0xA9>"), "éé"),
        (("▁a", "<0xE4>", "<0xBD>", "a", "▁a"), "a��a a"),
    ],
)
def test_every_broken_byte_behind_a_character_is_shown_once(names: Sequence[str], text: str) -> None:
    stream = TextStream(FALLBACK)
    assert "".join(shown_by(stream, map(FALLBACK.get_vocab().__getitem__, names))) == text


@given(text=TEXTS, indices=st.lists(st.integers(0, 100), max_size=12))
def test_special_tokens_are_not_shown_and_do_not_part_a_character(text: str, indices: list[int]) -> None:
    tokens = one_byte_each(text)
    for index in indices:
        tokens.insert(index % (len(tokens) + 1), index % 2)
    assert "".join(shown_by(TextStream(BYTES), tokens)) == text


@BOTH
@given(before=TEXTS, after=TEXTS)
def test_a_stream_with_a_context_goes_on_where_that_ends(tokenizer: Tokenizer, before: str, after: str) -> None:
    assume("▁" not in before + after and "s>" not in before + after)  # part of special tokens
    start = encode(tokenizer, before, special=False)
    tokens = encode(tokenizer, before + after, special=False)
    assume(tokens[: len(start)] == start)
    context = context_of(tokenizer, start)
    assume(context or not start)  # of bytes alone none is text by itself
    stream = TextStream(tokenizer, context=context)
    assert "".join(shown_by(stream, tokens[len(start) :])) == after


def test_the_context_is_the_last_token_that_is_text_by_itself() -> None:
    end, lead = BYTES.get_vocab()["</s>"], one_byte_each("é")[0]
    a, b = one_byte_each("ab")
    assert context_of(BYTES, [a, b, lead, end]) == (b,)
    assert context_of(BYTES, [lead, end]) == context_of(BYTES, []) == ()


@settings(max_examples=600)
@given(
    text=st.text("ab你😀", max_size=14),
    stops=st.lists(st.text("ab你😀", min_size=1, max_size=4), max_size=5),
    by_bytes=st.booleans(),
)
@example("ab", ["abc", "b"], False)
@example("abab", ["abab", "b"], False)  # one token: where it ends is not where the text is cut
@example("abab", ["bab", "ab"], True)
@example("aba", ["abab"], False)
def test_a_text_is_cut_before_or_behind_the_first_stop_string_to_be_complete_wherever_tokens_end(
    text: str, stops: list[str], by_bytes: bool
) -> None:
    tokens = one_byte_each(text) if by_bytes else encode(BYTES, text, special=False)
    expected, cut = cut_at(text, stops)
    segment, after = stopping(*stops), Segment(TextStream(BYTES), StopSearch(tuple(stops), include_stop=True))
    shown = whole = ""
    fed = 0
    for token in tokens:
        fed += 1
        shown += segment.push(token)
        whole += after.push(token)
        assert expected.startswith(shown)
        assert segment.search.stopped == after.search.stopped
        if segment.search.stopped:
            break
        held = full(BYTES, tokens[:fed]).rstrip(BROKEN)[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    assert segment.search.stopped == cut
    assert shown + segment.finish() == expected
    whole += after.finish()
    assert text.startswith(whole)
    assert whole.removeprefix(expected) in (stops if cut else [""])
    if cut:
        assert fed <= next(n for n in range(len(tokens) + 1) if cut_at(full(BYTES, tokens[:n]), stops)[1])


def test_what_was_held_back_comes_out_at_the_end_unless_a_stop_string_was_found() -> None:
    a, b = one_byte_each("ab")
    lead = one_byte_each("é")[0]
    segment = stopping("aba")
    assert [segment.push(a), segment.push(b), segment.push(lead)] == ["", "", ""]
    assert [segment.finish(), segment.finish()] == ["ab" + BROKEN, ""]
    found = stopping(BROKEN)  # in what the end lets out
    assert shown_by(found, [a, lead]) == ["a", "", ""]
    assert found.search.stopped
    assert shown_by(stopping("b"), [a, b, a]) == ["a", "", ""]


def test_special_tokens_are_added_and_have_text_only_when_asked_for() -> None:
    tokens = [0, *one_byte_each("a"), 1, *one_byte_each("b"), 0]
    assert "".join(shown_by(TextStream(BYTES), tokens)) == "ab"
    stream = TextStream(BYTES, skip_special=False)
    assert shown_by(stream, tokens) == ["<s>", "a", "</s>", "b", "<s>", ""]
    plain = encode(BYTES, "the ship", special=False)
    assert encode(BYTES, "the ship", special=True) == [BYTES.token_to_id("<s>"), *plain]


def test_text_that_no_encoding_can_hold_is_an_error_that_says_where() -> None:
    with pytest.raises(OptionFault, match=r"character 2 .*half of a surrogate pair.*expected"):
        encode(BYTES, "ab\ud83d", special=False)


def steps_of(stops: tuple[str, ...], text: str) -> int:
    """The number of lines that a search runs for a text, in pieces of one character."""
    search, lines = StopSearch(stops), 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for sign in text:
            search.push(sign)
    finally:
        sys.settrace(None)
    return lines


def test_1000_stop_strings_of_1000_characters_cost_as_much_per_character_as_one() -> None:
    text = ("a" * 200 + "b") * 4
    one = steps_of(("a" * 999 + "c",), text)
    many = steps_of(tuple("a" * (999 - number % 7) + chr(0x4E00 + number) for number in range(1000)), text)
    assert many <= 1.1 * one


# Panics of the library


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
