"""Samples: conversations as token trees, with a loss on assistant messages only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.training import samples
from spaceport.training.conversations import Conversation, Turn
from spaceport.training.packing import successors
from spaceport.training.samples import NO_PARENT, Prepared, Sample, conversation_encoder, prepare, prepare_files
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
    turns = (Turn(("user", "assistant")[number % 2], content) for number, content in enumerate(contents))
    return Conversation(7, tuple(turns), **options)


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


def tree_of(prompt: list[int], items: list[tuple[list[int], list[int] | None]]) -> Sample:
    """A forked sample: a prompt, heads, and child threads after some of them."""
    tokens = [(token, index - 1, False) for index, token in enumerate(prompt)]
    tip = len(tokens) - 1
    for head, detail in items:
        for token in head if detail is None else [*head, FORK]:
            tokens.append((token, tip, True))
            tip = len(tokens) - 1
        above = tip
        for token in () if detail is None else (CHILD, *detail, END):
            tokens.append((token, above, token != CHILD))
            above = len(tokens) - 1
    ids, parents, learned = zip(*tokens, (END, tip, True), strict=True)
    return Sample(7, np.array(ids), np.array(parents), np.array(learned))


def test_answers_and_their_end_tokens_have_a_loss_and_other_turns_none() -> None:
    (sample,) = prepare([chat("Hello", "Good.")], ENCODER, LONG).whole
    first, second = [*spelt("Good."), END], [*spelt("See you."), END]
    before = [BOS, START, *spelt("user\nHello"), END, *spelt("\n"), START, *spelt("assistant\n")]
    assert ids_of(sample) == (before + first, first)
    sample = only(prepare([chat("Hello", "Good.", "Bye", "See you.")], ENCODER, LONG))
    between = spelt("\n" + OPENING.format("Bye").removeprefix("<s>"))
    assert ids_of(sample) == (before + first + between + second, first + second)


def test_without_a_template_prompt_and_response_are_concatenated() -> None:
    sample = only(prepare([chat("Once upon", " a time.")], BARE, LONG))
    answer = [*spelt(" a time."), EOS]
    assert ids_of(sample) == ([BOS, *spelt("Once upon"), *answer], answer)
    with pytest.raises(InputFault, match="line 7: has messages, but the tokenizer has no chat template"):
        prepare([chat("Hello", "Good.", "Bye", "See you.")], BARE, LONG)


def test_a_plain_text_has_a_loss_everywhere_but_on_a_first_token_that_nothing_predicts() -> None:
    source = "import json\n\nx = 1\n"
    ids = spelt(source)
    opened = replace(ENCODER, start=())
    assert ids_of(only(prepare([text(source)], ENCODER, LONG))) == ([BOS, *ids, EOS], [*ids, EOS])
    assert ids_of(only(prepare([text(source, ends=False)], ENCODER, LONG))) == ([BOS, *ids], ids)
    assert ids_of(only(prepare([text(source)], opened, LONG))) == ([*ids, EOS], [*ids[1:], EOS])
    empty = prepare([text("a", ends=False)], opened, LONG)
    assert (empty.whole, empty.counts[samples.TOO_SHORT]) == ([], 1)


def test_a_long_text_is_split_at_newlines_and_ends_once_and_a_long_line_anywhere() -> None:
    lines = [f"value_{number} = {number}\n" for number in range(12)]
    pieces = [sample.ids.tolist() for sample in prepare([text("".join(lines))], ENCODER, 40).whole]
    assert len(pieces) > 2
    assert max(map(len, pieces)) <= 40
    assert [(piece[0], EOS in piece) for piece in pieces] == [(BOS, False)] * (len(pieces) - 1) + [(BOS, True)]
    bodies = [TOKENIZER.decode([token for token in piece if token not in (BOS, EOS)]) for piece in pieces]
    assert "".join(bodies) == "".join(lines)
    assert all(body.endswith("\n") for body in bodies)
    assert len(pieces[0]) + len(spelt(lines[bodies[0].count("\n")])) > 39  # no more lines would have fitted
    long = "x = 1\n" + "word " * 60
    prepared = prepare([text(long)], ENCODER, 30)
    tails = [sample.ids.tolist()[1:] for sample in prepared.whole]
    assert max(map(len, tails)) == 28  # one index is reserved for the beginning and one for the end
    assert TOKENIZER.decode([token for tail in tails for token in tail][:-1]) == long
    assert not prepared.counts[samples.TRUNCATED]


def test_a_list_becomes_a_root_thread_with_a_child_per_fork() -> None:
    prepared = prepare([chat("Which?", LIST)], ENCODER, LONG)
    heads = [spelt(head) for head in ("Three:\n1. Red:", "\n2. Green:", "\n3. Blue:")]
    details = [spelt(f" the colour of {of}") for of in ("fire", "grass", "the sea")]
    expected = tree_of(spelt(OPENING.format("Which?")), [*zip(heads, details, strict=True), (spelt("\n\nDone."), None)])
    (sample,) = prepared.forked
    for name in ("ids", "parents", "learned"):
        assert getattr(sample, name).tolist() == getattr(expected, name).tolist()
    assert (prepared.whole, prepared.unforked) == ([], [])


def test_an_answer_that_does_not_end_has_no_end_token() -> None:
    sample = only(prepare([chat("Hello", "Good mor", ends=False)], ENCODER, LONG))
    assert ids_of(sample) == ([*spelt(OPENING.format("Hello")), *spelt("Good mor")], spelt("Good mor"))
    bare = only(prepare([chat("Hello", "Good mor", ends=False)], BARE, LONG))
    assert bare.ids[-1] != EOS


def test_a_forked_answer_that_does_not_end_has_no_end_token_in_its_last_thread() -> None:
    cut = LIST.removesuffix("e sea\n\nDone.")
    prepared = prepare([chat("Which?", cut, ends=False)], ENCODER, LONG, unforked=True)
    (sample,), (flat,) = prepared.forked, prepared.unforked
    assert ids_of(flat)[1] == spelt(cut)
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


def test_tokens_beyond_the_cutoff_are_dropped_and_children_without_any_counted() -> None:
    full = only(prepare([chat("Which?", LIST)], ENCODER, LONG))
    child = [depth for depth, token in zip(depths(full), full.ids, strict=True) if token == CHILD]
    for cutoff, lost in ((child[1] + 2, 1), (child[1] + 1, 2), (child[1], 2), (child[0], 3), (child[2] + 1, 1)):
        prepared = prepare([chat("Which?", LIST)], ENCODER, cutoff)
        assert (prepared.counts[samples.CHILD_DROPPED], prepared.counts[samples.TRUNCATED]) == (lost, 1)
        (sample,) = prepared.forked
        # a [Child] whose whole detail is beyond the cutoff is dropped too
        kept = [token for token, depth in zip(full.ids, depths(full), strict=True) if depth < cutoff - (token == CHILD)]
        assert sample.ids.tolist() == kept
        assert (sample.ids == CHILD).sum() == 3 - lost


def test_an_answer_that_begins_beyond_the_cutoff_is_dropped_and_counted() -> None:
    before = len(spelt(OPENING.format("Which?")))
    for cutoff, kept in ((before, 0), (before + 1, 1)):
        for conversation in (chat("Which?", LIST), chat("Which?", "Yes, yes.")):
            prepared = prepare([conversation], ENCODER, cutoff, unforked=True)
            assert len(prepared.forked + prepared.whole) == kept
            assert (prepared.counts[samples.TOO_LONG], prepared.counts[samples.TRUNCATED]) == (1 - kept, 1)
            assert len(prepared.unforked) == len(prepared.forked)


def test_texts_with_control_tokens_are_dropped_and_counted() -> None:
    held = [chat("What is [M]?", "A mask."), chat("Say", "[Fork]"), text("a [Child] b"), chat("And?", "Yes.")]
    prepared = prepare(held, ENCODER, LONG)
    assert (len(prepared.whole), prepared.counts[samples.CONTROL]) == (1, 3)


def template(turn: str, ask: str) -> str:
    return "{% for message in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}" + ask + "{% endif %}"


def encoder_of(turn: str, ask: str) -> Any:
    return conversation_encoder(tokenizer(template(turn, ask)), TOKENS)


def test_a_template_may_strip_message_content_and_add_text_before_it() -> None:
    turn = "<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>"
    stripping = encoder_of(turn, "<|start|>assistant\n")
    sample = only(prepare([chat(" Hello\n", "\nGood morning. \n")], stripping, LONG))
    assert ids_of(sample)[1] == [*spelt("Good morning."), END]
    assert prepare([chat("Which?", f"\n\n{LIST}\n")], stripping, LONG).forked[0].ids[-1] == END
    sample = only(prepare([chat("Hello", "Good.")], encoder_of(turn, "<|start|>assistant"), LONG))
    assert ids_of(sample)[1] == [*spelt("\nGood."), END]


def test_an_answer_without_a_rendered_end_token_gets_one() -> None:
    encoder = encoder_of("{{ message['role'] }}: {{ message['content'] }}\n", "assistant:")
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
    turn = "<|start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' and not loop.last %}"
    turn += "{{ message['content'].split('|')[-1] }}{% else %}{{ message['content'] }}{% endif %}<|end|>"
    thinking = encoder_of(turn, "<|start|>assistant\n")
    sample = only(prepare([chat("Hello", "hm|Good.", "Bye", "ha|Bye.")], thinking, LONG))
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


def test_a_template_that_does_not_extend_its_generation_prompt_or_no_end_token_is_refused() -> None:
    wrong = encoder_of("{{ message['role'] }}: {{ message['content'] }}<|end|>", "Answer: ")
    message = r"line 7: the chat template does not render the answer 'Good\.' after its generation prompt"
    with pytest.raises(InputFault, match=f"data.jsonl {message}"):
        prepare_files({Path("data.jsonl"): [chat("Hello", "Good.")]}, wrong, LONG)
    assert TOKENIZER.pad_token is None
    with pytest.raises(InputFault, match="the checkpoint has no end-of-text token: expected eos_token_id"):
        conversation_encoder(TOKENIZER, replace(TOKENS, end=()))


def test_texts_without_tokens_are_counted_and_after_an_empty_prompt_the_first_token_has_no_loss() -> None:
    backend = Tokenizer(models.BPE(vocab={"h": 0, "i": 1, "</s>": 2, "[M]": 3}, merges=[]))  # drops all other letters
    letters = conversation_encoder(
        PreTrainedTokenizerFast(tokenizer_object=backend), TokenIds(mask=(3,), fork=None, child=None, end=(2,))
    )
    (sample,) = prepare([chat("zzz", "hi")], letters, 64).whole
    assert sample.ids.tolist() == [0, 1, 2]
    assert sample.learned.tolist() == [False, True, True]
    assert successors(sample).tolist() == [1, 2, NO_PARENT]
    assert prepare([text("zzz")], letters, 64).counts[samples.TOO_SHORT] == 1
