"""Samples: conversations in the tokens of a model, as trees, with loss on what the assistant says and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.tools.tune.conversations import Conversation, Turn
from spaceport.tools.tune.samples import (
    CHILD_LOST,
    CONTROL,
    CUT,
    NO_PARENT,
    TOO_LONG,
    TOO_SHORT,
    Prepared,
    Sample,
    _cut,
    prepare,
)
from spaceport.tools.tune.spelling import SpellingError, spelling_of
from support.paths import TINY

BOS, EOS, START, END, MASK, FORK, CHILD = 0, 1, 2, 3, 4, 628, 629
TOKENS = TokenIds(mask=(MASK,), fork=FORK, child=CHILD, end=(EOS, END))
LONG = 10_000
LIST = "Three:\n1. Red: the colour of fire\n2. Green: the colour of grass\n3. Blue: the colour of the sea\n\nDone."


def tokenizer(template: str | None = "own") -> Any:
    """The tiny tokenizer with the tokens for forking, its own chat template or another."""
    found = AutoTokenizer.from_pretrained(TINY)
    found.add_tokens(["[Fork]", "[Child]"], special_tokens=True)
    if template != "own":
        found.chat_template = template
    return found


TOKENIZER = tokenizer()
SPELLING = spelling_of(TOKENIZER, TOKENS)
BARE = spelling_of(tokenizer(None), TOKENS)
WHOLE = replace(SPELLING, tokens=TokenIds(mask=(MASK,), fork=None, child=None, end=(EOS, END)))


def spelt(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def chat(*contents: str, **told: Any) -> Conversation:
    """Turns of the user and the assistant, one after the other."""
    return Conversation(7, tuple(Turn(("user", "assistant")[n % 2], text) for n, text in enumerate(contents)), **told)


def text(content: str, **told: Any) -> Conversation:
    return Conversation(7, (Turn("text", content),), **told)


def told(sample: Sample) -> tuple[list[int], list[int]]:
    """All tokens of a sample that is one line, and those that are learned."""
    assert sample.line == 7
    assert sample.parents.tolist() == list(range(-1, sample.size - 1))
    return sample.ids.tolist(), sample.ids[sample.learned].tolist()


def only(prepared: Prepared) -> Sample:
    (sample,) = prepared.forked + prepared.whole
    return sample


def test_only_what_the_assistant_says_and_its_end_are_learned() -> None:
    sample = only(prepare([chat("Hello", "Good morning.")], SPELLING, LONG))
    before = [BOS, START, *spelt("user\nHello"), END, *spelt("\n"), START, *spelt("assistant\n")]
    answer = [*spelt("Good morning."), END]
    assert told(sample) == (before + answer, answer)


def test_every_answer_of_a_conversation_is_learned_and_what_stands_between_is_not() -> None:
    sample = only(prepare([chat("Hello", "Good.", "Bye", "See you.")], SPELLING, LONG))
    first, second = [*spelt("Good."), END], [*spelt("See you."), END]
    before = [BOS, START, *spelt("user\nHello"), END, *spelt("\n"), START, *spelt("assistant\n")]
    between = [*spelt("\n"), START, *spelt("user\nBye"), END, *spelt("\n"), START, *spelt("assistant\n")]
    assert told(sample) == (before + first + between + second, first + second)


def test_a_prompt_and_its_response_without_a_template_stand_one_behind_the_other() -> None:
    sample = only(prepare([chat("Once upon", " a time.")], BARE, LONG))
    answer = [*spelt(" a time."), EOS]
    assert told(sample) == ([BOS, *spelt("Once upon"), *answer], answer)
    with pytest.raises(SpellingError, match="line 7: messages, but the tokenizer has no chat template"):
        prepare([chat("Hello", "Good.", "Bye", "See you.")], BARE, LONG)


def test_a_text_is_learned_whole_and_ends() -> None:
    source = "import json\n\nx = 1\n"
    ids = spelt(source)
    assert told(only(prepare([text(source)], SPELLING, LONG))) == ([BOS, *ids, EOS], [*ids, EOS])
    assert told(only(prepare([text(source, ends=False)], SPELLING, LONG))) == ([BOS, *ids], ids)


def test_a_text_without_an_opening_token_is_learned_from_its_second_token_on() -> None:
    opened = replace(SPELLING, start=())
    ids = spelt("import json")
    assert told(only(prepare([text("import json")], opened, LONG))) == ([*ids, EOS], [*ids[1:], EOS])
    empty = prepare([text("a", ends=False)], opened, LONG)
    assert (empty.whole, empty.counts[TOO_SHORT]) == ([], 1)


def test_a_long_text_is_cut_between_lines_and_ends_once() -> None:
    lines = [f"value_{number} = {number}\n" for number in range(12)]
    prepared = prepare([text("".join(lines))], SPELLING, 40)
    assert len(prepared.whole) > 2
    pieces = [sample.ids.tolist() for sample in prepared.whole]
    assert max(map(len, pieces)) <= 40
    assert [piece[0] for piece in pieces] == [BOS] * len(pieces)
    assert [EOS in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    bodies = [TOKENIZER.decode([token for token in piece if token not in (BOS, EOS)]) for piece in pieces]
    assert "".join(bodies) == "".join(lines)
    assert all(body.endswith("\n") for body in bodies)
    assert len(pieces[0]) + len(spelt(lines[bodies[0].count("\n")])) > 39  # no more lines would have fitted


def test_a_line_that_is_too_long_is_cut_within() -> None:
    prepared = prepare([text("x = 1\n" + "word " * 60)], SPELLING, 30)
    bodies = [sample.ids.tolist()[1:] for sample in prepared.whole]
    assert max(map(len, bodies)) == 28  # one place is kept for the beginning and one for the end
    joined = [token for body in bodies for token in body]
    assert TOKENIZER.decode(joined[:-1]) == "x = 1\n" + "word " * 60
    assert not prepared.counts[CUT]


def test_a_list_becomes_a_spine_with_a_child_behind_each_fork() -> None:
    prepared = prepare([chat("Which?", LIST)], SPELLING, LONG)
    (sample,) = prepared.forked
    before = spelt("<s><|start|>user\nWhich?<|end|>\n<|start|>assistant\n")
    heads = [spelt(head) for head in ("Three:\n1. Red:", "\n2. Green:", "\n3. Blue:")]
    details = [spelt(f" the colour of {of}") for of in ("fire", "grass", "the sea")]
    ids, parents, learned = list(before), list(range(-1, len(before) - 1)), [False] * len(before)
    tip = len(before) - 1
    for head, detail in zip(heads, details, strict=True):
        for token in [*head, FORK]:
            ids, parents, learned = [*ids, token], [*parents, tip], [*learned, True]
            tip = len(ids) - 1
        above = tip
        for token in [CHILD, *detail, END]:
            ids, parents, learned = [*ids, token], [*parents, above], [*learned, token != CHILD]
            above = len(ids) - 1
    for token in [*spelt("\n\nDone."), END]:
        ids, parents, learned = [*ids, token], [*parents, tip], [*learned, True]
        tip = len(ids) - 1
    assert sample.ids.tolist() == ids
    assert sample.parents.tolist() == parents
    assert sample.learned.tolist() == learned
    assert (prepared.whole, prepared.unforked) == ([], [])


def test_an_answer_that_shall_not_fork_is_learned_in_one_line() -> None:
    flat = prepare([chat("Which?", LIST, fork=False)], SPELLING, LONG)
    other = prepare([chat("Which?", LIST)], WHOLE, LONG)
    assert flat.forked == other.forked == []
    assert told(flat.whole[0]) == told(other.whole[0])
    assert told(flat.whole[0])[1] == [*spelt(LIST), END]


def test_forked_answers_are_there_in_one_line_too_if_asked_for() -> None:
    prepared = prepare([chat("Which?", LIST), chat("And?", "Yes.")], SPELLING, LONG, unforked=True)
    assert (len(prepared.forked), len(prepared.unforked), len(prepared.whole)) == (1, 1, 1)
    assert told(prepared.unforked[0])[1] == [*spelt(LIST), END]


def test_only_the_last_answer_forks() -> None:
    early = only(prepare([chat("Which?", LIST, "Thanks", "Welcome.")], SPELLING, LONG))
    assert FORK not in told(early)[0]
    late = prepare([chat("Hello", "Good.", "Which?", LIST)], SPELLING, LONG).forked[0]
    assert (late.ids == FORK).sum() == (late.ids == CHILD).sum() == 3
    both = prepare([chat("Which?", LIST, "Again?", LIST)], SPELLING, LONG).forked[0]
    assert (both.ids == FORK).sum() == 3


def depths(sample: Sample) -> list[int]:
    found: list[int] = []
    for parent in sample.parents.tolist():
        found.append(0 if parent == NO_PARENT else found[parent] + 1)
    return found


def test_a_child_beyond_the_cutoff_is_dropped_and_counted() -> None:
    full = only(prepare([chat("Which?", LIST)], SPELLING, LONG))
    child = [depth for depth, token in zip(depths(full), full.ids, strict=True) if token == CHILD]
    for cutoff, lost in ((child[1] + 2, 1), (child[1] + 1, 2), (child[1], 2), (child[0], 3), (child[2] + 1, 1)):
        prepared = prepare([chat("Which?", LIST)], SPELLING, cutoff)
        (sample,) = prepared.forked
        assert (prepared.counts[CHILD_LOST], prepared.counts[CUT]) == (lost, 1)
        assert (sample.ids == CHILD).sum() == 3 - lost
        assert max(depths(sample)) < cutoff


def test_an_answer_that_begins_beyond_the_cutoff_is_dropped_and_counted() -> None:
    before = len(spelt("<s><|start|>user\nWhich?<|end|>\n<|start|>assistant\n"))
    for cutoff, kept in ((before, 0), (before + 1, 1)):
        for conversation in (chat("Which?", LIST), chat("Which?", "Yes, yes.")):
            prepared = prepare([conversation], SPELLING, cutoff, unforked=True)
            assert len(prepared.forked + prepared.whole) == kept
            assert (prepared.counts[TOO_LONG], prepared.counts[CUT]) == (1 - kept, 1)
            assert len(prepared.unforked) == len(prepared.forked)


def test_texts_that_hold_our_tokens_are_dropped_and_counted() -> None:
    held = [chat("What is [M]?", "A mask."), chat("Say", "[Fork]"), text("a [Child] b"), chat("And?", "Yes.")]
    prepared = prepare(held, SPELLING, LONG)
    assert (len(prepared.whole), prepared.counts[CONTROL]) == (1, 3)


def template(turn: str, ask: str) -> str:
    return "{% for message in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}" + ask + "{% endif %}"


def test_a_template_may_strip_what_it_writes() -> None:
    stripping = template(
        "<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>", "<|start|>assistant\n"
    )
    spelling = spelling_of(tokenizer(stripping), TOKENS)
    sample = only(prepare([chat(" Hello\n", "\nGood morning. \n")], spelling, LONG))
    assert told(sample)[1] == [*spelt("Good morning."), END]
    assert prepare([chat("Which?", f"\n\n{LIST}\n")], spelling, LONG).forked[0].ids[-1] == END


def test_what_a_template_puts_before_an_answer_is_learned_with_it() -> None:
    leading = template("<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>", "<|start|>assistant").replace(
        "{{ message['role'] }}\n", "{{ message['role'] }}\n"
    )
    sample = only(prepare([chat("Hello", "Good.")], spelling_of(tokenizer(leading), TOKENS), LONG))
    assert told(sample)[1] == [*spelt("\nGood."), END]


def test_an_answer_that_the_template_does_not_end_gets_an_end() -> None:
    endless = template("{{ message['role'] }}: {{ message['content'] }}\n", "assistant:")
    spelling = spelling_of(tokenizer(endless), TOKENS)
    sample = only(prepare([chat("Hello", "Good.")], spelling, LONG))
    assert told(sample) == ([*spelt("user: Hello\nassistant:"), *spelt(" Good."), EOS], [*spelt(" Good."), EOS])
    two = only(prepare([chat("Hello", "Good.", "Bye", "See you.")], spelling, LONG))
    assert two.ids[two.learned].tolist() == [*spelt(" Good."), EOS, *spelt(" See you."), EOS]
    # the template writes no end, so what follows the first answer does not see one
    (first, _) = np.flatnonzero(two.ids == EOS)
    assert first not in two.parents
    forked = prepare([chat("Which?", LIST)], spelling, LONG).forked[0]
    assert (forked.ids == EOS).sum() == 4


def test_earlier_answers_that_the_template_tells_otherwise_are_context_only() -> None:
    thinking = template(
        "<|start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' and not loop.last %}"
        "{{ message['content'].split('|')[-1] }}{% else %}{{ message['content'] }}{% endif %}<|end|>",
        "<|start|>assistant\n",
    )
    sample = only(
        prepare([chat("Hello", "hm|Good.", "Bye", "ha|Bye.")], spelling_of(tokenizer(thinking), TOKENS), LONG)
    )
    assert told(sample)[1] == [*spelt("ha|Bye."), END]
    assert "hm" not in TOKENIZER.decode(sample.ids)


def test_pieces_of_a_text_are_spelt_as_the_whole_by_tokenizers_that_open_with_a_space() -> None:
    letters = [chr(code) for code in range(33, 127)]
    pieces = [("<unk>", 0.0), ("\n", -2.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    backend = Tokenizer(models.Unigram([*pieces, ("▁the", -1.0), ("the", -1.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["</s>", "[Fork]", "[Child]"])
    spaced = PreTrainedTokenizerFast(tokenizer_object=backend)
    fork, child, end = (backend.token_to_id(token) for token in ("[Fork]", "[Child]", "</s>"))
    spelling = spelling_of(spaced, TokenIds(mask=(), fork=fork, child=child, end=(end,)))
    whole = backend.encode("a: " + LIST, add_special_tokens=False).ids
    flat = only(prepare([chat("a: ", LIST, fork=False)], spelling, LONG))
    assert told(flat)[0] == [*whole, end]
    turns = (Turn("user", "a:"), Turn("assistant", "the b"), Turn("user", "the c"), Turn("assistant", "d"))
    spaced.chat_template = template("{{ message['content'] }}", "")
    several = only(prepare([Conversation(1, turns)], spelling_of(spaced, spelling.tokens), LONG))
    text = backend.encode("a:the bthe cd", add_special_tokens=False).ids
    assert several.ids[several.ids != end].tolist() == text
    forked = prepare([chat("a: ", LIST)], spelling, LONG).forked[0]
    assert [token for token in forked.ids.tolist() if token not in (fork, child, end)] == whole


def test_a_template_that_does_not_go_on_from_its_own_prompt_is_told() -> None:
    wrong = template("{{ message['role'] }}: {{ message['content'] }}<|end|>", "Answer: ")
    with pytest.raises(
        SpellingError, match="line 7: the chat template does not write the answer 'Good\\.' behind the prompt"
    ):
        prepare([chat("Hello", "Good.")], spelling_of(tokenizer(wrong), TOKENS), LONG)


def test_a_tokenizer_needs_no_padding_token_but_an_end(tmp_path: Path) -> None:
    assert TOKENIZER.pad_token is None
    with pytest.raises(SpellingError, match="the checkpoint names no end-of-text token: expected eos_token_id"):
        spelling_of(TOKENIZER, replace(TOKENS, end=()))


@st.composite
def trees(draw: st.DrawFn) -> Sample:
    """A forked sample as they are made: a prompt, heads, children behind some of them."""
    ids, parents, learned = [BOS], [NO_PARENT], [False]
    tip = 0

    def add(token: int, counted: bool) -> None:
        nonlocal tip
        ids.append(token)
        parents.append(tip)
        learned.append(counted)
        tip = len(ids) - 1

    words = st.integers(10, 600)
    for token in draw(st.lists(words, max_size=4)):
        add(token, False)
    for _ in range(draw(st.integers(0, 4))):
        for token in draw(st.lists(words, min_size=1, max_size=4)):
            add(token, True)
        if draw(st.booleans()):
            add(FORK, True)
            above = tip
            add(CHILD, False)
            for token in [*draw(st.lists(words, min_size=1, max_size=5)), END]:
                add(token, True)
            tip = above
    add(END, True)
    return Sample(7, np.array(ids), np.array(parents), np.array(learned))


def path(sample: Sample, place: int) -> list[tuple[int, bool]]:
    found = []
    while place != NO_PARENT:
        found.append((int(sample.ids[place]), bool(sample.learned[place])))
        place = int(sample.parents[place])
    return found[::-1]


@given(trees(), st.integers(1, 30))
def test_a_sample_cut_anywhere_keeps_the_paths_that_it_keeps(sample: Sample, cutoff: int) -> None:
    kept = _cut(sample, SPELLING, cutoff)
    assert all(parent < place for place, parent in enumerate(kept.parents.tolist()))
    assert kept.parents[0] == NO_PARENT
    assert NO_PARENT not in kept.parents[1:]
    whole = [path(sample, place) for place in range(sample.size)]
    short = [line for line in whole if len(line) <= cutoff]
    # what is gone beside the long paths is a [Child] whose whole detail is beyond the cutoff
    expected = [line for line in short if not (line[-1][0] == CHILD and len(line) == cutoff)]
    assert [path(kept, place) for place in range(kept.size)] == expected
