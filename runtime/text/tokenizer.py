"""Text: tokens to text and back: tokenizer, stream pieces, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TOKENIZER_FILE
from spaceport.runtime.bundle import Bundle, BundleError

_BROKEN = "\ufffd"  # what a decoder shows for bytes that are no character, or none yet


def open_tokenizer(bundle: Bundle) -> Tokenizer:
    """The bundle's tokenizer."""
    file = bundle.path / TOKENIZER_FILE
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise BundleError(f"{file}: not a tokenizer that can be read: {error}") from error


class StopSearch:
    """Text on its way to where it is shown, up to the first stop string and without what may begin one."""

    def __init__(self, stops: tuple[str, ...], held: str = "") -> None:
        self.held = held  # may begin a stop string
        self.stopped = False
        self._stops = stops
        self._beginnings = frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
        self._longest = max(map(len, self._beginnings), default=0)

    def push(self, text: str) -> str:
        """What can be shown now; `stopped` says whether a stop string is complete."""
        if not self._stops:
            return text
        text = self.held + text
        places = ((text.find(stop), len(stop)) for stop in self._stops)
        found = [(place + size, place) for place, size in places if place >= 0]
        if found:
            self.stopped = True
            _, cut = min(found)  # the one that is complete first: so it does not matter where tokens end
            self.held = ""
            return text[:cut]
        cut = len(text) - self._beginning(text)
        self.held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What is still held: no more text follows."""
        rest, self.held = self.held, ""
        return rest

    def _beginning(self, text: str) -> int:
        """How many characters at the end may begin a stop string."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0


@dataclass
class TextStream:
    """Text that grows token by token and never shows half a character, nor the beginning of a stop string."""

    tokenizer: Tokenizer
    stops: tuple[str, ...] = ()
    context: tuple[int, ...] = ()  # complete text that stands before; without it a decoder treats the first token apart
    text: str = ""  # shown so far
    fresh: str = ""  # what the last token said, also what is held back or behind a stop string

    def __post_init__(self) -> None:
        self._tokens = list(self.context)
        self._settled = len(self._tokens)  # tokens whose text is complete
        self._context = 0  # tokens before those that are decoded along, since a decoder treats a beginning apart
        self._ahead = 0  # complete characters of the tokens that are not settled
        self._search = StopSearch(self.stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._search.stopped

    def push(self, token: int) -> str:
        """The text that this token lets out; `stopped` says whether it completed a stop string."""
        self._tokens.append(token)
        fresh = self._unsettled()
        complete = fresh.rstrip(_BROKEN)  # what is broken at the end may become a character with the next token
        before, self._ahead = self._ahead, len(complete)
        if complete and complete == fresh:
            self._context, self._settled, self._ahead = self._settled, len(self._tokens), 0
        self.fresh = complete[before:]
        shown = self._search.push(self.fresh)
        self.text += shown
        return shown

    def finish(self) -> str:
        """The text still held back: no more tokens follow."""
        self.fresh = ""
        if self.stopped:
            return ""
        self.fresh = self._unsettled()[self._ahead :]
        self._settled, self._ahead = len(self._tokens), 0
        shown = self._search.push(self.fresh) + self._search.finish()
        self.text += shown
        return shown

    def _unsettled(self) -> str:
        """The text of the tokens that are not settled."""
        before = self._decode(self._tokens[self._context : self._settled])
        both = self._decode(self._tokens[self._context :])
        if both.startswith(before):
            return both[len(before) :]
        # Byte fallback breaks a whole run of bytes for one that is wrong, also the characters that were shown of it.
        return self._decode(self._tokens[self._settled :])

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)) if tokens else ""


def context_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[int, ...]:
    """What a stream needs to know of the tokens before it: the last of them that is text by itself, if there is one."""
    for token in reversed(tokens):
        text = str(tokenizer.decode([token], skip_special_tokens=True))
        if text and _BROKEN not in text:
            return (token,)
    return ()


def encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    """The tokens of a text; `special` adds what the tokenizer puts around a text of its own."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionFault(
            f"character {error.start} is {text[error.start]!r}, half of a surrogate pair: expected text that UTF-8 can hold"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=special).ids)


def encode_parts(tokenizer: Tokenizer, prompt: str, continuation: str, special: bool) -> tuple[list[int], int]:
    """The tokens of a text, and which of them is the first that reaches into the continuation."""
    tokens = encode(tokenizer, prompt + continuation, special)
    ends = [end for _, end in tokenizer.encode(prompt + continuation, add_special_tokens=special).offsets]
    return tokens, next((place for place, end in enumerate(ends) if end > len(prompt)), len(tokens))
