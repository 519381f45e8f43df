"""The text and bytes of tokens are those that they add to a text, for tokenizers of both kinds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models

from spaceport.runtime.sampling.spelling import Speller
from support.paths import TINY
from support.small_tokenizers import BYTES, FALLBACK

TOKENIZERS = {"byte level": BYTES, "byte fallback": FALLBACK, "tiny": Tokenizer.from_file(str(TINY / "tokenizer.json"))}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@each_tokenizer
def test_tokens_have_the_bytes_that_llguidance_knows(tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    reference, speller = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=[1]), Speller(tokenizer)
    for token in range(size):
        if not reference.is_special_token(token):
            assert speller.spell(token).raw == reference.decode_bytes([token])


@given(text=st.text(max_size=40))
def test_the_bytes_of_byte_level_tokens_join_to_the_text(text: str) -> None:
    speller = Speller(BYTES)
    tokens = BYTES.encode(text, add_special_tokens=False).ids
    assert b"".join(speller.spell(token).raw for token in tokens).decode() == text


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), min_size=1, max_size=40))
def test_the_bytes_of_byte_fallback_tokens_join_to_the_text_with_its_first_space(text: str) -> None:
    speller = Speller(FALLBACK)
    tokens = FALLBACK.encode(text, add_special_tokens=False).ids
    assert b"".join(speller.spell(token).raw for token in tokens).decode() == f" {text}"


@each_tokenizer
def test_a_special_token_has_its_name_as_text_and_no_bytes(tokenizer: Tokenizer) -> None:
    special = [token for token, content in tokenizer.get_added_tokens_decoder().items() if content.special]
    assert special
    for token in special:
        assert Speller(tokenizer).spell(token) == (tokenizer.id_to_token(token), b"")


def test_tokens_that_are_no_text_by_themselves_are_spelled_too() -> None:
    speller = Speller(BYTES)
    assert speller.spell(BYTES.get_vocab()["\u00f0"]) == ("\ufffd", b"\xf0")  # part of a character
    assert speller.spell(10**6) == ("", b"")
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    assert [Speller(words).spell(token).text for token in (1, 2)] == [" play", "ing"]
    plain = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))  # without a decoder
    assert Speller(plain).spell(1).text == " b"
