"""Given answers: the lines of a data file, in the tokens that a training on it would learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.tools.tune.conversations import TEXT, Conversation
from spaceport.tools.tune.samples import NO_PARENT, Prepared, Sample

TEXT_PROMPT = 32  # most tokens of a plain text that count as its prompt


@dataclass(frozen=True)
class Passage:
    """Tokens that follow each other in a line, and all that stands before them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    child: bool = False  # it begins with [Child], so it may not fork


@dataclass(frozen=True)
class Given:
    """A sample as what is asked and what is told."""

    line: int  # of the data file
    prompt: tuple[int, ...]  # what stands before its last answer
    passages: tuple[Passage, ...]  # its answers


def given_answers(prepared: Prepared, conversations: Sequence[Conversation], tokens: TokenIds) -> list[Given]:
    """The samples in the order of the file; a plain text's beginning counts as its prompt."""
    texts = {conversation.line for conversation in conversations if conversation.turns[0].role == TEXT}
    found = []
    for sample in sorted((*prepared.forked, *prepared.whole), key=lambda sample: sample.line):
        passages = passages_of(sample, tokens)
        if sample.line in texts:
            passages = [_halved(passage) for passage in passages]
        spines = [passage for passage in passages if not passage.child]
        found.append(Given(sample.line, spines[-1].prompt, tuple(passages)))
    return found


def passages_of(sample: Sample, tokens: TokenIds) -> list[Passage]:
    """The chains of learned tokens: one begins behind each token that is not learned, a prompt's last or [Child]."""
    members: dict[int, list[int]] = {}  # place of a passage's first token -> those of all
    first: dict[int, int] = {}  # place of a token -> that of its passage's first
    for place in np.flatnonzero(sample.learned).tolist():
        first[place] = first.get(int(sample.parents[place]), place)
        members.setdefault(first[place], []).append(place)
    found = []
    for start, places in members.items():
        before = _path(sample, int(sample.parents[start]))
        child = tokens.child is not None and int(sample.ids[before[-1]]) == tokens.child
        found.append(Passage(tuple(sample.ids[before].tolist()), tuple(sample.ids[places].tolist()), child))
    return found


def _path(sample: Sample, place: int) -> list[int]:
    """The places from the first token to this one."""
    path = []
    while place != NO_PARENT:
        path.append(place)
        place = int(sample.parents[place])
    return path[::-1]


def _halved(text: Passage) -> Passage:
    """A plain text with its beginning as the prompt."""
    whole = (*text.prompt, *text.tokens)
    cut = max(len(text.prompt), min(TEXT_PROMPT, len(whole) // 2))
    return Passage(whole[:cut], whole[cut:])
