"""Finds the calls of functions in a model's text while it is generated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from spaceport.runtime.tool_calls.functions import FORMATS, FormatName, ToolFormat

MOST_DEPTH = 64  # nested objects and arrays

_SPACE = re.compile(r"[ \t\r\n]*")
_LETTERS = re.compile(r'[^"\\\x00-\x1f]*')  # of a string, up to its end or an escape sequence
_WORD = re.compile(r"[0-9A-Za-z+.-]*")
_NUMBER_OR_NAME = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_CLOSING = {"{": "}", "[": "]"}
_ESCAPE_BEGUN = re.compile(r"\\(u[0-9A-Fa-f]{0,3})?")

_State = Literal["object", "first key", "key", ":", "first value", "value", ",", "string", "word"]
MOST_CALLS = 128  # of one text
_ARGUMENTS = ("arguments", "parameters")
_MEMBERS = frozenset(("name", *_ARGUMENTS, "id", "type"))
_WHITESPACE = " \t\r\n"
_REASONED = "</think>"
_FENCE = "```"
_FENCED = re.compile(_FENCE + r"[A-Za-z_]{0,16}\s{0,16}")  # the first line of a code block
# Mistral's newer format: the name before the arguments.
_NAME = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]*)?(?:\[ARGS\])?\s*\{")
_MOST_NAME = 200  # characters before the arguments


@dataclass(frozen=True)
class CallPart:
    """A part of a call: the first one has the name of its function, the others more of its arguments."""

    index: int  # of the call in the text
    arguments: str  # a piece of their JSON text
    name: str | None = None


MessagePart = str | CallPart


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
        return self._read_character(at, self.text[at])

    def _read_character(self, at: int, character: str) -> int:
        """Read a bracket, a separator, or the first character of a string, number or name."""
        state = self._state
        if state == "object" and character == "{":
            self._push_bracket(character)
        elif state in ("key", "first key") and character == '"':
            self._state, self._start, self._is_key = "string", at, True
        elif state == ":" and character == ":":
            self._state = "value"
        elif state == "," and character == ",":
            self._state = "key" if self._open[-1] == "{" else "value"
        elif state in ("first key", "first value", ",") and character == _CLOSING[self._open[-1]]:
            self._open.pop()
            self._end_value(at + 1)
        elif state in ("value", "first value") and (character in '{["-' or character.isalnum()):
            if self._open == ["{"]:
                self.members[self._member] = (at, None)
            if character in "{[":
                self._push_bracket(character)
            else:
                self._state, self._start, self._is_key = ("string" if character == '"' else "word"), at, False
        else:
            self.failed = True
            return at
        return at + 1

    def _push_bracket(self, character: str) -> None:
        self._open.append(character)
        self._state = "first key" if character == "{" else "first value"
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
        match = pattern.match(self.text, at)
        assert match is not None  # it may be empty
        return match.end()


class ToolCallParser:
    """Finds calls in text that comes in pieces; text that is no valid call stays text.

    A call is valid if it is a JSON object in the format of the model, with the name of one of these functions. In other
    formats than the model's, calls are found as the whole text and in code blocks. How the text is cut into pieces makes
    no difference to the joined parts. Whitespace around calls is left out.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        *,
        most_calls: int = MOST_CALLS,
        constrained: bool = False,
        opened: bool = False,
    ) -> None:
        """Describe the text.

        - `most_calls`: Number of calls after which further ones are left out.
        - `constrained`: Whether a grammar has the text consist of valid calls, so that arguments need not be complete.
        - `opened`: Whether the prompt ends with the opening of the format.
        """
        self._format = tool_format
        self._names = names
        self._most_calls = most_calls
        self._constrained = constrained
        self._held = ""  # text that is not known to be text or a call
        self._at = 0  # characters of it that were read as part of a call
        self._before = ""  # text before it that is text if this is no call
        self._object = JsonObject()
        self._name: str | None = None  # name of the function that stands before the object
        self._in_list = False
        self._in_fence = False
        self._is_bare = False  # whether the calls have no opening, though the format has one
        self._calls = 0
        self.has_other_format = False  # whether a call was found that is not in the format
        # Characters of the arguments of the current call that were returned; None: no part of it.
        self._sent: int | None = None
        self._over = False
        self._parts: list[MessagePart] = []
        self._marks = [mark for mark in (tool_format.opening, _REASONED, _FENCE) if mark]
        if constrained:
            self._marks = [tool_format.opening or _REASONED]
        self._advance: Callable[[], bool] = self._start
        if tool_format.opening and (opened or constrained):
            self._advance = self._opened if opened else self._search

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return min(self._calls, self._most_calls)

    def push(self, text: str) -> list[MessagePart]:
        """The parts that are known after this piece of text."""
        self._held += text
        while self._advance():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[MessagePart]:
        """The remaining parts, at the end of the text."""
        self._over = True
        parts = self.push("")
        rest = "" if self._sent is not None else self._before + self._held
        self._before = self._held = ""
        if self._calls and (self._constrained or not rest.strip(_WHITESPACE)):  # the start of another call, or nothing
            return parts
        return [*parts, rest] if rest else parts

    # Each of these reads some of the held text, and returns whether the next one may read more.

    def _search(self) -> bool:
        """Text up to where calls may begin; it holds back what may be such a place, and whitespace before it."""
        places = [(at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0]
        at, mark = min(places, default=(len(self._held) - max(_begun(self._held, mark) for mark in self._marks), ""))
        if mark == _REASONED:  # the end of a model's reasoning, behind which its answer starts
            at += len(mark)
            self._emit(self._held[:at])
            self._held, self._advance = self._held[at:], self._start
            return True
        text = self._held[:at].rstrip(_WHITESPACE)
        end = at + len(mark)
        if mark == _FENCE:
            head = _FENCED.match(self._held, at)
            end = len(self._held) if head is None else head.end()
            if end < len(self._held) and self._held[end] not in "{[":
                self._emit(self._held[: at + len(mark)])
                self._held = self._held[at + len(mark) :]
                return True
        self._emit(text)
        if not mark or (mark == _FENCE and end == len(self._held)):
            self._held = self._held[len(text) :]
            return False
        self._before, self._held = self._held[len(text) : end], self._held[end:]
        self._in_fence, self._advance = mark == _FENCE, self._opened
        return True

    def _start(self) -> bool:
        """The start of a text that consists of calls, or has none."""
        rest = self._held.lstrip(_WHITESPACE)
        prefix, opening = self._format.prefix, self._format.opening
        if opening and opening.startswith(rest):
            return False
        if opening and rest.startswith(opening):
            self._advance = self._search
            return True
        if prefix and rest.startswith(prefix):
            rest = rest[len(prefix) :].lstrip(_WHITESPACE)
        elif prefix.startswith(rest):
            return False
        if not rest:
            return False
        if rest[0] not in "{[":
            self._advance = self._search
            return True
        self._before, self._held = self._held[: len(self._held) - len(rest)], rest
        self._is_bare, self._advance = bool(opening), self._opened
        return True

    def _opened(self) -> bool:
        """The first call, or a list of calls."""
        character = self._skipped()
        if not character:
            return False
        if character == "[" and not self._in_list:
            self._in_list = True
            self._at += 1
            return True
        if character == "{":
            self._advance = self._call
            return True
        if self._format.name == "mistral" and not self._in_list:
            name = _NAME.match(self._held, self._at, self._at + _MOST_NAME)
            if name is not None:
                self._name, self._at, self._advance = name[1], name.end() - 1, self._call
                return True
            if "{" not in self._held[self._at :] and len(self._held) < self._at + _MOST_NAME:
                return False
        return self._no_call()

    def _call(self) -> bool:
        """A JSON object that may be a call."""
        self._at += self._object.push(self._held[self._at :])
        if self._object.failed or not self._may_be_call():
            return self._no_call()
        if self._constrained and not self._object.done:
            self._stream_arguments()
        if not self._object.done:
            return False
        name, arguments = self._called()
        if name is None or arguments is None:
            return self._no_call()
        self._emit_call(name, arguments)
        self._calls += 1
        self.has_other_format = self.has_other_format or self._in_fence or self._is_bare
        self._sent, self._name, self._object, self._before = None, None, JsonObject(), ""
        self._accept()
        self._advance = self._between
        return True

    def _between(self) -> bool:
        """What may stand after a call: another one, or the end of calls."""
        character, form = self._skipped(), self._format
        if not character:
            return False
        if self._in_list and character in ",]":
            self._in_list = character == ","
            self._at += 1
            if character == "]":
                self._accept()
                return True
            self._advance = self._opened
            return True
        rest, closing = self._held[self._at :], _FENCE if self._in_fence else form.closing
        if not self._in_list:
            separates = character == ";" and not form.opening and not self._in_fence
            if separates or (character == "{" and self._in_fence):
                self._at += separates
                self._advance = self._opened
                return True
            if closing and rest.startswith(closing):
                self._at += len(closing)
                self._accept()
            elif closing.startswith(rest):
                if self._over:
                    self._held = ""
                return False
        self._in_list = self._in_fence = self._is_bare = False
        self._at, self._advance = 0, self._search
        return True

    def _skipped(self) -> str:
        """The next character that is no whitespace, to which it moves; empty if none has come."""
        while self._at < len(self._held) and self._held[self._at] in _WHITESPACE:
            self._at += 1
        return self._held[self._at : self._at + 1]

    def _accept(self) -> None:
        """Drop the text that was read, which belongs to calls."""
        self._held, self._at = self._held[self._at :], 0

    def _no_call(self) -> bool:
        """Return the opening as text and go on after it."""
        self._emit(self._before)
        self._before, self._at = "", 0
        self._in_list = self._in_fence = self._is_bare = False
        self._object, self._name, self._sent = JsonObject(), None, None
        self._advance = self._search
        return True

    def _may_be_call(self) -> bool:
        """Whether the members so far can be those of a call, so that other JSON need not be held back until its end."""
        if self._name is not None:
            return True
        name = self._object.value("name")
        known = name is None or self._named(name) is not None
        return known and _MEMBERS.issuperset(self._object.members)

    def _named(self, text: str) -> str | None:
        """The function with the name that this JSON text is; None: there is none."""
        name = json.loads(text) if text.startswith('"') else None
        return name if name in self._names else None

    def _called(self) -> tuple[str | None, str | None]:
        """The name and the arguments of a complete object; None: it is no call."""
        if self._name is not None:
            return (self._name if self._name in self._names else None), self._object.text
        text = self._object.value("name")
        name = None if text is None else self._named(text)
        if name is None or not self._may_be_call():
            return None, None
        arguments = self._object.value(*_ARGUMENTS)
        if arguments is None:
            return name, "{}"
        return name, arguments if arguments.startswith("{") else None

    def _stream_arguments(self) -> None:
        """Return what is known of the arguments of a call that is certain."""
        name, arguments = self._object.value("name"), self._object.members.get(self._format.arguments)
        if name is not None and arguments is not None:
            start, end = arguments
            self._emit_call(json.loads(name), self._object.text[start:end])

    def _emit_call(self, name: str, arguments: str) -> None:
        """Return a part of a call with those arguments that were not returned before."""
        if self._calls >= self._most_calls:
            return
        if self._sent is None:
            self._parts.append(CallPart(self._calls, arguments, name))
        elif arguments[self._sent :]:
            self._parts.append(CallPart(self._calls, arguments[self._sent :]))
        self._sent = len(arguments)

    def _emit(self, text: str) -> None:
        if text:
            self._parts.append(text)


def other_format(text: str, own: ToolFormat, names: Collection[str]) -> FormatName | None:
    """The format of the calls in a text, if it is not the model's own; None: it has no such calls."""
    loosely = False
    for name in dict.fromkeys((own.name, "json", *FORMATS)):
        parser = ToolCallParser(FORMATS[name], names)
        parser.push(text)
        parser.finish()
        if parser.calls and not parser.has_other_format:
            return None if name == own.name else name
        loosely = loosely or parser.calls > 0
    return "json" if loosely and own.name != "json" else None


def _begun(text: str, opening: str) -> int:
    """Number of characters at the end that may be the start of an opening."""
    return next(
        (size for size in range(min(len(opening) - 1, len(text)), 0, -1) if opening.startswith(text[-size:])), 0
    )
