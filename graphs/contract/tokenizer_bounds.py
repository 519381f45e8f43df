"""Bounds of a tokenizer.json: no text costs much more with it than its length.

Everything but the model is declared in a few lines of the file: these are parsed here, and refused if a text of one
character could become long, or if an expression could try too often. Strings are limited in the whole file.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from spaceport.graphs.contract.json_fields import short

# Far above every known tokenizer.
_MOST_GROWTH = {"a character": 256, "a token": 16, "the post-processor": 64}  # bytes, bytes of a byte, tokens
_MOST_COMPONENTS = 64  # of each part
_MOST_STRING = 4096  # bytes of a string in the file; the longest tokens of vocabularies have some hundreds
_MOST_NORMALIZED = 1 << 24  # bytes of all added tokens after the normalizer
_MOST_TRIES = 1 << 14  # of an expression at a character
_REPETITION = 16  # tries that a repetition without a limit counts as; one with a limit counts at most as much

_PARTS = ("truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
_NEXT_PART = re.compile(r'\s*[{,]\s*"(\w+)"\s*:\s*')
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*\Z')
_SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")  # their entries in a component

# The elements of an expression. Refused are references, which repeat, and what could hide something: comments, options in
# the middle, and control characters.
_ELEMENT = re.compile(
    r"""(?P<open> \((?!\?) | \(\?(?:[:=!>]|<[=!]|<\w+>|[imsu-]+:) ) | (?P<close> \) ) | (?P<or> \| )
    | (?P<posix> \[:\^?[a-z]+:\] ) | (?P<begin> \[ ) | (?P<end> \] )
    | (?P<count> [*+?][?+]? | \{(?P<fixed>\d+)\} | \{(?P<from>\d*),(?P<to>\d*)\} )
    | (?P<options> \A\(\?[imsu-]+\) ) | (?P<refused> \(\? | \\[gkcCM1-9] )
    | (?P<other> \\[pPx]\{[^}]*\} | \\?. )""",
    re.VERBOSE | re.DOTALL,
)


class UnsafeTokenizer(ValueError):
    """A tokenizer file has something that costs too much."""


class _Growth(NamedTuple):
    """The most bytes that n bytes become: `factor` * n + `added`; tokens instead for a post-processor."""

    factor: float = 1.0
    added: float = 0.0

    def then(self, other: _Growth) -> _Growth:
        return _Growth(self.factor * other.factor, self.added * other.factor + other.added)


_Rule = _Growth | Callable[[Any], _Growth]  # the growth by a component, or by its fields


def checked(content: bytes) -> str:
    """The content of a tokenizer.json, after checks of everything but its model; raises `UnsafeTokenizer`.

    The checked parts come last: of two parts with the same name, `tokenizers` takes the last one.
    """
    _check_strings(content)
    parts, model = _parts_of(content.decode())
    _check_parts(parts)
    return f'{{"model": {model}, {json.dumps(parts)[1:]}'


def _parts_of(text: str) -> tuple[dict[str, Any], str]:
    """The parsed parts of a tokenizer.json, and the text of its model, which is most of it and not parsed."""
    parts: dict[str, Any] = {}
    position, decoder = 0, json.JSONDecoder()
    while (match := _NEXT_PART.match(text, position)) and match[1] != "model":
        parts[match[1]], position = decoder.raw_decode(text, match.end())
    if match and parts.keys() >= set(_PARTS):  # as `tokenizers` writes them
        return {name: parts[name] for name in _PARTS}, text[match.end() :].rstrip().removesuffix("}")
    parts = json.loads(text)
    return {name: parts.get(name) for name in _PARTS}, json.dumps(parts["model"])


def _check_parts(parts: Mapping[str, Any]) -> None:
    for name in ("truncation", "padding"):
        if parts[name] is not None:
            raise UnsafeTokenizer(f"{name} is {short(parts[name])}, expected none, as exports write it")
    normalizer = _growth_of(parts["normalizer"], "normalizer", _TEXT)
    _require_growth("a character", normalizer.then(_growth_of(parts["pre_tokenizer"], "pre_tokenizer", _TEXT)))
    _require_growth("a token", _growth_of(parts["decoder"], "decoder", _DECODERS))
    _require_growth("the post-processor", _growth_of(parts["post_processor"], "post_processor", _POST_PROCESSORS))
    normalized = [token["content"] for token in parts["added_tokens"] or () if token.get("normalized")]
    size = sum(map(_size, normalized)) * normalizer.factor + len(normalized) * normalizer.added
    if size > _MOST_NORMALIZED:
        raise UnsafeTokenizer(
            f"its added tokens may have {size:.0f} bytes after the normalizer, {_MOST_NORMALIZED} are allowed"
        )


def _require_growth(what: str, growth: _Growth) -> None:
    most = _MOST_GROWTH[what]
    if growth.factor + growth.added > most:
        raise UnsafeTokenizer(
            f"{what} may become {growth.factor + growth.added:.0f} times as long, {most} times is allowed"
        )


def _check_strings(content: bytes) -> None:
    """Raise for strings that are long; a quote behind a backslash counts as none, whatever is before that."""
    array = np.frombuffer(content, np.uint8)
    (quotes,) = np.nonzero(array == ord('"'))
    quotes = quotes[array[quotes - 1] != ord("\\")]
    for index in np.nonzero(np.diff(quotes) > _MOST_STRING + 1)[0].tolist():
        start = int(quotes[index])
        if not _CHARSMAP.search(content[max(0, start - 100) : start]):
            raise UnsafeTokenizer(f"a string at byte {start} has more than {_MOST_STRING} bytes")


def _growth_of(part: Any, name: str, known: Mapping[str, _Rule]) -> _Growth:
    """The growth by all components of a part, one after the other."""
    growth = _Growth()
    for number, component in enumerate(_components(part, name)):
        kind = component.get("type")
        if not isinstance(kind, str) or kind not in known:
            raise UnsafeTokenizer(f"{name} has the type {short(kind)}, expected one of {', '.join(known)}")
        if number >= _MOST_COMPONENTS:
            raise UnsafeTokenizer(f"{name} has more than {_MOST_COMPONENTS} components")
        rule = known[kind]
        try:
            growth = growth.then(rule if isinstance(rule, _Growth) else rule(component))
        except (KeyError, TypeError, AttributeError, binascii.Error, UnicodeError) as error:
            raise UnsafeTokenizer(f"{name} has the component {short(component)}, which is not valid") from error
    return growth


def _components(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """The components of a part in order, those of sequences in it too."""
    waiting = [] if part is None else [part]
    while waiting:
        component = waiting.pop()
        if not isinstance(component, dict):
            raise UnsafeTokenizer(f"{name} has the component {short(component)}, expected a table")
        if component.get("type") != "Sequence":
            yield component
            continue
        for key in _SEQUENCES:
            waiting += reversed(component.get(key) or ())


def _size(text: str) -> int:
    return len(text.encode())


def _replacing(component: Mapping[str, Any]) -> _Growth:
    """An expression may match everywhere, also between characters."""
    ((kind, pattern),) = component["pattern"].items()
    size = _size(component["content"])
    if kind == "String" and pattern:
        return _Growth(max(1.0, size / _size(pattern)))
    _check_expression(pattern)
    return _Growth(1.0 + size, size)


def _splitting(component: Mapping[str, Any]) -> _Growth:
    _check_expression(component["pattern"].get("Regex", ""))
    return _Growth()


def _precompiled(component: Mapping[str, Any]) -> _Growth:
    """A table that replaces characters: the bytes of a trie, then texts that end with a zero."""
    table = base64.b64decode(component["precompiled_charsmap"] or "")
    return _Growth(max(1.0, *map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0"))))


def _metaspace(component: Mapping[str, Any]) -> _Growth:
    size = _size(component["replacement"])
    return _Growth(size, size)


def _template(component: Mapping[str, Any]) -> _Growth:
    factor = added = 0.0
    for piece in component["single"]:
        if "Sequence" in piece:
            factor += 1
        else:
            added += len(component["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    return _Growth(factor, added)


@dataclass
class _Group:
    """Tries of a group of an expression: those of elements behind each other are multiplied, those of alternatives added."""

    finished: float = 0.0  # of the alternatives before this one
    before: float = 1.0  # of this alternative without its last element
    last: float = 1.0  # of the last element

    @property
    def tries(self) -> float:
        return self.finished + self.before * self.last

    def follow(self, tries: float) -> None:
        self.before, self.last = self.before * self.last, tries

    def branch(self) -> None:
        self.finished, self.before, self.last = self.tries, 1.0, 1.0


def _check_expression(pattern: str) -> None:
    """Raise for an expression that may try very often at one character of a text."""
    groups, depth = [_Group()], 0  # depth: of character classes in each other
    for match in _ELEMENT.finditer(pattern):
        kind = match.lastgroup
        if depth or kind == "begin":
            if kind == "begin" and pattern.startswith("[:", match.start()):
                raise UnsafeTokenizer(f"the expression {short(pattern)} has an unknown class")
            depth += (kind == "begin") - (kind == "end")
            if not depth:
                groups[-1].follow(1.0)
        elif kind == "refused":
            raise UnsafeTokenizer(f"the expression {short(pattern)} has {match[0]!r}, which is not allowed")
        elif kind == "open":
            groups.append(_Group())
        elif kind == "close" and len(groups) > 1:
            tries = groups.pop().tries
            groups[-1].follow(tries)
        elif kind == "or":
            groups[-1].branch()
        elif kind == "count":
            groups[-1].last = _repeated(groups[-1].last, match, pattern)
        elif kind != "options":
            groups[-1].follow(1.0)
    if depth or len(groups) > 1 or groups[0].tries > _MOST_TRIES:
        raise UnsafeTokenizer(f"the expression {short(pattern)} may try too often")


def _repeated(tries: float, match: re.Match[str], pattern: str) -> float:
    """Tries of an element that is repeated."""
    fixed = match["fixed"]
    if fixed is not None:
        least = most = int(fixed)
    elif match["from"] is not None:
        least, most = int(match["from"] or 0), int(match["to"] or _REPETITION**2)
    else:
        least, most = int(match[0][0] == "+"), 1 if match[0][0] == "?" else _REPETITION**2
    if most <= 1:
        return tries + (least < most)
    if tries > 1:
        raise UnsafeTokenizer(f"the expression {short(pattern)} repeats something with choices")
    return min(_REPETITION, abs(most - least) + 1)


_SAME = _Growth()
# By type of normalizers and pre-tokenizers. Those of Unicode: https://unicode.org/faq/normalization.html
_TEXT: dict[str, _Rule] = {
    **dict.fromkeys(("Strip", "StripAccents", "Nmt"), _SAME),
    **dict.fromkeys(("NFC", "NFD", "Lowercase"), _Growth(3)),
    **dict.fromkeys(("NFKC", "NFKD"), _Growth(11)),
    "BertNormalizer": _Growth(12),
    "Precompiled": _precompiled,
    "Replace": _replacing,
    "Prepend": lambda component: _Growth(1, _size(component["prepend"])),
    "ByteLevel": _Growth(2, 1),
    "Metaspace": _metaspace,
    "Split": _splitting,
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Delimiter", "Whitespace", "WhitespaceSplit"), _SAME),
    **dict.fromkeys(("Punctuation", "Digits", "UnicodeScripts", "FixedLength"), _SAME),
}
_DECODERS: dict[str, _Rule] = {
    **dict.fromkeys(("Fuse", "Strip", "ByteFallback", "Metaspace"), _SAME),
    "ByteLevel": _Growth(3),  # of a byte that is no text
    **dict.fromkeys(("BPEDecoder", "WordPiece", "CTC"), _Growth(2, 1)),
    "Replace": _replacing,
}
_POST_PROCESSORS: dict[str, _Rule] = {
    "ByteLevel": _SAME,
    **dict.fromkeys(("BertProcessing", "RobertaProcessing"), _Growth(1, 2)),
    "TemplateProcessing": _template,
}
