"""Extractors: which answers have a paragraph tree, where they are split, and why others have none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.tools.tune.extract import REASONS, Refusal, Tree, extract

Cut = list[tuple[str, str | None]]

FIRST = ("1. Red:", " the colour of fire")
REST: Cut = [("\n2. Green:", " the colour of grass"), ("\n3. Blue:", " the colour of the sea")]

LISTS: dict[str, Cut] = {
    "items one below the other": [FIRST, *REST],
    "text before the first item": [("Three colours:\n\n1. Red:", " the colour of fire"), *REST],
    "text after the last item": [FIRST, *REST, ("\n\nThere are more.", None)],
    "a detail of ten characters": [("1. Red:", " 0123456789"), *REST],
    "full-width colons": [
        ("1. 红：", "火的颜色也是血的颜色"),
        ("\n2. 绿：", "草的颜色也是树的颜色"),
        ("\n3. 蓝：", "海的颜色也是天的颜色"),
    ],
    "bold titles and colons": [("1. **Red:**", " the colour of fire"), *REST],
    "bold items": [("**1. Red:**", " the colour of fire"), ("\n__2. Green:__", " the colour of grass"), REST[1]],
    "a title in code": [("1. `dict[a: b]`:", " the colour of fire"), *REST],
    "a title with a time": [("1. Red, at 10:30:", " the colour of fire"), *REST],
    "details below their titles": [("1. Red:", "\n   the colour of fire"), *REST],
    "a last detail below its title": [FIRST, REST[0], ("\n3. Blue:", "\n\nthe colour of the sea"), ("\n\nDone.", None)],
    "details of several lines": [("1. Red:", " the colour\nof fire\n  and of cherries"), *REST],
    "a last detail of several paragraphs": [
        FIRST,
        REST[0],
        ("\n3. Blue:", " the colour of the sea\n\n   It is deep.\n\n- bullet"),
        ("\n\nDone.", None),
    ],
    "a number inside an item": [("1. Red:", " the colour of\n   1. fire\n   2. cherries"), *REST],
    "a year at the start of a line": [("1. Red:", " the colour of\n1917. And of fire"), *REST],
    "an indented list": [(" 1. Red:", " the colour of fire"), ("\n 2. A:", " 0123456789"), ("\n 3. B:", " 0123456789")],
    "Windows line ends": [
        ("Three:\r\n\r\n1. Red:", " the colour of fire"),
        ("\r\n\r\n2. Green:", " the colour\r\n  of grass"),
        ("\r\n3. Blue:", " the colour of the sea"),
        ("\r\n\r\nDone.\r\n", None),
    ],
}

LONG = ("This is the first sentence.", " And a second one. And a third.")
MORE: Cut = [("\n\nA paragraph goes on here.", " More."), ("\n\nThe last one begins so.", " End.")]

PARAGRAPHS: dict[str, Cut] = {
    "three paragraphs": [LONG, *MORE],
    "a paragraph of one sentence": [LONG, ("\n\nOnly one sentence in this one.", None), *MORE],
    "a paragraph without a mark": [("Introduction", None), ("\n\nThis is the first sentence.", " And."), *MORE],
    "a first sentence that is too short": [("Yes. That is right, as it is.", " So it is."), *MORE],
    "a head of twenty characters": [("Twenty letters, yes.", " They are enough."), *MORE],
    "bold heads": [("**This is the first sentence.**", " It is."), *MORE],
    "no space between sentences": [("这是第一句话，它至少有二十个字那么长，没错。", "这是第二句。"), *MORE],
    "lines of white space": [LONG, ("\n \t\n\nA paragraph goes on here.", " More."), MORE[1]],
    "white space around": [("\n\n  This is the first sentence.", " And."), *MORE, ("\n\n", None)],
    "Windows line ends": [
        ("This is the first sentence.", " And."),
        ("\r\n\r\nA paragraph goes on here.", "\r\nMore."),
        ("\r\n\r\nThe last one begins so.", " End."),
        ("\r\n", None),
    ],
    "words that only end as a title does": [("They stood on the quadr.", " More."), *MORE],
    "a list without titles": [
        ("1. Wash the vegetables well.", " Use cold water."),
        ("\n\n2. Cut them into pieces.", " Mind your fingers."),
        ("\n\n3. Boil for ten minutes.", " Then eat."),
    ],
}


def joined(cut: Cut) -> str:
    return "".join(head + (detail or "") for head, detail in cut)


CUTS = [*(("list", name) for name in LISTS), *(("paragraphs", name) for name in PARAGRAPHS)]


@pytest.mark.parametrize(("kind", "name"), CUTS)
def test_a_list_is_split_after_its_titles_and_paragraphs_after_their_first_sentences(kind: str, name: str) -> None:
    cut = (LISTS if kind == "list" else PARAGRAPHS)[name]
    tree = tree_of(joined(cut))
    assert [(paragraph.head, paragraph.detail) for paragraph in tree.paragraphs] == cut
    assert (tree.kind, tree.text) == (kind, joined(cut))
    assert tree.forks == sum(detail is not None for _, detail in cut)


LIST, PROSE = joined([FIRST, *REST]), joined([LONG, *MORE])
REFUSALS = [
    ("code fence", f"{PROSE}\n\n~~~\ncode\n~~~"),
    ("formula", f"{PROSE} $$x$$"),
    ("link", f"{PROSE} See HTTPS://a.b"),
    ("rule", f"{PROSE}\n| --- |"),
    ("angle bracket", f"{PROSE} b>"),
    ("equals sign", f"{PROSE} a=b"),
    ("fewer than 3 items", "1. Red: the colour of fire"),
    ("fewer than 3 items", joined([FIRST, REST[0]])),
    ("fewer than 3 items", "1. Red: the colour of\n   1. fire\n   2. cherries\n2. Green: the colour of grass"),
    ("numbers out of order", LIST.replace("3.", "4.")),
    ("numbers out of order", LIST.replace("3.", "5.").replace("2.", "4.").replace("1.", "3.")),
    ("numbers out of order", f"{LIST}\n\nAnd:\n\n{LIST}"),
    ("nested list", LIST.replace("fire", "fire\n\n   1. and of cherries")),
    ("nested list", LIST.replace("fire", "fire\r\n \r\n\t1. and of cherries")),
    ("nested list", f"{LIST}\n\n   1. and of the sky"),
    ("item without a title", LIST.replace("Green: ", "")),
    ("item without a title", LIST.replace("Green: ", "At 10:30 ")),
    ("item without a title", LIST.replace("Green: ", "`a: b` ")),
    ("item without a title", LIST.replace("Green: ", "\nGreen: ")),
    ("detail under 10 characters", LIST.replace("the colour of fire", "012345678")),
    ("detail under 10 characters", LIST.replace("the colour of the sea", "012345678\n\nThere are more colours.")),
    ("abbreviation", PROSE.replace("And a second", "And MRS. Who")),
    ("abbreviation", PROSE.replace("And a second", "(mr. Who)")),
    ("fewer than 3 paragraphs", ""),
    ("fewer than 3 paragraphs", joined([LONG, MORE[0]])),
    ("fewer than 3 paragraphs", PROSE.replace("\n\n", "\n")),
    ("fewer than 3 forks", PROSE.replace(" More.", "")),
    ("fewer than 3 forks", PROSE.replace("A paragraph goes on here", "Only 18 letters so")),
]


@pytest.mark.parametrize(("reason", "answer"), REFUSALS)
def test_an_answer_without_a_tree_has_a_reason(reason: str, answer: str) -> None:
    assert extract(answer) == Refusal(reason)  # type: ignore[arg-type]


def test_every_reason_has_an_example_and_without_it_there_is_a_tree() -> None:
    assert {reason for reason, _ in REFUSALS} == set(REASONS)
    assert (tree_of(LIST).kind, tree_of(PROSE).kind) == ("list", "paragraphs")


def test_lists_have_priority_and_a_refused_list_is_tried_as_paragraphs() -> None:
    both = joined([FIRST, *REST]).replace("\n", ". Such is it. So it is.\n\n") + ". So it is."
    assert tree_of(both).kind == "list"
    prose = joined(PARAGRAPHS["a list without titles"])
    assert tree_of(prose).kind == "paragraphs"
    assert extract(prose.replace("\n\n", "\n")) == Refusal("item without a title")


def tree_of(answer: str) -> Tree:
    found = extract(answer)
    assert isinstance(found, Tree), found
    return found


PIECES = [
    "1. ",
    "\n2. ",
    "\n3. ",
    "\n\n4. ",
    "Red:",
    "**Red:**",
    "红：",
    "`a: b`:",
    " the colour of fire",
    " 日本 🚀 and the sea",
    "\n",
]
PIECES += ["\n\n", "\r\n\r\n", "\n   ", "This is how it begins.", " And so on.", "。", "*so*", "10:30", "a.b", "! "]
ANSWERS = st.lists(st.sampled_from(PIECES), min_size=12, max_size=40).map("".join)


def whole(answer: str) -> bool:
    """Check the invariants of an extraction; return whether the answer has a tree."""
    found = extract(answer)
    if isinstance(found, Refusal):
        assert found.reason in REASONS
        return False
    assert found.text == answer
    assert found.forks >= 3
    assert all(paragraph.head for paragraph in found.paragraphs)
    assert all(paragraph.detail is None or paragraph.detail.strip() for paragraph in found.paragraphs)
    assert all(len((paragraph.detail or "a" * 10).strip()) >= 10 for paragraph in found.paragraphs) or (
        found.kind == "paragraphs"
    )
    return True


def test_joining_a_tree_returns_the_answer() -> None:
    found = []

    @settings(max_examples=400, deadline=None, derandomize=True, database=None)
    @given(answer=ANSWERS)
    def joins(answer: str) -> None:
        found.append(whole(answer))

    joins()
    assert sum(found) > 20


@settings(max_examples=200, deadline=None)
@given(answer=st.text() | st.text(alphabet="12.: \n\r\ta*_`。：!-A", max_size=60))
def test_any_text_is_extracted_or_refused(answer: str) -> None:
    whole(answer)


@pytest.mark.parametrize(
    "piece", ["1. ", "\n", "\n ", "1. a: ", ". ", ".'", ":", "`", " ", "\r\n\r\n", "*", "1.\n\n", "a. b\n\n"]
)
def test_extraction_time_is_linear(piece: str) -> None:
    whole(piece * (100_000 // len(piece)))  # a search at every index would take minutes
