"""Reference answers: the answers of a data file, as the token sequences that training on the file would learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.tools.tune.conversations import TEXT, Conversation
from spaceport.tools.tune.samples import NO_PARENT, Prepared, Sample

TEXT_PROMPT = 32  # tokens of a plain text that count as its prompt, at most


@dataclass(frozen=True)
class AnswerSegment:
    """Consecutive tokens of an answer, with everything before them."""

    prefix: tuple[int, ...]
    tokens: tuple[int, ...]
    child: bool = False  # the prefix ends with [Child]: a child thread, which may not fork


@dataclass(frozen=True)
class ReferenceAnswer:
    """The answers of one sample, and the prompt of the last one."""

    line: int  # line number in the data file
    prompt: tuple[int, ...]  # everything before the last answer
    segments: tuple[AnswerSegment, ...]


def reference_answers(
    prepared: Prepared, conversations: Sequence[Conversation], tokens: TokenIds
) -> list[ReferenceAnswer]:
    """The samples in file order; the first tokens of a plain text count as its prompt."""
    texts = {conversation.line for conversation in conversations if conversation.turns[0].role == TEXT}
    answers = []
    for sample in sorted((*prepared.forked, *prepared.whole), key=lambda sample: sample.line):
        segments = segments_of(sample, tokens)
        if sample.line in texts:
            segments = [_with_prompt(segment) for segment in segments]
        roots = [segment for segment in segments if not segment.child]
        answers.append(ReferenceAnswer(sample.line, roots[-1].prefix, tuple(segments)))
    return answers


def segments_of(sample: Sample, tokens: TokenIds) -> list[AnswerSegment]:
    """The chains of learned tokens: each begins after a token that is not learned (the prompt's last, or [Child])."""
    members: dict[int, list[int]] = {}  # index of a segment's first token -> indices of all its tokens
    first: dict[int, int] = {}  # index of a token -> index of its segment's first token
    for index in np.flatnonzero(sample.learned).tolist():
        first[index] = first.get(int(sample.parents[index]), index)
        members.setdefault(first[index], []).append(index)
    segments = []
    for start, indices in members.items():
        before = _path(sample, int(sample.parents[start]))
        child = tokens.child is not None and int(sample.ids[before[-1]]) == tokens.child
        segments.append(AnswerSegment(tuple(sample.ids[before].tolist()), tuple(sample.ids[indices].tolist()), child))
    return segments


def _path(sample: Sample, index: int) -> list[int]:
    """The indices from the first token to this one, parent by parent."""
    path = []
    while index != NO_PARENT:
        path.append(index)
        index = int(sample.parents[index])
    return path[::-1]


def _with_prompt(text: AnswerSegment) -> AnswerSegment:
    """A plain text whose first tokens, at most half of them, are its prompt."""
    whole = (*text.prefix, *text.tokens)
    cut = max(len(text.prefix), min(TEXT_PROMPT, len(whole) // 2))
    return AnswerSegment(whole[:cut], whole[cut:])
