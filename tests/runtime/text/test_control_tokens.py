"""Control tokens: special tokens that a text spells out stay text, and those of the chat template stay control tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.text.control_tokens import ControlTokens
from spaceport.runtime.text.tokenizer import encode
from support.small_tokenizers import BYTES, FALLBACK

PIECES = ["<unk>", "<s>", "</s>", "▁", *"abcdefghimnorstux<>/|_", "▁a", "the", "<s>▁"]


def unigram() -> Tokenizer:
    """A tokenizer as in T5: its model itself has the special tokens as pieces, and it normalizes text."""
    pieces = [(piece, 0.0 if number < 3 else -3.0) for number, piece in enumerate(PIECES)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


def lower() -> Tokenizer:
    """A tokenizer as in BERT: it lowers text before it looks for special tokens."""
    tokenizer = Tokenizer.from_str(BYTES.to_str())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=True)])
    return tokenizer


TOKENIZERS = {"byte-level": BYTES, "byte-fallback": FALLBACK, "unigram": unigram(), "lower": lower()}
SPELT = ["</s>", "a</s>b", "<s></s><s>", " </s> ", "<<s>s>", "\uff1c/s\uff1e", "</S>", "<END>"]


def controls(tokenizer: Tokenizer, **tokens: Any) -> ControlTokens:
    return ControlTokens(tokenizer, TokenIds(**tokens))


def around(tokenizer: Tokenizer) -> int:
    """The number of special tokens that the tokenizer adds around a text."""
    return len(encode(tokenizer, "a", special=True)) - len(encode(tokenizer, "a", special=False))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", SPELT)
def test_no_spelling_becomes_a_control_token(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    found = controls(tokenizer)
    special = {"<s>", "</s>", "<end>"}
    ids = found.encode(text, special=True).ids
    assert sum(tokenizer.id_to_token(token) in special for token in ids) == around(tokenizer)


@pytest.mark.parametrize("text", ["</s>", "a </s>b<s>", "你</s>"])
def test_the_text_is_kept(text: str) -> None:
    ids = controls(BYTES).encode(text, special=False).ids
    assert BYTES.decode(ids, skip_special_tokens=False) == text


@given(st.text(st.sampled_from("abt he\n你<>/s"), max_size=30))
def test_text_without_special_tokens_is_encoded_as_before(text: str) -> None:
    for tokenizer in (BYTES, FALLBACK):
        if "<s>" not in text and "</s>" not in text:
            for protected in (None, (), ((0, len(text) // 2),)):
                found = controls(tokenizer).encode(text, special=True, protected=protected)
                assert found.ids == encode(tokenizer, text, special=True)


@settings(max_examples=50)
@given(st.text(st.sampled_from("<>/sab "), max_size=12), st.text(st.sampled_from("<>/sab "), max_size=12))
def test_control_tokens_come_from_the_template_only(one: str, other: str) -> None:
    found = controls(BYTES)
    text = f"<s>{one}</s><s>{other}</s>"
    spans = ((3, 3 + len(one)), (len(one) + 10, len(one) + 10 + len(other)))
    encoded = found.encode(text, special=False, protected=spans)
    assert [token for token in encoded.ids if token in (0, 1)] == [0, 1, 0, 1]
    assert BYTES.decode(encoded.ids, skip_special_tokens=False) == text
    assert encoded.ends == sorted(encoded.ends)
    assert encoded.ends[-1] == len(text)


def test_all_spellings_become_control_tokens_if_nothing_is_protected() -> None:
    found = controls(BYTES).encode("a</s>b", special=True, protected=())
    assert found.ids == encode(BYTES, "a</s>b", special=True)
    assert 1 in found.ids


def test_mask_fork_and_child_tokens_are_control_tokens_without_being_special() -> None:
    tokenizer = Tokenizer.from_str(BYTES.to_str())
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in ("[M]", "[Fork]", "<think>")])
    fork = tokenizer.token_to_id("[Fork]")
    found = controls(tokenizer, mask=(tokenizer.token_to_id("[M]"),), fork=fork, child=tokenizer.token_to_id("[M]"))
    ids = found.encode("a[M][Fork]<think>", special=False).ids
    assert not {fork, *found.tokens.mask} & set(ids)
    assert tokenizer.token_to_id("<think>") in ids  # not special: it is text to the tokenizer


def test_an_end_token_that_is_ordinary_text_stays_a_token() -> None:
    newline = encode(BYTES, "\n", special=False)
    found = controls(BYTES, end=(*newline, 1))
    assert found.encode("a\nb", special=False).ids == encode(BYTES, "a\nb", special=False)


def test_an_unknown_character_is_no_control_token() -> None:
    tokenizer = TOKENIZERS["unigram"]
    assert tokenizer.token_to_id("<unk>") in controls(tokenizer).encode("a😀</s>", special=False).ids


def test_a_control_token_of_one_character_is_refused() -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", -9.0), ("¤", -1.0), ("a", -1.0)], 0))
    tokenizer.add_special_tokens(["<unk>", "¤"])
    with pytest.raises(OptionFault, match="character 1 of the prompt is '¤', a control token: leave it out, or allow"):
        controls(tokenizer).encode("a¤", special=False)
