"""JSON object: checks the text of a JSON object as it comes, and finds its members."""

from __future__ import annotations

import json
import re
from typing import Literal

MOST_DEPTH = 64  # nested objects and arrays

_SPACE = re.compile(r"[ \t\r\n]*")
_LETTERS = re.compile(r'[^"\\\x00-\x1f]*')  # of a string, up to its end or an escape sequence
_WORD = re.compile(r"[0-9A-Za-z+.-]*")
_NUMBER_OR_NAME = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(u[0-9A-Fa-f]{0,3})?")

_State = Literal["object", "first key", "key", ":", "first value", "value", ",", "string", "word"]


class JsonObject:
    """The text of a JSON object that comes in pieces; it fails at the first character that cannot belong to it.

    The time is linear in the length of the text, however it is cut into pieces.
    """

    def __init__(self) -> None:
        self.text = ""  # up to its end
        self.done = False
        self.failed = False
        # Index of the first character of each member's value, and of the one after its last; None: it is not complete.
        self.members: dict[str, tuple[int, int | None]] = {}
        self._state: _State = "object"  # what comes next, or is being read
        self._open: list[str] = []  # brackets around the next character
        self._start = 0  # index of the first character of the string, number or name that is read
        self._is_key = False  # whether that string is a key
        self._escape = ""  # escape sequence that is not complete
        self._member = ""  # key of the member of the object itself that is read

    def push(self, text: str) -> int:
        """Read a piece; returns how many of its characters belong to the object."""
        before = at = len(self.text)
        self.text += text
        while at < len(self.text) and not self.done and not self.failed:
            at = self._read(at)
        self.text = self.text[:at]
        return at - before

    def value(self, *names: str) -> str | None:
        """The JSON text of the first of these members that is there; None: none is, or it is not complete."""
        for name in names:
            if name in self.members:
                start, end = self.members[name]
                return None if end is None else self.text[start:end]
        return None

    def _read(self, at: int) -> int:
        """Read at least one character, the one at this index; returns the index after what was read."""
        if self._state == "string":
            return self._read_string(at)
        if self._state == "word":
            end = self._match(_WORD, at)
            if end < len(self.text):
                self.failed = not _NUMBER_OR_NAME.fullmatch(self.text, self._start, end)
                self._end_value(end)
            return end
        at = self._match(_SPACE, at)
        if at == len(self.text):
            return at
        return self._read_sign(at, self.text[at])

    def _read_sign(self, at: int, sign: str) -> int:
        """Read a bracket, a separator, or the first character of a string, number or name."""
        state = self._state
        if state == "object" and sign == "{":
            self._push_bracket(sign)
        elif state in ("key", "first key") and sign == '"':
            self._begin("string", at, is_key=True)
        elif state == ":" and sign == ":":
            self._state = "value"
        elif state == "," and sign == ",":
            self._state = "key" if self._open[-1] == "{" else "value"
        elif (state, sign, self._open[-1:]) in _CLOSING:
            self._open.pop()
            self._end_value(at + 1)
        elif state in ("value", "first value") and (sign in '{["-' or sign.isalnum()):
            self._begin_value(at, sign)
        else:
            self.failed = True
            return at
        return at + 1

    def _begin_value(self, at: int, sign: str) -> None:
        if self._open == ["{"]:
            self.members[self._member] = (at, None)
        if sign in "{[":
            self._push_bracket(sign)
        else:
            self._begin("string" if sign == '"' else "word", at)

    def _begin(self, state: _State, at: int, is_key: bool = False) -> None:
        self._state, self._start, self._is_key = state, at, is_key

    def _push_bracket(self, sign: str) -> None:
        self._open.append(sign)
        self._state = "first key" if sign == "{" else "first value"
        self.failed = len(self._open) > MOST_DEPTH

    def _read_string(self, at: int) -> int:
        if self._escape:
            self._escape += self.text[at]
            if _ESCAPE.fullmatch(self._escape):
                self._escape = ""
            else:
                self.failed = not _ESCAPE_BEGUN.fullmatch(self._escape)
            return at + 1
        at = self._match(_LETTERS, at)
        if at == len(self.text):
            return at
        if self.text[at] == "\\":
            self._escape = "\\"
        elif self.text[at] == '"':
            self._end_string(at + 1)
        else:
            self.failed = True
            return at
        return at + 1

    def _end_string(self, end: int) -> None:
        if not self._is_key:
            self._end_value(end)
            return
        self._state = ":"
        if len(self._open) == 1:
            self._member = json.loads(self.text[self._start : end])
            self.failed = self._member in self.members  # readers disagree on which of the two counts

    def _end_value(self, end: int) -> None:
        """Go on after a value, which may be the object itself."""
        if self._open == ["{"]:
            self.members[self._member] = (self.members[self._member][0], end)
        self._state = ","
        self.done = not self._open

    def _match(self, pattern: re.Pattern[str], at: int) -> int:
        found = pattern.match(self.text, at)
        assert found is not None  # it may be empty
        return found.end()


# State, sign and innermost bracket where the sign closes the bracket.
_CLOSING = (
    ("first key", "}", ["{"]),
    (",", "}", ["{"]),
    ("first value", "]", ["["]),
    (",", "]", ["["]),
)
