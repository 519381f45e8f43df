"""Grammar: a constrained text matches what was asked for when it ends, whatever the logits and the drafts are."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from spaceport.graphs.contract.faults import MissingDependency, OptionFault
from spaceport.graphs.contract.installation import install_command
from spaceport.graphs.contract.signature import visible_length
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.sequence import NotANumber, TokenSequence, root_sequence
from spaceport.runtime.sampling.grammar import DeadEnd, Grammar, open_vocabulary
from spaceport.runtime.sampling.logprobs import Speller
from support.arrivals import DRAFT_CONFIGS
from support.hash_engine import END, VOCAB, HashEngine, Language, completed, constrained, greedy, request_for
from support.paths import TINY
from support.small_tokenizers import BYTES, FALLBACK, full, one_byte_each, small_vocabulary


def with_words(*words: str) -> Tokenizer:
    """The tokenizer with byte fallback, and more words."""
    reported = json.loads(FALLBACK.to_str())
    reported["model"]["vocab"] |= {word: FALLBACK.get_vocab_size() + position for position, word in enumerate(words)}
    return Tokenizer.from_str(json.dumps(reported))


WORDS = with_words("▁de", "▁de你", "▁thea", "▁qq", "qq")  # not all of them are words without their space too
PADDED = 448  # more tokens than either tokenizer has
VOCABULARIES = {id(one): open_vocabulary(one, PADDED, (close, PADDED - 1)) for one, close in ((BYTES, 1), (WORDS, 2))}


def logits_for(seed: int, text: Sequence[int]) -> NDArray[np.float32]:
    """What a network would say behind a text: always the same."""
    return np.random.default_rng([seed, *text]).normal(size=PADDED).astype(np.float32)


def thread_of(written: Sequence[int] = ()) -> TokenSequence:
    thread = root_sequence([5, 6], 1)
    thread.tokens.extend(written)
    return thread


def test_a_constrained_text_does_not_change_the_logits_and_finds_those_that_are_no_numbers() -> None:
    logits = np.zeros((2, PADDED), np.float32)
    choose = constrained(greedy(), Grammar(regex="a"), VOCABULARIES[id(BYTES)])
    choose.token(logits[0], thread_of(), ())
    choose.candidates(logits, thread_of(), 3, 1)
    assert not logits.any()
    with pytest.raises(NotANumber, match="position 2"):
        choose.token(np.full(PADDED, np.nan, np.float32), thread_of(), ())


def test_json_is_compact_and_white_space_is_an_option_that_has_an_end() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}}}, "required": ["a"]}

    def allows(text: str, whitespace: bool, **options: object) -> bool:
        alone = Grammar(json_schema=options | schema, json_whitespace=whitespace)
        named = Grammar(lark="start: call", schemas={"call": options | schema}, json_whitespace=whitespace)
        matchers = [VOCABULARIES[id(BYTES)].matcher(grammar.source) for grammar in (alone, named)]
        allowed = {matcher.consume_tokens(one_byte_each(text)) and matcher.is_accepting() for matcher in matchers}
        assert len(allowed) == 1
        return allowed.pop()

    compact = json.dumps({"a": [None, None]}, separators=(",", ":"))
    assert allows(compact, False)
    assert allows(compact, True)
    for indent in (None, 2, 4):
        assert allows(json.dumps({"a": [None, None]}, indent=indent), True)
        assert not allows(json.dumps({"a": [None, None]}, indent=indent), False)
    assert not allows('{  "a": []}', True)
    assert not allows('{\n\n"a": []}', True)
    assert allows('{"a": [null]}', False, **{"x-guidance": {"whitespace_flexible": True}})  # of the schema itself


def allowed_by(grammar: Grammar, tokenizer: Tokenizer, written: Sequence[int]) -> NDArray[np.bool_]:
    """V, True = what may follow the tokens of a text."""
    choose = constrained(greedy(), grammar, VOCABULARIES[id(tokenizer)])
    choose.token(np.zeros(PADDED, np.float32), thread_of(written), ())
    return choose.masks[len(written)]


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["byte_level", "byte_fallback"])
@settings(max_examples=40)
@given(
    texts=st.lists(
        st.text("ab de你é😀", max_size=5)
        | st.sampled_from([" the", "  the", " ", "  ", "the a", "</s>", "<s>a", "de", "de你", " de", "dea"]),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 10**6),
)
@example([" the", "a"], 0)
@example([""], 0)
def test_a_token_may_follow_exactly_if_some_text_that_is_asked_for_goes_on_with_it(
    tokenizer: Tokenizer, texts: list[str], seed: int
) -> None:
    """Also: the end exactly where a text is complete, no special token however it is spelt, no token beyond them."""
    assume(any(texts))
    asked = [text.encode() for text in texts]
    grammar = Grammar(regex="|".join(f"(?:{re.escape(text)})" for text in texts))
    tokens, written = list[int](), b""
    special, speller = tokenizer.get_added_tokens_decoder(), Speller(tokenizer)
    raw = {token: speller.spell(token)[1] for token in tokenizer.get_vocab().values() if token not in special}
    ends = VOCABULARIES[id(tokenizer)].ends
    for position in range(30):
        allowed = allowed_by(grammar, tokenizer, tokens)
        # The decoder of this tokenizer takes the first space of a text away.
        cut = int(tokenizer is WORDS and position == 0)
        then = {token: written + (more.removeprefix(b" ") if cut else more) for token, more in raw.items()}
        expected = [token for token in then if any(text.startswith(then[token]) for text in asked)]
        assert np.flatnonzero(allowed & ~ends).tolist() == sorted(expected)
        assert np.all(allowed[ends] == (written in asked))
        options = np.flatnonzero(allowed)
        token = int(options[logits_for(seed, tokens)[options].argmax()])
        if ends[token]:
            assert full(tokenizer, tokens).encode() == written
            return
        written = then[token]
        tokens.append(token)
    pytest.fail("texts are shorter than this")


SMALL, SMALL_VOCABULARY = small_vocabulary()
SMALL_REGEXES = ["(?:abc|cab| ){1,40}", "a{3,}b*c?", "(?:[ab]{2}c ){1,9}", "(?s).*", "(?:cab ){12}", "(?:ab|abc|bca)*"]


def run(
    language: Language, regex: str, draft_config: DraftConfig, most: int, chunk: int
) -> tuple[list[int], str | None, int]:
    """What a constrained request writes, how it ends, and its steps."""
    engine = HashEngine(language, visible_length(8 + most + 160), 1)
    plain = request_for(engine, [1, 2, 3], most, draft_config).selector
    selector = constrained(plain, Grammar(regex=regex), SMALL_VOCABULARY)
    request = request_for(engine, [1, 2, 3], most, draft_config, selector=selector)
    completed(engine, request, chunk)
    thread = request.threads[0]
    return thread.generated, thread.ending, request.statistics.steps


@settings(max_examples=80)
@given(
    regex=st.sampled_from(SMALL_REGEXES),
    language=st.builds(
        Language,
        seed=st.integers(0, 10**6),
        quality=st.sampled_from((0, 50, 100)),
        end_every=st.just(6),
        heads=st.sampled_from((0, 3)),
    ),
    draft_config=DRAFT_CONFIGS,
    most=st.integers(1, 50),
    chunk=st.integers(1, 9),
)
def test_drafted_constrained_text_is_plain_constrained_text(
    regex: str, language: Language, draft_config: DraftConfig, most: int, chunk: int
) -> None:
    plain = run(language, regex, DraftConfig(), most, 512)
    drafted = run(language, regex, draft_config, most, chunk)
    assert drafted[:2] == plain[:2]
    if plain[1] == "end":
        assert re.fullmatch(regex, full(SMALL, plain[0]))


def test_draft_tokens_are_taken_back_also_a_first_one_of_several_pieces() -> None:
    ids, vocabulary, grammar = WORDS.get_vocab(), VOCABULARIES[id(WORDS)], Grammar(regex="(?:de你|de|thea|ab| ab){1,9}")
    choose = constrained(greedy(), grammar, vocabulary)
    for seed, names in enumerate((["▁de", "ab"], ["ab"], ["▁thea", "ab"], [], ["▁de", "▁"], ["▁thea"], ["▁de", "ab"])):
        ahead = [ids[name] for name in names]
        logits = logits_for(seed, ahead)
        expected = constrained(greedy(), grammar, vocabulary).token(logits, thread_of(), ahead)
        assert choose.token(logits, thread_of(), ahead) == expected


def test_what_can_be_written_in_one_way_only_is_drafted_without_fail() -> None:
    tokens, ending, steps = run(Language(3, quality=0), "(?:c ){20}", DraftConfig(3, "chain"), 60, 512)
    assert (full(SMALL, tokens), ending) == ("c " * 20, "end")
    assert steps == 1 + 40 // 4  # the first step has no candidates; the last one's bonus is the end


def test_candidates_follow_the_candidates_before_them() -> None:
    choose, thread = constrained(greedy(), Grammar(regex="ab(?:cab|b) c"), SMALL_VOCABULARY), thread_of()
    ids = SMALL.get_vocab()
    likely = np.zeros((6, VOCAB), np.float32)
    likely[:, ids["©"]] = 5.0  # never allowed here
    likely[:, ids["cab"]] = 1.0
    assert choose.token(likely[0], thread, ()) == ids["a"]
    found = [candidate.tokens[0] for candidate in choose.candidates(likely, thread, 3, 1)]
    assert found == [ids["b"], ids["cab"], ids["Ġ"], ids["c"], END, ids["©"]]  # behind the end anything is as good
    assert [candidate.tokens[0] for candidate in choose.candidates(likely, thread, 3, 1)] == found
    unknown = [candidate.tokens[0] for candidate in choose.candidates(likely, thread, 7, 1)]
    assert unknown == [ids["©"]] * 6
    assert choose.token(likely[0], thread, ()) == ids["a"]


def test_behind_the_end_only_the_end_follows() -> None:
    """A draft is walked to its own end, also where the text ended before."""
    choose, a = constrained(greedy(), Grammar(regex="a"), SMALL_VOCABULARY), SMALL.get_vocab()["a"]
    wants_a = np.eye(VOCAB, dtype=np.float32)[a]
    assert choose.token(wants_a, thread_of([a]), ()) == END
    assert choose.token(wants_a, thread_of(), (a, END)) == END
    assert choose.token(wants_a, thread_of(), ()) == a
    thread, endless = thread_of(), constrained(greedy(), Grammar(regex="a*"), SMALL_VOCABULARY)
    for position in range(30):
        thread.tokens.append(endless.token(wants_a, thread, ()))
        endless.candidates(np.stack([wants_a] * 4), thread, 3 + position, 1)
    assert len(endless.masks) <= 6  # of the last positions only


def test_tokens_that_are_no_text_or_that_the_decoder_shows_as_something_else_are_not_written() -> None:
    reported = json.loads(FALLBACK.to_str())
    reported["decoder"]["decoders"].insert(0, {"type": "Replace", "pattern": {"String": "b"}, "content": "B"})
    tokenizer = Tokenizer.from_str(json.dumps(reported))
    choose = constrained(greedy(), Grammar(regex="ab+"), open_vocabulary(tokenizer, PADDED, (2,)))
    ids, thread = tokenizer.get_vocab(), thread_of()
    for wanted, second in (("ab", "a"), ("b", "<0x62>"), ("b", "</s>")):
        logits = np.zeros(PADDED, np.float32)
        logits[[ids[wanted], ids[second]]] = [2.0, 1.0]
        assert choose.token(logits, thread, ()) == ids[second]
        thread.tokens.append(ids[second])
    assert full(tokenizer, thread.generated) == "ab"
    small = SMALL.get_vocab()
    choose = constrained(greedy(), Grammar(regex="(?:ab)*"), open_vocabulary(SMALL, VOCAB, (END,), [small["ab"]]))
    assert choose.token(np.eye(VOCAB, dtype=np.float32)[small["ab"]], thread_of(), ()) == small["a"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "(a"}, r"regular expression '\(a' cannot be used: .*unclosed group.*: expected .*Rust's"),
        ({"regex": "(?=a)b"}, r"look-around.* is not supported: expected"),
        ({"regex": ""}, r"regex is '': expected .*at least one character"),
        ({"json_schema": "{"}, r"json_schema is not JSON: .*column 2.*expected a schema such as"),
        ({"json_schema": {"enum": [float("nan")]}}, r"json_schema is not JSON: .*expected a schema"),
        ({"json_schema": {"type": "nope"}}, r"JSON schema .* cannot be used: .*Invalid type: nope: expected .*"),
        ({"json_schema": {"not": {}}}, r"Unimplemented keys: \[\"not\"\]: expected"),
        ({}, r"regex, json_schema and lark: .*expected one of the three"),
    ],
)
def test_a_form_that_cannot_be_meant_is_refused_before_a_token_is_written(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionFault, match=message) as caught:
        constrained(greedy(), Grammar(**asked), VOCABULARIES[id(BYTES)])
    assert "llguidance {" not in str(caught.value)  # what is only ours is not quoted
    assert "\n" not in str(caught.value)


def test_a_form_that_no_token_can_begin_is_refused_before_a_token_is_written() -> None:
    empty = "[a&&b]"
    cases = (("xy", SMALL_VOCABULARY), (empty, VOCABULARIES[id(BYTES)]), (empty, VOCABULARIES[id(WORDS)]))
    for regex, vocabulary in cases:
        with pytest.raises(DeadEnd, match="allows no first token: no token of the vocabulary fits: expected"):
            constrained(greedy(), Grammar(regex=regex), vocabulary)


def test_a_text_that_no_token_can_go_on_with_says_where() -> None:
    choose, ids = constrained(greedy(), Grammar(regex="a(?:bc|x)x"), SMALL_VOCABULARY), SMALL.get_vocab()
    line = np.eye(VOCAB, dtype=np.float32)
    thread = thread_of()
    for name in ("a", "b"):
        assert choose.token(line[ids[name]], thread, ()) == ids[name]
        thread.tokens.append(ids[name])
    for _ in range(2):
        with pytest.raises(DeadEnd, match=r"position 5, after 'abc': no token of the vocabulary fits: expected"):
            choose.token(line[0], thread, [ids["c"]])
        assert choose.token(line[0], thread, ()) == ids["c"]  # a failure is not remembered
        drafted = choose.candidates(line[[ids["c"], ids["a"], ids["b"]]], thread, 4, 1)  # may end where none is allowed
        assert [one.tokens[0] for one in drafted] == [ids["c"], ids["a"], ids["b"]]


def test_a_text_whose_tokens_all_are_banned_says_where() -> None:
    ids = SMALL.get_vocab()
    choose = constrained(greedy([ids["b"], ids["bc"]]), Grammar(regex="abc"), SMALL_VOCABULARY)
    with pytest.raises(DeadEnd, match=r"position 3, after .a.: all tokens that it allows are banned: expected"):
        choose.token(np.zeros(VOCAB, np.float32), thread_of(), [ids["a"]])


def test_a_vocabulary_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, "a"))
    with pytest.raises(OptionFault, match=r"tokenizer cannot be used with a grammar: .*expected a byte-level one"):
        open_vocabulary(words, 2, (1,))
    for ends in ((), (PADDED - 1,)):
        with pytest.raises(OptionFault, match=r"none of the end tokens .* is among its \d+ tokens: expected"):
            open_vocabulary(BYTES, PADDED, ends)
    reported = json.loads(FALLBACK.to_str())
    reported["model"]["vocab"]["</s>"] = 900
    reported["added_tokens"][2]["id"] = 900
    with pytest.raises(OptionFault, match=r"it has \d+ tokens, and one with the id 900: expected"):
        open_vocabulary(Tokenizer.from_str(json.dumps(reported)), 1000, (1,))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependency, match=re.escape(install_command("grammar"))):
        open_vocabulary(BYTES, PADDED, (1,))


TOKENIZERS = {"byte level": BYTES, "byte fallback": FALLBACK, "tiny": Tokenizer.from_file(str(TINY / "tokenizer.json"))}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokens_have_the_bytes_that_llguidance_knows_and_special_ones_their_name(tokenizer: Tokenizer) -> None:
    size, special = tokenizer.get_vocab_size(), 0
    reference, speller = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=[1]), Speller(tokenizer)
    for token in range(size):
        if not reference.is_special_token(token):
            assert speller.spell(token)[1] == reference.decode_bytes([token])
    for token, content in tokenizer.get_added_tokens_decoder().items():
        if content.special:
            special += 1
            assert speller.spell(token) == (tokenizer.id_to_token(token), b"")
    assert special
