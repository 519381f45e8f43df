"""Text: tokens to text and back: tokenizer, stream pieces, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from spaceport.graphs.faults import OptionFault
from spaceport.graphs.manifest import TOKENIZER_FILE
from spaceport.runtime.bundle import Bundle, BundleError

_BROKEN = "\ufffd"  # what a decoder shows for bytes that are no character, or none yet


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
        self._ahead = 0  # complete characters of the tokens that are not settled
        self._pending = ""  # complete, but may begin a stop string

    def push(self, token: int) -> str:
        """The text that this token lets out; `stopped` says whether it completed a stop string."""
        self._tokens.append(token)
        fresh = self._fresh()
        complete = fresh.rstrip(_BROKEN)  # what is broken at the end may become a character with the next token
        before, self._ahead = self._ahead, len(complete)
        if complete and complete == fresh:
            self._context, self._settled, self._ahead = self._settled, len(self._tokens), 0
        return self._let_out(complete[before:])

    def finish(self) -> str:
        """The text still held back: no more tokens follow."""
        if self.stopped:
            return ""
        fresh = self._fresh()[self._ahead :]
        self._settled, self._ahead = len(self._tokens), 0
        rest = self._let_out(fresh) + ("" if self.stopped else self._pending)
        self.text += "" if self.stopped else self._pending
        self._pending = ""
        return rest

    def _fresh(self) -> str:
        """The text of the tokens that are not settled."""
        before = self._decode(self._tokens[self._context : self._settled])
        both = self._decode(self._tokens[self._context :])
        if both.startswith(before):
            return both[len(before) :]
        # Byte fallback breaks a whole run of bytes for one that is wrong, also the characters that were shown of it.
        return self._decode(self._tokens[self._settled :])

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)) if tokens else ""

    def _let_out(self, fresh: str) -> str:
        self._pending += fresh
        places = ((self._pending.find(stop), len(stop)) for stop in self.stops)
        found = [(place + size, place) for place, size in places if place >= 0]
        if found:
            self.stopped = True
            _, cut = min(found)  # the one that is complete first: so it does not matter where tokens end
            shown, self._pending = self._pending[:cut], ""
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
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionFault(
            f"character {error.start} is {text[error.start]!r}, half of a surrogate pair: expected text that UTF-8 can hold"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=special).ids)
