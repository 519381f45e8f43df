"""Samples: conversations as token trees, with a loss on assistant messages only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.tools.tune.conversation_encoder import (
    ConversationError,
    conversation_encoder,
    conversation_encoder_with,
)
from spaceport.tools.tune.conversations import Conversation, Turn
from spaceport.tools.tune.packing import successors
from spaceport.tools.tune.samples import (
    CHILD_DROPPED,
    CONTROL,
    NO_PARENT,
    TOO_LONG,
    TOO_SHORT,
    TRUNCATED,
    Prepared,
    Sample,
    _truncate,
    prepare,
)
from support.paths import TINY

BOS, EOS, START, END, MASK, FORK, CHILD = 0, 1, 2, 3, 4, 628, 629
TOKENS = TokenIds(mask=(MASK,), fork=FORK, child=CHILD, end=(EOS, END))
LONG = 10_000
LIST = "Three:\n1. Red: the colour of fire\n2. Green: the colour of grass\n3. Blue: the colour of the sea\n\nDone."


def tokenizer(template: str | None = "own") -> Any:
    """The tiny tokenizer with fork tokens and its own or another chat template."""
    found = AutoTokenizer.from_pretrained(TINY)
    found.add_tokens(["[Fork]", "[Child]"], special_tokens=True)
    if template != "own":
        found.chat_template = template
    return found


TOKENIZER = tokenizer()
ENCODER = conversation_encoder(TOKENIZER, TOKENS)
BARE = conversation_encoder(tokenizer(None), TOKENS)
WHOLE = replace(ENCODER, tokens=TokenIds(mask=(MASK,), fork=None, child=None, end=(EOS, END)))


def spelt(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def chat(*contents: str, **options: Any) -> Conversation:
    """Alternating user and assistant turns."""
    return Conversation(
        7, tuple(Turn(("user", "assistant")[n % 2], text) for n, text in enumerate(contents)), **options
    )


def text(content: str, **options: Any) -> Conversation:
    return Conversation(7, (Turn("text", content),), **options)


def ids_of(sample: Sample) -> tuple[list[int], list[int]]:
    """All tokens of an unforked sample, and those with a loss."""
    assert sample.line == 7
    assert sample.parents.tolist() == list(range(-1, sample.size - 1))
    return sample.ids.tolist(), sample.ids[sample.learned].tolist()


def only(prepared: Prepared) -> Sample:
    (sample,) = prepared.forked + prepared.whole
    return sample


OPENING = "<s><|start|>user\n{}<|end|>\n<|start|>assistant\n"


def test_answers_and_their_end_tokens_have_a_loss_and_other_turns_none() -> None:
    (sample,) = prepare([chat("Hello", "Good.")], ENCODER, LONG).whole
    first, second = [*spelt("Good."), END], [*spelt("See you."), END]
    before = spelt(OPENING.format("Hello"))
    assert before[:3] == [BOS, START, *spelt("user\nHello")][:3]
    assert ids_of(sample) == (before + first, first)
    sample = only(prepare([chat("Hello", "Good.", "Bye", "See you.")], ENCODER, LONG))
    between = spelt("\n" + OPENING.format("Bye").removeprefix("<s>"))
    assert ids_of(sample) == (before + first + between + second, first + second)


def test_without_a_template_prompt_and_response_are_concatenated() -> None:
    sample = only(prepare([chat("Once upon", " a time.")], BARE, LONG))
    answer = [*spelt(" a time."), EOS]
    assert ids_of(sample) == ([BOS, *spelt("Once upon"), *answer], answer)
    with pytest.raises(ConversationError, match="line 7: has messages, but the tokenizer has no chat template"):
        prepare([chat("Hello", "Good.", "Bye", "See you.")], BARE, LONG)


def test_a_plain_text_has_a_loss_everywhere_and_an_end_token() -> None:
    source = "import json\n\nx = 1\n"
    ids = spelt(source)
    assert ids_of(only(prepare([text(source)], ENCODER, LONG))) == ([BOS, *ids, EOS], [*ids, EOS])
    assert ids_of(only(prepare([text(source, ends=False)], ENCODER, LONG))) == ([BOS, *ids], ids)


def test_without_start_tokens_the_first_token_of_a_text_has_no_loss() -> None:
    opened = replace(ENCODER, start=())
    ids = spelt("import json")
    assert ids_of(only(prepare([text("import json")], opened, LONG))) == ([*ids, EOS], [*ids[1:], EOS])
    empty = prepare([text("a", ends=False)], opened, LONG)
    assert (empty.whole, empty.counts[TOO_SHORT]) == ([], 1)


def test_a_long_text_is_split_at_newlines_and_ends_once() -> None:
    lines = [f"value_{number} = {number}\n" for number in range(12)]
    prepared = prepare([text("".join(lines))], ENCODER, 40)
    assert len(prepared.whole) > 2
    pieces = [sample.ids.tolist() for sample in prepared.whole]
    assert max(map(len, pieces)) <= 40
    assert [piece[0] for piece in pieces] == [BOS] * len(pieces)
    assert [EOS in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    bodies = [TOKENIZER.decode([token for token in piece if token not in (BOS, EOS)]) for piece in pieces]
    assert "".join(bodies) == "".join(lines)
    assert all(body.endswith("\n") for body in bodies)
    assert len(pieces[0]) + len(spelt(lines[bodies[0].count("\n")])) > 39  # no more lines would have fitted


def test_a_line_longer_than_the_cutoff_is_split() -> None:
    prepared = prepare([text("x = 1\n" + "word " * 60)], ENCODER, 30)
    bodies = [sample.ids.tolist()[1:] for sample in prepared.whole]
    assert max(map(len, bodies)) == 28  # one index is reserved for the beginning and one for the end
    joined = [token for body in bodies for token in body]
    assert TOKENIZER.decode(joined[:-1]) == "x = 1\n" + "word " * 60
    assert not prepared.counts[TRUNCATED]


def test_a_list_becomes_a_root_thread_with_a_child_per_fork() -> None:
    prepared = prepare([chat("Which?", LIST)], ENCODER, LONG)
    (sample,) = prepared.forked
    before = spelt(OPENING.format("Which?"))
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


def test_an_answer_that_does_not_end_has_no_end_token() -> None:
    before = spelt(OPENING.format("Hello"))
    sample = only(prepare([chat("Hello", "Good mor", ends=False)], ENCODER, LONG))
    assert ids_of(sample) == ([*before, *spelt("Good mor")], spelt("Good mor"))
    two = only(prepare([chat("Hello", "Good.", "Bye", "See", ends=False)], ENCODER, LONG))
    assert ids_of(two)[1] == [*spelt("Good."), END, *spelt("See")]
    assert two.ids[-1] != END
    bare = only(prepare([chat("Hello", "Good mor", ends=False)], BARE, LONG))
    assert bare.ids[-1] != EOS


def test_a_forked_answer_that_does_not_end_has_no_end_token_in_its_last_thread() -> None:
    whole = prepare([chat("Which?", LIST)], ENCODER, LONG).forked[0]
    cut = LIST.removesuffix("e sea\n\nDone.")
    prepared = prepare([chat("Which?", cut, ends=False)], ENCODER, LONG, unforked=True)
    (sample,), (flat,) = prepared.forked, prepared.unforked
    assert ids_of(flat)[1] == spelt(cut)
    assert (whole.ids[whole.learned] == END).sum() == 4
    assert (sample.ids[sample.learned] == END).sum() == 2
    (*_, last) = np.flatnonzero(sample.ids == CHILD)
    assert sample.ids[last + 1 :].tolist() == spelt(" the colour of th")
    later = prepare([chat("Which?", LIST, ends=False)], ENCODER, LONG).forked[0]
    assert (later.ids[later.learned] == END).sum() == 3  # the text after the list is unfinished, its items are not
    assert later.ids[-1] != END


def test_answers_are_trained_unforked_as_they_are_marked_or_as_it_is_requested() -> None:
    flat = prepare([chat("Which?", LIST, fork=False)], ENCODER, LONG)
    other = prepare([chat("Which?", LIST)], WHOLE, LONG)
    both = prepare([chat("Which?", LIST), chat("And?", "Yes.")], ENCODER, LONG, unforked=True)
    assert flat.forked == other.forked == []
    assert (len(both.forked), len(both.unforked), len(both.whole)) == (1, 1, 1)
    expected = ids_of(flat.whole[0])
    assert ids_of(other.whole[0]) == ids_of(both.unforked[0]) == expected
    assert expected[1] == [*spelt(LIST), END]


def test_only_the_last_answer_forks() -> None:
    early = only(prepare([chat("Which?", LIST, "Thanks", "Welcome.")], ENCODER, LONG))
    assert FORK not in ids_of(early)[0]
    late = prepare([chat("Hello", "Good.", "Which?", LIST)], ENCODER, LONG).forked[0]
    assert (late.ids == FORK).sum() == (late.ids == CHILD).sum() == 3
    both = prepare([chat("Which?", LIST, "Again?", LIST)], ENCODER, LONG).forked[0]
    assert (both.ids == FORK).sum() == 3


def depths(sample: Sample) -> list[int]:
    found: list[int] = []
    for parent in sample.parents.tolist():
        found.append(0 if parent == NO_PARENT else found[parent] + 1)
    return found


def test_a_child_beyond_the_cutoff_is_dropped_and_counted() -> None:
    full = only(prepare([chat("Which?", LIST)], ENCODER, LONG))
    child = [depth for depth, token in zip(depths(full), full.ids, strict=True) if token == CHILD]
    for cutoff, lost in ((child[1] + 2, 1), (child[1] + 1, 2), (child[1], 2), (child[0], 3), (child[2] + 1, 1)):
        prepared = prepare([chat("Which?", LIST)], ENCODER, cutoff)
        (sample,) = prepared.forked
        assert (prepared.counts[CHILD_DROPPED], prepared.counts[TRUNCATED]) == (lost, 1)
        assert (sample.ids == CHILD).sum() == 3 - lost
        assert max(depths(sample)) < cutoff


def test_an_answer_that_begins_beyond_the_cutoff_is_dropped_and_counted() -> None:
    before = len(spelt(OPENING.format("Which?")))
    for cutoff, kept in ((before, 0), (before + 1, 1)):
        for conversation in (chat("Which?", LIST), chat("Which?", "Yes, yes.")):
            prepared = prepare([conversation], ENCODER, cutoff, unforked=True)
            assert len(prepared.forked + prepared.whole) == kept
            assert (prepared.counts[TOO_LONG], prepared.counts[TRUNCATED]) == (1 - kept, 1)
            assert len(prepared.unforked) == len(prepared.forked)


def test_texts_with_control_tokens_are_dropped_and_counted() -> None:
    held = [chat("What is [M]?", "A mask."), chat("Say", "[Fork]"), text("a [Child] b"), chat("And?", "Yes.")]
    prepared = prepare(held, ENCODER, LONG)
    assert (len(prepared.whole), prepared.counts[CONTROL]) == (1, 3)


def template(turn: str, ask: str) -> str:
    return "{% for message in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}" + ask + "{% endif %}"


def test_a_template_may_strip_message_content() -> None:
    stripping = template(
        "<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>", "<|start|>assistant\n"
    )
    encoder = conversation_encoder(tokenizer(stripping), TOKENS)
    sample = only(prepare([chat(" Hello\n", "\nGood morning. \n")], encoder, LONG))
    assert ids_of(sample)[1] == [*spelt("Good morning."), END]
    assert prepare([chat("Which?", f"\n\n{LIST}\n")], encoder, LONG).forked[0].ids[-1] == END


def test_text_that_a_template_adds_before_an_answer_has_a_loss() -> None:
    leading = template("<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>", "<|start|>assistant")
    sample = only(prepare([chat("Hello", "Good.")], conversation_encoder(tokenizer(leading), TOKENS), LONG))
    assert ids_of(sample)[1] == [*spelt("\nGood."), END]


def test_an_answer_without_a_rendered_end_token_gets_one() -> None:
    endless = template("{{ message['role'] }}: {{ message['content'] }}\n", "assistant:")
    encoder = conversation_encoder(tokenizer(endless), TOKENS)
    sample = only(prepare([chat("Hello", "Good.")], encoder, LONG))
    assert ids_of(sample) == ([*spelt("user: Hello\nassistant:"), *spelt(" Good."), EOS], [*spelt(" Good."), EOS])
    two = only(prepare([chat("Hello", "Good.", "Bye", "See you.")], encoder, LONG))
    assert two.ids[two.learned].tolist() == [*spelt(" Good."), EOS, *spelt(" See you."), EOS]
    # the template writes no end, so what follows the first answer does not see one
    (first, _) = np.flatnonzero(two.ids == EOS)
    assert first not in two.parents
    forked = prepare([chat("Which?", LIST)], encoder, LONG).forked[0]
    assert (forked.ids == EOS).sum() == 4


def test_earlier_answers_rewritten_by_the_template_have_no_loss() -> None:
    thinking = template(
        "<|start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' and not loop.last %}"
        "{{ message['content'].split('|')[-1] }}{% else %}{{ message['content'] }}{% endif %}<|end|>",
        "<|start|>assistant\n",
    )
    sample = only(
        prepare([chat("Hello", "hm|Good.", "Bye", "ha|Bye.")], conversation_encoder(tokenizer(thinking), TOKENS), LONG)
    )
    assert ids_of(sample)[1] == [*spelt("ha|Bye."), END]
    assert "hm" not in TOKENIZER.decode(sample.ids)


def test_text_pieces_are_encoded_like_the_whole_by_tokenizers_that_add_a_space() -> None:
    letters = [chr(code) for code in range(33, 127)]
    pieces = [("<unk>", 0.0), ("\n", -2.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    backend = Tokenizer(models.Unigram([*pieces, ("▁the", -1.0), ("the", -1.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["</s>", "[Fork]", "[Child]"])
    spaced = PreTrainedTokenizerFast(tokenizer_object=backend)
    fork, child, end = (backend.token_to_id(token) for token in ("[Fork]", "[Child]", "</s>"))
    encoder = conversation_encoder(spaced, TokenIds(mask=(), fork=fork, child=child, end=(end,)))
    whole = backend.encode("a: " + LIST, add_special_tokens=False).ids
    flat = only(prepare([chat("a: ", LIST, fork=False)], encoder, LONG))
    assert ids_of(flat)[0] == [*whole, end]
    turns = (Turn("user", "a:"), Turn("assistant", "the b"), Turn("user", "the c"), Turn("assistant", "d"))
    spaced.chat_template = template("{{ message['content'] }}", "")
    several = only(prepare([Conversation(1, turns)], conversation_encoder(spaced, encoder.tokens), LONG))
    text = backend.encode("a:the bthe cd", add_special_tokens=False).ids
    assert several.ids[several.ids != end].tolist() == text
    forked = prepare([chat("a: ", LIST)], encoder, LONG).forked[0]
    assert [token for token in forked.ids.tolist() if token not in (fork, child, end)] == whole


def test_a_template_that_does_not_extend_its_generation_prompt_is_refused() -> None:
    wrong = template("{{ message['role'] }}: {{ message['content'] }}<|end|>", "Answer: ")
    with pytest.raises(
        ConversationError,
        match="line 7: the chat template does not render the answer 'Good\\.' after its generation prompt",
    ):
        prepare([chat("Hello", "Good.")], conversation_encoder(tokenizer(wrong), TOKENS), LONG)


def test_a_tokenizer_needs_an_end_token_but_no_padding_token() -> None:
    assert TOKENIZER.pad_token is None
    with pytest.raises(ConversationError, match="the checkpoint has no end-of-text token: expected eos_token_id"):
        conversation_encoder(TOKENIZER, replace(TOKENS, end=()))


def test_texts_without_tokens_are_counted_and_after_an_empty_prompt_the_first_token_has_no_loss() -> None:
    backend = Tokenizer(models.BPE(vocab={"h": 0, "i": 1, "</s>": 2, "[M]": 3}, merges=[]))  # drops all other letters
    letters = conversation_encoder_with(backend, None, TokenIds(mask=(3,), fork=None, child=None, end=(2,)))
    (sample,) = prepare([chat("zzz", "hi")], letters, 64).whole
    assert sample.ids.tolist() == [0, 1, 2]
    assert sample.learned.tolist() == [False, True, True]
    assert successors(sample).tolist() == [1, 2, NO_PARENT]
    assert prepare([text("zzz")], letters, 64).counts[TOO_SHORT] == 1


@pytest.mark.parametrize("answer", ["a", "s", "ant", "<", "/s"])
def test_an_answer_that_also_occurs_in_the_template_is_located(answer: str) -> None:
    def render(turns: Sequence[Turn], ask: bool) -> str:
        return "".join(f"<{turn.role}>: {turn.content}</s>\n" for turn in turns)

    encoder = conversation_encoder_with(TOKENIZER.backend_tokenizer, render, TOKENS)
    (exchange,) = encoder.exchanges(chat("Which?", answer))
    assert (exchange.lead, exchange.answer, exchange.after) == ("<assistant>: ", answer, "</s>\n")


@st.composite
def trees(draw: st.DrawFn) -> Sample:
    """A random forked sample: a prompt, heads, and child threads after some of them."""
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


def path(sample: Sample, index: int) -> list[tuple[int, bool]]:
    found = []
    while index != NO_PARENT:
        found.append((int(sample.ids[index]), bool(sample.learned[index])))
        index = int(sample.parents[index])
    return found[::-1]


@given(trees(), st.integers(1, 30))
def test_truncation_preserves_the_remaining_paths(sample: Sample, cutoff: int) -> None:
    kept = _truncate(sample, ENCODER, cutoff)
    assert all(parent < index for index, parent in enumerate(kept.parents.tolist()))
    assert kept.parents[0] == NO_PARENT
    assert NO_PARENT not in kept.parents[1:]
    whole = [path(sample, index) for index in range(sample.size)]
    short = [line for line in whole if len(line) <= cutoff]
    # what is gone beside the long paths is a [Child] whose whole detail is beyond the cutoff
    expected = [line for line in short if not (line[-1][0] == CHILD and len(line) == cutoff)]
    assert [path(kept, index) for index in range(kept.size)] == expected
