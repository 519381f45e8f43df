"""Extraction counts: how many answers have a paragraph tree, and why others have none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spaceport.tools.tune.conversations import Conversation
from spaceport.tools.tune.extract import Reason, Refusal, Tree, extract


@dataclass(frozen=True)
class Extraction:
    """Extraction result of one conversation; None if it has no answer or is marked `"fork": false`."""

    conversation: Conversation
    found: Tree | Refusal | None


@dataclass(frozen=True)
class ExtractionCounts:
    """Counts over extractions."""

    conversations: int
    answers: int
    marked_unforked: int  # answers with "fork": false
    lists: int
    paragraphs: int
    forks: int  # in all trees
    most_forks: int  # in one tree
    characters: int  # in all answers
    in_details: int  # characters that child threads can generate
    refusals: dict[Reason, int]  # most frequent first

    @property
    def trees(self) -> int:
        return self.lists + self.paragraphs

    @property
    def mean_forks(self) -> float | None:
        return self.forks / self.trees if self.trees else None

    @property
    def detail_share(self) -> float | None:
        return self.in_details / self.characters if self.characters else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "conversations": self.conversations,
            "answers": self.answers,
            "marked_unforked": self.marked_unforked,
            "forked": {"list": self.lists, "paragraphs": self.paragraphs},
            "forks": self.forks,
            "forks_per_tree": {"mean": self.mean_forks, "max": self.most_forks or None},
            "characters": self.characters,
            "characters_in_details": self.in_details,
            "refusals": self.refusals,
        }


def extraction_of(conversation: Conversation) -> Extraction:
    """Extraction result of a conversation's last answer."""
    answer = conversation.answer if conversation.fork else None
    return Extraction(conversation, None if answer is None else extract(answer))


def count_extractions(extractions: Sequence[Extraction]) -> ExtractionCounts:
    """Count extraction results."""
    answers = [extraction for extraction in extractions if extraction.conversation.answer is not None]
    trees = [extraction.found for extraction in extractions if isinstance(extraction.found, Tree)]
    refusals = Counter(extraction.found.reason for extraction in extractions if isinstance(extraction.found, Refusal))
    lists = sum(tree.kind == "list" for tree in trees)
    return ExtractionCounts(
        conversations=len(extractions),
        answers=len(answers),
        marked_unforked=sum(extraction.found is None for extraction in answers),
        lists=lists,
        paragraphs=len(trees) - lists,
        forks=sum(tree.forks for tree in trees),
        most_forks=max((tree.forks for tree in trees), default=0),
        characters=sum(len(extraction.conversation.answer or "") for extraction in extractions),
        in_details=sum(len(paragraph.detail or "") for tree in trees for paragraph in tree.paragraphs),
        refusals=dict(refusals.most_common()),
    )
