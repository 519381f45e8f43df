"""Vocabulary: words that the product does not use, with the usual term of the field, and how texts are searched for them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import click


@dataclass(frozen=True)
class Word:
    """A word that is rejected in prose, with what to write instead."""

    pattern: str  # regular expression; matches whole words, upper or lower case
    instead: str
    allowed: str = ""  # regular expression of literal uses, which are no fault

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(rf"\b(?:{self.pattern})\b", re.IGNORECASE)

    def found_in(self, text: str) -> list[str]:
        """The rejected uses in a text."""
        rest = re.sub(self.allowed, " ", text, flags=re.IGNORECASE) if self.allowed else text
        return [match[0] for match in self.regex.finditer(rest)]


# To reject another word, add a row. Literal uses go into the third column.
WORDS = (
    Word("guess|guesses|guessed", "candidate, draft token, prediction", "never guess(es)?"),
    Word("processors?", "CPU", r"\(R\) Processor|pre-?processors?|^processor\s*:.*|protocol.buffer"),
    Word("spines?", "root thread"),
    Word("hangs? (from|on)|hanging from|hung from", "child of, parent is"),
    Word("odds", "probability"),
    Word("likeliest", "most probable, best"),
    Word("told|tells?|telling", "report, return, say, print"),
    Word("hears?|heard|hearing", "receive, be called with"),
    Word("news", "event"),
    Word("deaf", "NullListener"),
    Word("mends?|mended", "fix"),
    Word("rooms?", "capacity, budget, remaining, free slots"),
    Word(
        "places?",
        "index, position, column, slot",
        r"\bin(to)?[- ]place\b|\btakes? place\b|\bin place of\b|\bdecimal places?\b",
    ),
    Word("so (many|much|often)", "N, count, at most N"),
    Word(
        "(tokens?|rows?|steps?|operators?|ms|us|µs|MB|times|samples?|nodes?|\\d[\\d.]*) a (step|second|layer|row|call|token|line)",
        "per step, per second",
        r"how many [\w ]*tokens a step",
    ),
    Word(
        "(writes?|written|wrote|writing) (a |an |the |its |their |such |one |own |same |other )*(texts?|tokens?|answers?)",
        "generate, output, completion",
        r"writes answers as JSON lines",
    ),
    Word("(drawn|draw|draws|drawing) (a |the |its |their |other )?(tokens?|texts?|samples?)", "sample, generate"),
    Word("drawn texts?|texts? drawn|drawn tokens?", "sampled"),
    Word("kept", "accepted, retained, stored, saved"),
    Word("let go|lets go|rid of", "release, free, close"),
    Word("cannot be meant|(that|which) (is|are) meant", "invalid, refers to"),
    Word("(hold|holds|held) (it |them |texts? )?(to|against)", "verify, compare with"),
    Word("look-ups?|looked[- ]up|look(s)? up", "prompt lookup (n-gram)"),
    Word("(rounded|few bits?) (weights?|models?)|weights? (in|of) (few|8|4) bits?", "quantized weights"),
    Word("whoever|whosoever", "the caller, the program that"),
    Word("in silence", "silently"),
    Word("reckons?|reckoned", "compute"),
    Word("unless told otherwise", "by default"),
)

# Parts of names in the code that are rejected: `told`, `free_room`, `on_hear`.
NAME_PARTS = {
    "told": "reported, options",
    "tell": "report",
    "hear": "on_event, on_step",
    "heard": "received",
    "hearing": "listening",
    "news": "event",
    "deaf": "NullListener",
    "room": "capacity, free, budget",
    "spine": "root",
    "odds": "probabilities",
    "guess": "candidate",
    "guesses": "candidates",
    "likeliest": "best",
    "saw": "on_step",
    "processor": "cpu",
    "place": "index, position, column",
    "places": "indices, positions",
    "drawn": "sampled",
}


def help_pages(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """The help of a command and of all commands below it, by their full names."""
    context = click.Context(command, info_name=name, max_content_width=120, terminal_width=120)
    yield name, command.get_help(context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from help_pages(found, f"{name} {below}")


def prose(markdown: str) -> str:
    """A page without blocks of code, inline code and link targets, line by line."""
    text = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(`+)(.+?)\1", "`", text)
    return re.sub(r"\]\([^)\s]+\)|<a id=[^>]+></a>|https?://\S+", "]", text)


def wide_lines(markdown: str, columns: int = 120) -> list[str]:
    """Lines of a page that are too long, tables, code and link targets left out."""
    return [line for line in prose(markdown).splitlines() if len(line) > columns and not line.startswith("|")]


def written_in(source: str) -> Iterator[tuple[int, str]]:
    """The comments, docstrings and messages of a Python file by their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"(`+)(.+?)\1", "`", node.value)


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """The names that a Python file defines by their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def parts_of(name: str) -> list[str]:
    """The words of a name in snake case or camel case, in lower case."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]
