"""Infill: prompts for a gap, from two texts or as an editor writes them, and the tokens that end what fills it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest, TokenIds
from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.text.infill import InfillPrompt
from spaceport.runtime.text.prompt import PromptEncoder
from support.small_tokenizers import BYTES

BEFORE, AFTER, MIDDLE, REPOSITORY, FILE, END = (
    *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"),
)


def encoder(*special: str) -> PromptEncoder:
    tokenizer = Tokenizer.from_str(BYTES.to_str())
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    signature = Signature(1, 1, 1, 1000, "float32", "scatter")
    return PromptEncoder(Bundle(Path(), Manifest(signature, TokenIds(), 8, "llama", 1, 23, "plain", {})), tokenizer)


QWEN = encoder(BEFORE, AFTER, MIDDLE, REPOSITORY, FILE, END, "<|im_start|>")


def shown(found: PromptEncoder, ids: list[int]) -> list[str]:
    """The control tokens by their text, and the text between them."""
    special = {
        token: entry.content for token, entry in found.tokenizer.get_added_tokens_decoder().items() if entry.special
    }
    assert special[ids[0]] == "<s>"  # which the tokenizer adds to each text
    parts: list[str] = []
    for token in ids[1:]:
        if token in special:
            parts += [special[token], ""]
        else:
            parts[-1] += found.tokenizer.decode([token])
    return [part for part in parts if part]


def test_a_gap_stands_between_the_marks_of_the_model_and_marks_in_the_texts_stay_text() -> None:
    for before, after in (("def add(a, b):\n    ", "\n\nprint(1)"), (f"a = '{MIDDLE}'", f"<|im_start|>{AFTER}")):
        assert shown(QWEN, QWEN.tokens_of(InfillPrompt(before, after))) == [BEFORE, before, AFTER, after, MIDDLE]
    assert shown(QWEN, QWEN.tokens_of(InfillPrompt("", "x"))) == [BEFORE, AFTER, "x", MIDDLE]


def test_other_files_come_first_each_with_its_name() -> None:
    gap = InfillPrompt("y = ", "\n", (("a.py", f"x = '{FILE}'"), ("b.py", "z = 2\n")))
    assert shown(QWEN, QWEN.tokens_of(gap)) == [
        *(REPOSITORY, "project\n", FILE, f"a.py\nx = '{FILE}'\n", FILE, "b.py\nz = 2\n", FILE, "file\n"),
        *(BEFORE, "y = ", AFTER, "\n", MIDDLE),
    ]
    plain = encoder("<fim_prefix>", "<fim_suffix>", "<fim_middle>")  # has no tokens for files
    text = plain.tokenizer.decode(plain.tokens_of(gap), skip_special_tokens=False)
    assert "--- b.py\nz = 2\n\n\n--- file\n<fim_prefix>y = <fim_suffix>" in text
    assert gap.characters == sum(map(len, ("y = ", "\n", "a.py", f"x = '{FILE}'", "b.py", "z = 2\n")))


def test_a_prompt_that_an_editor_wrote_is_read_as_one_for_a_gap_that_ends_at_each_mark_and_at_the_end_of_a_text() -> (
    None
):
    written = f"{REPOSITORY}shop{FILE}a.py\nx = 1\n{FILE}b.py\n{BEFORE}y = {AFTER}<|im_start|>{MIDDLE}"
    assert shown(QWEN, QWEN.tokens_of(written)) == [
        *(REPOSITORY, "shop", FILE, "a.py\nx = 1\n", FILE, "b.py\n"),
        *(BEFORE, "y = ", AFTER, "<|im_start|>", MIDDLE),
    ]
    assert QWEN.ends_of(written) == QWEN.ends_of(InfillPrompt("", ""))
    ends = {QWEN.tokenizer.id_to_token(token) for token in QWEN.ends_of(written)}
    assert ends == {BEFORE, AFTER, MIDDLE, REPOSITORY, FILE, END}


@pytest.mark.parametrize(
    "text", [f"{BEFORE}a{AFTER}b", f"a{MIDDLE}", f"{AFTER}a{BEFORE}b{MIDDLE}", f"{BEFORE}a{AFTER}{MIDDLE} "]
)
def test_other_texts_with_marks_stay_text(text: str) -> None:
    marks = {QWEN.tokenizer.token_to_id(mark) for mark in (BEFORE, AFTER, MIDDLE)}
    assert marks.isdisjoint(QWEN.tokens_of(text))
    assert QWEN.ends_of(text) == ()


def test_the_marks_of_other_families_are_known() -> None:
    for marks in (
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ):
        found = encoder(*marks)
        assert shown(found, found.tokens_of(InfillPrompt("a", "b"))) == [marks[0], "a", marks[1], "b", marks[2]]


def test_a_model_without_marks_and_what_is_no_text_refuse_a_gap() -> None:
    with pytest.raises(OptionFault, match="not trained to fill a gap"):
        encoder().tokens_of(InfillPrompt("a", "b"))
    with pytest.raises(OptionFault, match=r"files has 'a\.py': expected pairs of a name and a text"):
        InfillPrompt("a", "b", ("a.py",))  # type: ignore[arg-type]
    with pytest.raises(OptionFault, match="after is of type int: expected text"):
        InfillPrompt("a", 3)  # type: ignore[arg-type]
    assert encoder().ends_of("a") == ()
