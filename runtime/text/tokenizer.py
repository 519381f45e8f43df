"""A bundle's tokenizer: text to tokens, streamed tokens to text, and the first stop string in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import Encoding, Tokenizer, models

from spaceport.graphs.contract.faults import OptionFault, PanicsContained, is_panic, raise_panic
from spaceport.graphs.contract.manifest import TOKENIZER_FILE
from spaceport.graphs.contract.tokenizer_bounds import UnsafeTokenizer, checked
from spaceport.runtime.bundle import Bundle, BundleError

_LONG = 512  # characters; tokenizers encodes a batch without Python's global lock, so other OS threads go on
_BROKEN = "\ufffd"  # replacement character for bytes that are not a complete character
_CACHED_WORDS = 1000
_EXPECTED = "expected the tokenizer of a published model; export the checkpoint again, or do not use this bundle"
_MOST_WORD = 256  # characters of a word that WordPiece searches, in a time of the third power


def open_tokenizer(bundle: Bundle) -> Tokenizer:
    """The bundle's tokenizer; raises if it is not readable, or if it could make little text into very much."""
    file = bundle.path / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_str(checked(bundle.read(TOKENIZER_FILE)))
        if isinstance(tokenizer.model, models.WordPiece) and tokenizer.model.max_input_chars_per_word > _MOST_WORD:
            most = tokenizer.model.max_input_chars_per_word
            raise UnsafeTokenizer(f"max_input_chars_per_word is {most}, {_MOST_WORD} are allowed")
        return with_small_cache(tokenizer)
    except UnsafeTokenizer as error:
        raise BundleError(f"{file}: {error}: {_EXPECTED}") from error
    except BaseException as error:  # tokenizers raises Exception itself, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise BundleError(f"{file}: not a readable tokenizer: {error}") from error


def with_small_cache(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with a cache of few words.

    By default it stores 10,000 words of up to 256 characters with their tokens. Prompts of ever new words fill it with 60 MB.
    """
    resize = getattr(tokenizer.model, "_resize_cache", None)  # of the models that have a cache
    if resize is not None:
        resize(_CACHED_WORDS)
    return tokenizer


class _Ending:
    """A longest end of a text that is the beginning of a stop string: a state of an Aho-Corasick automaton."""

    __slots__ = ("length", "longer", "shorter", "stop")

    def __init__(self, length: int) -> None:
        self.length = length  # in characters
        self.longer: dict[str, _Ending] = {}  # by the next character
        self.shorter: _Ending | None = None  # the next shorter end that is a beginning; None: this one is empty
        self.stop = 0  # characters of the longest stop string that it ends with; 0: none

    def after(self, character: str) -> _Ending:
        """The longest end after one more character."""
        ending = self
        while character not in ending.longer:
            if ending.shorter is None:
                return ending
            ending = ending.shorter
        return ending.longer[character]


@lru_cache(maxsize=16)
def _automaton_of(stops: tuple[str, ...]) -> _Ending:
    """The empty end of the automaton of these stop strings, built once for all threads of a request."""
    empty = _Ending(0)
    for stop in stops:
        ending = empty
        for character in stop:
            if character not in ending.longer:
                ending.longer[character] = _Ending(ending.length + 1)
            ending = ending.longer[character]
        ending.stop = len(stop)
    waiting = deque([empty])
    while waiting:  # shortest first
        ending = waiting.popleft()
        for character, longer in ending.longer.items():
            longer.shorter = empty if ending.shorter is None else ending.shorter.after(character)
            longer.stop = longer.stop or longer.shorter.stop
            waiting.append(longer)
    return empty


class StopSearch:
    """Passes text on up to the first stop string, and holds back what may be the start of one.

    With `include_stop`, the text ends after the first stop string instead of before it.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self.held = ""  # text that may be the start of a stop string
        self.stopped = False
        self._empty = self._ending = _automaton_of(stops)
        self._include_stop = include_stop

    def push(self, text: str) -> str:
        """Text that can be shown now; `stopped` is then whether a stop string is complete."""
        if not self.held and self._empty.longer.keys().isdisjoint(text):
            return text
        ending, all_text = self._ending, self.held + text
        for end, character in enumerate(text, len(self.held) + 1):
            ending = ending.after(character)
            if ending.stop:  # the first one to be complete, so that token boundaries do not matter
                self.stopped, self.held, self._ending = True, "", self._empty
                return all_text[: end if self._include_stop else end - ending.stop]
        cut = len(all_text) - ending.length
        self.held, self._ending = all_text[cut:], ending
        return all_text[:cut]

    def finish(self) -> str:
        """Text that is still held back, at the end of the text."""
        rest, self.held, self._ending = self.held, "", self._empty
        return rest


@dataclass
class TextStream:
    """Decodes tokens one by one; holds back incomplete characters."""

    tokenizer: Tokenizer
    context: tuple[int, ...] = ()  # tokens before the text; without them a decoder treats the first token differently
    skip_special: bool = True  # whether special tokens have no text

    def __post_init__(self) -> None:
        self._tokens = list(self.context)
        self._settled = len(self._tokens)  # number of tokens whose text is complete
        self._again = 0  # index of the first token to decode again, since a decoder treats the first one differently
        self._ahead = 0  # complete characters of tokens that are not settled

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._tokens.append(token)
        text = self._unsettled()
        complete = text.rstrip(_BROKEN)  # the next token may complete a character at the end
        before, self._ahead = self._ahead, len(complete)
        if complete and complete == text:
            self._again, self._settled, self._ahead = self._settled, len(self._tokens), 0
        return complete[before:]

    def finish(self) -> str:
        """Text that is still held back, after the last token."""
        text = self._unsettled()[self._ahead :]
        self._settled, self._ahead = len(self._tokens), 0
        return text

    def _unsettled(self) -> str:
        """The text of the tokens that are not settled."""
        before = self._decode(self._tokens[self._again : self._settled])
        both = self._decode(self._tokens[self._again :])
        if both.startswith(before):
            return both[len(before) :]
        # With byte fallback, one invalid byte turns a whole run of bytes invalid, also characters that were shown already.
        return self._decode(self._tokens[self._settled :])

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode(self.tokenizer, tokens, self.skip_special) if tokens else ""


def context_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[int, ...]:
    """Context of a stream after these tokens: the last token that is text by itself, if there is one."""
    for token in reversed(tokens):
        text = decode(tokenizer, [token])
        if text and _BROKEN not in text:
            return (token,)
    return ()


def decode(tokenizer: Tokenizer, tokens: Sequence[int], skip_special: bool = True) -> str:
    """The text of tokens, by default without special tokens."""
    try:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special))
    except BaseException as error:
        raise_panic(error, f"tokenizers decoded {len(tokens)} tokens")
        raise


def encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    """The tokens of a text, control tokens included; `special` adds the tokenizer's special tokens around it."""
    return list(encoding_of(tokenizer, text, special).ids)


def encoding_of(tokenizer: Tokenizer, text: str, special: bool) -> Encoding:
    """The tokens of a text with their offsets; `special` adds the tokenizer's special tokens around it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionFault(
            f"character {error.start} is {text[error.start]!r}, half of a surrogate pair: expected text that UTF-8 can encode"
        ) from error
    with PanicsContained(f"tokenizers encoded a text of {len(text)} characters"):
        if len(text) > _LONG:
            return tokenizer.encode_batch([text], add_special_tokens=special)[0]
        return tokenizer.encode(text, add_special_tokens=special)
