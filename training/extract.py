"""Extractors: find the paragraph tree of an answer, which defines where a model learns to fork."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

FEWEST = 3  # minimum items, paragraphs and forks
SHORTEST_DETAIL = 10  # minimum characters of an item's detail
SHORTEST_HEAD = 20  # minimum characters of a paragraph's first sentence, with its punctuation

# Code, formulas and tables cannot be split into independent pieces.
_NOT_PROSE = {
    "code fence": re.compile("```|~~~"),
    "formula": re.compile(r"\$\$"),
    "link": re.compile("http", re.IGNORECASE),
    "rule": re.compile("---"),
    "angle bracket": re.compile("[<>]"),
    "equals sign": re.compile("="),
}
_NUMBER = re.compile(r"^([ \t]*)(?:\*\*|__)?(\d{1,3})\.(?!\d)", re.MULTILINE)  # not the 1.5 of "1.5 litres"
# A title ends with a colon, but not one inside `code` or in 10:30. A full-width colon, or one before CJK text, needs no space.
_TITLE = re.compile(r"[^\S\n]*(?=[^\s:：])(?:`[^`\n]*`|[^`\n])*?(?:：|:(?=[\s*_]|[^\x00-\x7f]|\Z))")
_EMPHASIS = re.compile(r"\*\*|__|[*_]")
_BLANK = re.compile(r"\n\s*\n")  # up to the next non-blank line
_INDENT = re.compile(r"[ \t]*")
_BULLET = re.compile(r"[^\S\n]*[-*+•]\s")
# Chinese and Japanese put no space between sentences.
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]*_]*(?=\s)|[。！？][”’」』）]*")
_ABBREVIATION = re.compile(r"\b(?:mr|mrs|dr)\.", re.IGNORECASE)


@dataclass(frozen=True)
class Paragraph:
    """Text of the root thread, including the separator before it, and the detail that a child thread generates after it."""

    head: str
    detail: str | None


Tree = tuple[Paragraph, ...]  # an answer split into paragraphs, in reading order


def extract(answer: str) -> Tree | str:
    """The tree of an answer, from a numbered list, otherwise from paragraphs; or why it has none, and is trained without forks."""
    for reason, pattern in _NOT_PROSE.items():
        if pattern.search(answer):
            return reason
    numbers = list(_NUMBER.finditer(answer))
    listed = _from_list(answer, numbers) if numbers else None
    if isinstance(listed, tuple):
        return listed
    found = _from_paragraphs(answer)
    return listed if listed and isinstance(found, str) else found


def _from_list(answer: str, numbers: list[re.Match[str]]) -> Tree | str:
    """Heads `N. title:` with the text up to the next item as detail; text after the last item stays on the root thread."""
    margin = _width(numbers[0][1]) + 2  # a number indented at least this far belongs to a nested list
    items = [number for number in numbers if _width(number[1]) < margin]
    if len(items) < FEWEST:
        return "fewer than 3 items"
    if [int(item[2]) for item in items] != list(range(1, len(items) + 1)):
        return "numbers out of order"
    blank = {match.end() for match in _BLANK.finditer(answer)}
    if any(number.start() in blank for number in numbers if _width(number[1]) >= margin):
        return "nested list"
    titles = [title for item in items if (title := _title_end(answer, item)) is not None]
    if len(titles) < len(items):
        return "item without a title"
    ends = [item.start() for item in items[1:]] + [_last_end(answer, titles[-1], margin)]
    paragraphs, start = [], 0
    for title, end in zip(titles, ends, strict=True):
        detail = answer[title:end].rstrip()
        if len(detail.strip()) < SHORTEST_DETAIL:
            return "detail under 10 characters"
        paragraphs.append(Paragraph(answer[start:title], detail))
        start = title + len(detail)
    return _with_rest(paragraphs, answer[start:])


def _title_end(answer: str, item: re.Match[str]) -> int | None:
    """End of an item's head: after its colon, and after closing emphasis around it."""
    title = _TITLE.match(answer, item.end())
    if not title:
        return None
    closing = _EMPHASIS.match(answer, title.end())
    opened = closing and answer.count(closing[0], item.start(), title.end()) % 2
    return closing.end() if closing and opened else title.end()


def _last_end(answer: str, title: int, margin: int) -> int:
    """End of the last item's detail: before a paragraph that is neither indented nor a bullet."""
    detail = len(answer) - len(answer[title:].lstrip())  # skip blank lines between title and detail
    for blank in _BLANK.finditer(answer, detail):
        indent = _INDENT.match(answer, blank.end())
        if not (indent and _width(indent[0]) >= margin) and not _BULLET.match(answer, blank.end()):
            return blank.start()
    return len(answer)


def _from_paragraphs(answer: str) -> Tree | str:
    """Heads are first sentences; a paragraph with one sentence stays on the root thread."""
    pieces = list(_pieces(answer))
    if len(pieces) < FEWEST:
        return "fewer than 3 paragraphs"
    if _ABBREVIATION.search(answer):
        return "abbreviation"
    paragraphs = [_paragraph(piece) for piece in pieces]
    if sum(paragraph.detail is not None for paragraph in paragraphs) < FEWEST:
        return "fewer than 3 forks"
    return _with_rest(paragraphs, answer[len(answer.rstrip()) :])


def _pieces(answer: str) -> Iterator[str]:
    """The paragraphs, each with the whitespace before it."""
    start, last = 0, len(answer.rstrip())
    for end in [*(blank.start() for blank in _BLANK.finditer(answer)), last]:
        piece = answer[start:end].rstrip()  # removes the \r of a Windows line end
        if piece:
            yield piece
        start += len(piece)


def _paragraph(piece: str) -> Paragraph:
    """Split a paragraph after its first sentence; a sentence as short as "Yes." is joined with the next."""
    first = len(piece) - len(piece.lstrip())
    for mark in _SENTENCE_END.finditer(piece, first):
        if mark.end() - first >= SHORTEST_HEAD:
            rest = piece[mark.end() :]
            return Paragraph(piece[: mark.end()], rest) if rest.strip() else Paragraph(piece, None)
    return Paragraph(piece, None)


def _with_rest(paragraphs: list[Paragraph], rest: str) -> Tree:
    return (*paragraphs, Paragraph(rest, None)) if rest else tuple(paragraphs)


def _width(indent: str) -> int:
    return len(indent.expandtabs(4))
