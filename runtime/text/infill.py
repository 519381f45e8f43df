"""Infill: what stands between two texts, written by a code model that was trained to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import OptionFault

Span = tuple[int, int]  # indices of the first character and of the one after the last


@dataclass(frozen=True)
class InfillPrompt:
    """A gap in a text that the model fills.

    - `before`: The text before the gap.
    - `after`: The text after it.
    """

    before: str
    after: str

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            if not isinstance(value := getattr(self, name), str):
                raise OptionFault(f"{name} is of type {type(value).__name__}: expected text")


class InfillMarks(NamedTuple):
    """The control tokens of a prompt: `before`, the text before the gap, `after`, the text after it, `middle`."""

    before: str
    after: str
    middle: str
    others: tuple[str, ...] = ()  # between the files of a repository; where the model writes one, its text ends

    def written(self, gap: InfillPrompt) -> tuple[str, tuple[Span, ...]]:
        """The text of a prompt, and where the texts of the gap are in it."""
        start = len(self.before)
        end, second = start + len(gap.before), start + len(gap.before) + len(self.after)
        text = f"{self.before}{gap.before}{self.after}{gap.after}{self.middle}"
        return text, ((start, end), (second, second + len(gap.after)))

    def parts(self, text: str) -> tuple[Span, ...] | None:
        """Where the texts between the marks are in a prompt that an editor wrote with them; None: it has no gap."""
        first, second = text.rfind(self.before), text.rfind(self.after)
        if not (0 <= first < second and text.endswith(self.middle)):
            return None
        spans, start = [], 0
        while start < len(text):
            places = [(at, mark) for mark in (*self[:3], *self.others) if (at := text.find(mark, start)) >= 0]
            at, mark = min(places)
            spans.append((start, at))
            start = at + len(mark)
        return tuple(span for span in spans if span[0] < span[1])


_MARKS = (
    InfillMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|repo_name|>", "<|file_sep|>")),  # Qwen Coder
    InfillMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|file_separator|>",)),  # CodeGemma
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<file_sep>", "<repo_name>")),  # StarCoder 2
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    InfillMarks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # Code Llama
)
_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<｜end▁of▁sentence｜>", "<｜EOT｜>")


def marks_of(tokenizer: Tokenizer) -> InfillMarks | None:
    """The marks of a model whose tokenizer has all of them as tokens; None: it has none."""
    known = tokenizer.token_to_id
    return next((marks for marks in _MARKS if all(known(m) is not None for m in (*marks[:3], *marks.others))), None)


def ends_of(tokenizer: Tokenizer, marks: InfillMarks) -> tuple[int, ...]:
    """The tokens at which a filled gap ends, besides the end tokens of the model."""
    tokens = (tokenizer.token_to_id(text) for text in (*marks[:3], *marks.others, *_ENDS))
    return tuple(token for token in tokens if token is not None)
