"""Tuning review: what tokenizers, templates and checkpoints of odd kinds must not change in what is learned."""

from __future__ import annotations

from tokenizers import Tokenizer, models

from spaceport.graphs.manifest import TokenIds
from spaceport.tools.tune.conversations import TEXT, Conversation, Turn
from spaceport.tools.tune.packing import successors
from spaceport.tools.tune.samples import NO_PARENT, TOO_SHORT, prepare
from spaceport.tools.tune.spelling import Spelling, spelling_with


def letters() -> Spelling:
    """A tokenizer that knows two letters and drops all others, without a template."""
    backend = Tokenizer(models.BPE(vocab={"h": 0, "i": 1, "</s>": 2, "[M]": 3}, merges=[]))
    return spelling_with(backend, None, TokenIds(mask=(3,), fork=None, child=None, end=(2,)))


def asked(prompt: str, response: str) -> Conversation:
    return Conversation(1, (Turn("user", prompt), Turn("assistant", response)))


def test_an_answer_whose_prompt_has_no_token_begins_with_one_that_nothing_predicts() -> None:
    (sample,) = prepare([asked("zzz", "hi")], letters(), 64).whole
    assert sample.ids.tolist() == [0, 1, 2]
    assert sample.learned.tolist() == [False, True, True]
    assert successors(sample).tolist() == [1, 2, NO_PARENT]


def test_a_text_without_a_token_is_counted() -> None:
    assert prepare([Conversation(1, (Turn(TEXT, "zzz"),))], letters(), 64).counts[TOO_SHORT] == 1
