"""Text: tokens to text and back: tokenizer, stream pieces, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from spaceport.graphs.manifest import TOKENIZER_FILE
from spaceport.runtime.bundle import Bundle, BundleError

_BROKEN = "\ufffd"  # what a decoder shows for bytes that are not yet a character
_LONGEST_CHARACTER = 8  # tokens after which broken bytes are given up on; UTF-8 needs at most 4 bytes for a character


def open_tokenizer(bundle: Bundle) -> Tokenizer:
    """The bundle's tokenizer."""
    file = bundle.path / TOKENIZER_FILE
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise BundleError(f"{file}: not a tokenizer that can be read: {error}") from error


@dataclass
class TextStream:
    """Text that grows token by token and never shows half a character, nor the beginning of a stop string."""

    tokenizer: Tokenizer
    stops: tuple[str, ...] = ()
    text: str = ""  # shown so far
    stopped: bool = False

    def __post_init__(self) -> None:
        self._tokens: list[int] = []
        self._settled = 0  # tokens whose text is complete
        self._context = 0  # tokens before those that are decoded along, since a decoder treats a beginning apart
        self._pending = ""  # complete, but may begin a stop string

    def push(self, token: int) -> str:
        """The text that this token lets out; `stopped` says whether it completed a stop string."""
        self._tokens.append(token)
        fresh = self._fresh()
        if fresh.endswith(_BROKEN) and len(self._tokens) - self._settled < _LONGEST_CHARACTER:
            return ""
        if fresh:
            self._context, self._settled = self._settled, len(self._tokens)
        return self._let_out(fresh)

    def finish(self) -> str:
        """The text still held back: no more tokens follow."""
        if self.stopped:
            return ""
        fresh, self._settled = self._fresh(), len(self._tokens)
        rest = self._let_out(fresh) + ("" if self.stopped else self._pending)
        self.text += "" if self.stopped else self._pending
        self._pending = ""
        return rest

    def _fresh(self) -> str:
        before = self._decode(self._tokens[self._context : self._settled])
        both = self._decode(self._tokens[self._context :])
        return both[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)) if tokens else ""

    def _let_out(self, fresh: str) -> str:
        self._pending += fresh
        found = [place for place in (self._pending.find(stop) for stop in self.stops) if place >= 0]
        if found:
            self.stopped = True
            shown, self._pending = self._pending[: min(found)], ""
        else:
            held = self._held_back()
            shown, self._pending = (
                self._pending[: len(self._pending) - held],
                self._pending[len(self._pending) - held :],
            )
        self.text += shown
        return shown

    def _held_back(self) -> int:
        """How many characters at the end may begin a stop string."""
        longest = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    """The tokens of a text; `special` adds what the tokenizer puts around a text of its own."""
    return list(tokenizer.encode(text, add_special_tokens=special).ids)


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of tokens, shown piece by piece as a stream would show it."""
    stream = TextStream(tokenizer)
    return "".join(stream.push(token) for token in tokens) + stream.finish()
