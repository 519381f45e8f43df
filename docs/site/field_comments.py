"""Field comments: the comment beside or above a field of a class, or what an option declares, as its description."""

from __future__ import annotations

import io
import tokenize
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from griffe import Attribute, Docstring, ExprCall, Extension

from spaceport.runtime.sampling.option_fields import OptionField, option_fields


@cache
def comments_of(file: Path) -> dict[int, tuple[str, bool]]:
    """The comments of a file by line, and whether each has the line for itself."""
    source = file.read_text("utf-8")
    lines = source.splitlines()
    return {
        token.start[0]: (token.string.lstrip("#").strip(), lines[token.start[0] - 1].lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }


def description(file: Path, first: int, last: int) -> str:
    """What the comments above, within and beside a field say, in this order."""
    comments = comments_of(file)
    above = first - 1
    while above in comments and comments[above][1]:
        above -= 1
    return " ".join(comments[line][0] for line in range(above + 1, last + 1) if line in comments)


def declared_option(attr: Attribute) -> OptionField | None:
    """The generation option that a field declares, if it is one."""
    if not isinstance(attr.value, ExprCall) or str(attr.value.function) != "option" or attr.parent is None:
        return None
    options = getattr(import_module(attr.parent.module.path), attr.parent.name)
    return next(declared for declared in option_fields(options) if declared.name == attr.name)


class FieldComments(Extension):
    """Gives fields without a docstring that of their comments, and options what they declare."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        if (declared := declared_option(attr)) is not None:
            attr.docstring = Docstring(declared.described, parent=attr)
            attr.value = repr(declared.default)
            return
        if attr.docstring is not None or attr.lineno is None or not isinstance(attr.filepath, Path):
            return
        if text := description(attr.filepath, attr.lineno, attr.endlineno or attr.lineno):
            sentence = text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")
            attr.docstring = Docstring(sentence, lineno=attr.lineno, endlineno=attr.endlineno, parent=attr)
