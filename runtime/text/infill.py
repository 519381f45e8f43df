"""Infill: what stands between two texts, written by a code model that was trained to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import OptionFault

_REPOSITORY, _THIS_FILE = "project", "file"  # names that a prompt needs and nobody knows
_NEWLINE = "\n"
_SEPARATOR = "\n\n--- "  # before the name of each file, for models without a token for it

Span = tuple[int, int]  # indices of the first character and of the one after the last


@dataclass(frozen=True)
class InfillPrompt:
    """A gap in a text that the model fills.

    - `before`: The text before the gap.
    - `after`: The text after it.
    - `files`: Names and texts of other files, or of parts of them; the model reads them first.
    """

    before: str
    after: str
    files: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            if not isinstance(value := getattr(self, name), str):
                raise OptionFault(f"{name} is of type {type(value).__name__}: expected text")
        for file in self.files:
            if not (isinstance(file, tuple) and len(file) == 2 and all(isinstance(part, str) for part in file)):
                raise OptionFault(f"files has {file!r:.60}: expected pairs of a name and a text")

    @property
    def characters(self) -> int:
        """Number of characters of all texts."""
        return len(self.before) + len(self.after) + sum(len(name) + len(text) for name, text in self.files)


class InfillMarks(NamedTuple):
    """The control tokens of a prompt: `before`, the text before the gap, `after`, the text after it, `middle`."""

    before: str
    after: str
    middle: str
    file: str = ""  # before the name of each file and its text; empty: the model has no such token
    repository: str = ""  # before the name of a repository; empty: the model has no such token
    end: str = ""  # after the filled gap; empty: the model has no such token

    @property
    def tokens(self) -> tuple[str, ...]:
        """All marks; where the model writes one, its text ends."""
        return tuple(filter(None, self))

    def written(self, gap: InfillPrompt) -> tuple[str, tuple[Span, ...]]:
        """The text of a prompt, and where the texts of the gap and of the files are in it."""
        parts = []  # each mark with the text after it
        if gap.files:
            if self.repository:
                parts.append((self.repository, f"{_REPOSITORY}\n"))
            named = [(name, f"{text.rstrip(_NEWLINE)}\n") for name, text in gap.files]
            parts += [(self.file or _SEPARATOR, f"{name}\n{text}") for name, text in (*named, (_THIS_FILE, ""))]
        parts += [(self.before, gap.before), (self.after, gap.after), (self.middle, "")]
        text, spans = "", []
        for mark, part in parts:
            start = len(text) + len(mark)
            spans.append((start, start + len(part)))
            text += mark + part
        return text, tuple(spans)

    def parts(self, text: str) -> tuple[Span, ...] | None:
        """Where the texts between the marks are in a prompt that an editor wrote with them; None: it has no gap."""
        first, second = text.rfind(self.before), text.rfind(self.after)
        if not (0 <= first < second and text.endswith(self.middle)):
            return None
        spans, start = [], 0
        while start < len(text):
            places = [(at, mark) for mark in self.tokens if (at := text.find(mark, start)) >= 0]
            at, mark = min(places)
            spans.append((start, at))
            start = at + len(mark)
        return tuple(span for span in spans if span[0] < span[1])


_MARKS = (
    InfillMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>"),  # Qwen Coder
    InfillMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"),  # CodeGemma
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<repo_name>"),  # StarCoder 2
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    InfillMarks("▁<PRE>", "▁<SUF>", "▁<MID>", end="▁<EOT>"),  # Code Llama
)
_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<｜end▁of▁sentence｜>", "<｜EOT｜>")


def marks_of(tokenizer: Tokenizer) -> InfillMarks | None:
    """The marks of a model whose tokenizer has all of them as tokens; None: it has none."""
    known = tokenizer.token_to_id
    return next((marks for marks in _MARKS if all(known(mark) is not None for mark in marks.tokens)), None)


def ends_of(tokenizer: Tokenizer, marks: InfillMarks) -> tuple[int, ...]:
    """The tokens at which a filled gap ends, besides the end tokens of the model."""
    tokens = (tokenizer.token_to_id(text) for text in (*marks.tokens, *_ENDS))
    return tuple(token for token in tokens if token is not None)
