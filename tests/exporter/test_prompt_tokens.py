"""Prompt tokens: tokenized calibration prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.prompt_tokens import DEFAULT_QUESTIONS, MAX_PROMPT_TOKENS, prompt_tokens
from spaceport.graphs.contract.faults import InputFault
from support.paths import DEMO, TINY


def test_a_text_prompt_is_tokenized() -> None:
    checkpoint = open_checkpoint(TINY, TokenFlags())
    (ids,) = prompt_tokens(checkpoint, ["import json"])
    assert ids[0].tolist() == Tokenizer.from_str(checkpoint.tokenizer).encode("import json").ids


def test_a_long_prompt_is_truncated_to_its_end() -> None:
    (ids,) = prompt_tokens(open_checkpoint(TINY, TokenFlags()), ["begin " + "x = 1\n" * 2000 + "end"])
    (end,) = prompt_tokens(open_checkpoint(TINY, TokenFlags()), ["\nend"])
    assert ids.shape == (1, MAX_PROMPT_TOKENS)
    assert ids[0, -1] == end[0, -1]


def test_chat_messages_are_rendered_with_the_template_and_need_one() -> None:
    checkpoint = open_checkpoint(DEMO, TokenFlags())
    chat = [{"role": "user", "content": "List three colours."}]
    (ids,) = prompt_tokens(checkpoint, [chat])
    assert "List three colours." in Tokenizer.from_str(checkpoint.tokenizer).decode(ids[0].tolist())
    with pytest.raises(
        InputFault, match=r"calibration prompt 2 has chat messages, but .* has no chat template: expected text"
    ):
        prompt_tokens(replace(checkpoint, template=None), ["a", chat])


def test_without_prompts_a_chat_model_gets_default_questions() -> None:
    checkpoint = open_checkpoint(DEMO, TokenFlags())
    assert len(prompt_tokens(checkpoint, ())) == len(DEFAULT_QUESTIONS)
    assert prompt_tokens(replace(checkpoint, template=None), ()) == ()
