"""Extractors: the paragraph tree in an answer, which tells a model where it may fork."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Reason = Literal[
    "code fence",
    "formula",
    "link",
    "rule",
    "angle bracket",
    "equals sign",
    "fewer than 3 items",
    "numbers out of order",
    "nested list",
    "item without a title",
    "detail under 10 characters",
    "abbreviation",
    "fewer than 3 paragraphs",
    "fewer than 3 forks",
]
REASONS: tuple[Reason, ...] = get_args(Reason)
ExtractorName = Literal["list", "paragraphs"]

FEWEST = 3  # items, paragraphs and forks
SHORTEST_DETAIL = 10  # characters of an item's detail
SHORTEST_HEAD = 20  # characters of a paragraph's first sentence, with its mark

# Code, formulas and tables are not prose that may be cut in pieces.
_FOREIGN: tuple[tuple[Reason, re.Pattern[str]], ...] = (
    ("code fence", re.compile("```|~~~")),
    ("formula", re.compile(r"\$\$")),
    ("link", re.compile("http", re.IGNORECASE)),
    ("rule", re.compile("---")),
    ("angle bracket", re.compile("[<>]")),
    ("equals sign", re.compile("=")),
)
_NUMBER = re.compile(r"^([ \t]*)(?:\*\*|__)?(\d{1,3})\.(?!\d)", re.MULTILINE)  # not the 1.5 of "1.5 litres"
# A colon inside `code` is none, nor is that of 10:30; a full-width one needs no space, nor does one before such text.
_TITLE = re.compile(r"[^\S\n]*(?=[^\s:：])(?:`[^`\n]*`|[^`\n])*?(?:：|:(?=[\s*_]|[^\x00-\x7f]|\Z))")
_EMPHASIS = re.compile(r"\*\*|__|[*_]")
_BLANK = re.compile(r"\n\s*\n")  # ends where the next line that is not blank begins
_INDENT = re.compile(r"[ \t]*")
_BULLET = re.compile(r"[^\S\n]*[-*+•]\s")
# Chinese and Japanese put no space between sentences.
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]*_]*(?=\s)|[。！？][”’」』）]*")
_ABBREVIATION = re.compile(r"\b(?:mr|mrs|dr)\.", re.IGNORECASE)


@dataclass(frozen=True)
class Paragraph:
    """A piece of the spine, with the separator before it, and the detail that a child thread may write after it."""

    head: str
    detail: str | None


@dataclass(frozen=True)
class Tree:
    """An answer cut in paragraphs, in reading order."""

    kind: ExtractorName
    paragraphs: tuple[Paragraph, ...]

    @property
    def text(self) -> str:
        """The answer, to the character."""
        return "".join(paragraph.head + (paragraph.detail or "") for paragraph in self.paragraphs)

    @property
    def forks(self) -> int:
        """How many details there are."""
        return sum(paragraph.detail is not None for paragraph in self.paragraphs)


@dataclass(frozen=True)
class Refusal:
    """Why an answer has no tree: it is learned as it stands."""

    reason: Reason


def extract(answer: str) -> Tree | Refusal:
    """The tree of an answer, from its numbered list or else from its paragraphs."""
    for reason, pattern in _FOREIGN:
        if pattern.search(answer):
            return Refusal(reason)
    numbers = list(_NUMBER.finditer(answer))
    listed = _from_list(answer, numbers) if numbers else None
    if isinstance(listed, Tree):
        return listed
    found = _from_paragraphs(answer)
    return listed if listed and isinstance(found, Refusal) else found


def _from_list(answer: str, numbers: list[re.Match[str]]) -> Tree | Refusal:
    """Heads `N. title:`, each with the text up to the next item; what follows the last item stays on the spine."""
    margin = _width(numbers[0][1]) + 2  # from here on a number is one inside an item
    items = [number for number in numbers if _width(number[1]) < margin]
    if len(items) < FEWEST:
        return Refusal("fewer than 3 items")
    if [int(item[2]) for item in items] != list(range(1, len(items) + 1)):
        return Refusal("numbers out of order")
    blank = {match.end() for match in _BLANK.finditer(answer)}
    if any(number.start() in blank for number in numbers if _width(number[1]) >= margin):
        return Refusal("nested list")
    titles = [title for item in items if (title := _title_end(answer, item)) is not None]
    if len(titles) < len(items):
        return Refusal("item without a title")
    ends = [item.start() for item in items[1:]] + [_last_end(answer, titles[-1], margin)]
    paragraphs, start = [], 0
    for title, end in zip(titles, ends, strict=True):
        detail = answer[title:end].rstrip()
        if len(detail.strip()) < SHORTEST_DETAIL:
            return Refusal("detail under 10 characters")
        paragraphs.append(Paragraph(answer[start:title], detail))
        start = title + len(detail)
    return Tree("list", _with_rest(paragraphs, answer[start:]))


def _title_end(answer: str, item: re.Match[str]) -> int | None:
    """Where an item's head ends: after its colon, and after the emphasis that the colon stands in."""
    title = _TITLE.match(answer, item.end())
    if not title:
        return None
    closing = _EMPHASIS.match(answer, title.end())
    opened = closing and answer.count(closing[0], item.start(), title.end()) % 2
    return closing.end() if closing and opened else title.end()


def _last_end(answer: str, title: int, margin: int) -> int:
    """Where the last item's detail ends: before a paragraph that is neither indented nor a bullet."""
    detail = len(answer) - len(answer[title:].lstrip())  # a blank line between title and detail ends nothing
    for blank in _BLANK.finditer(answer, detail):
        indent = _INDENT.match(answer, blank.end())
        if not (indent and _width(indent[0]) >= margin) and not _BULLET.match(answer, blank.end()):
            return blank.start()
    return len(answer)


def _from_paragraphs(answer: str) -> Tree | Refusal:
    """Heads are first sentences; a paragraph of one sentence stays whole on the spine."""
    pieces = list(_pieces(answer))
    if len(pieces) < FEWEST:
        return Refusal("fewer than 3 paragraphs")
    if _ABBREVIATION.search(answer):
        return Refusal("abbreviation")
    paragraphs = [_paragraph(piece) for piece in pieces]
    tree = Tree("paragraphs", _with_rest(paragraphs, answer[len(answer.rstrip()) :]))
    return tree if tree.forks >= FEWEST else Refusal("fewer than 3 forks")


def _pieces(answer: str) -> Iterator[str]:
    """The paragraphs, each with the white space before it."""
    start, last = 0, len(answer.rstrip())
    for end in [*(blank.start() for blank in _BLANK.finditer(answer)), last]:
        piece = answer[start:end].rstrip()  # half of a Windows line end is left there
        if piece:
            yield piece
        start += len(piece)


def _paragraph(piece: str) -> Paragraph:
    """A paragraph cut after its first sentence; "Yes." and such are too short to be one and take the next along."""
    first = len(piece) - len(piece.lstrip())
    for mark in _SENTENCE_END.finditer(piece, first):
        if mark.end() - first >= SHORTEST_HEAD:
            rest = piece[mark.end() :]
            return Paragraph(piece[: mark.end()], rest) if rest.strip() else Paragraph(piece, None)
    return Paragraph(piece, None)


def _with_rest(paragraphs: list[Paragraph], rest: str) -> tuple[Paragraph, ...]:
    return (*paragraphs, Paragraph(rest, None)) if rest else tuple(paragraphs)


def _width(indent: str) -> int:
    return len(indent.expandtabs(4))
