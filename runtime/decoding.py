"""Decoding: how a text is to be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import NoneType

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import ExactDrafts
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.decode.draft import Drafting, Shape
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling

_LONGEST_STOP = 1000  # characters; the beginnings of a stop string are held for each thread
_LOOKUP = 16  # tokens; how many of them are drafted depends on how often they are right
MAX_THREADS = 16

# Whole numbers, the least and the most that each may be, and those that may be left open.
_NUMBERS: tuple[tuple[str, int | None, int | None], ...] = (
    ("max_tokens", 1, None),
    ("max_total_tokens", 1, None),
    ("mask_slots", None, None),  # how many there may be depends on the bundle
    ("draft_rows", 1, None),
    ("draft_siblings", 1, None),
    ("lookup", 0, None),
    ("max_threads", 1, STEP_ROWS),
    ("max_depth", 0, None),
    ("logprobs", 0, None),
)
_OF_TREES = ("draft_rows", "draft_siblings", "lookup")
_OPEN = ("max_tokens", "max_total_tokens", "mask_slots", "max_threads", "logprobs", *_OF_TREES)
_KINDS: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("sampling", (Sampling,), "a Sampling"),
    ("grammar", (Grammar, NoneType), "a Grammar, such as Grammar(regex='[a-z]+')"),
    ("fork", (bool, NoneType), "True, False or None"),
    ("trace", (bool,), "True or False"),
    ("timeout", (int, float, NoneType), "seconds, more than 0"),
)


@dataclass(frozen=True)
class Decoding:
    """What is asked for beside a prompt. Drafts and threads change how long it takes; the rest may change what it says."""

    # Longest way from the prompt to the end of any thread; none: as long as there is room.
    max_tokens: int | None = None
    max_total_tokens: int | None = None  # of all threads together; a safety net, see `Completion.ending`
    stop: str | Sequence[str] = ()  # the text ends before the first of these
    timeout: float | None = None  # seconds until it ends where it is
    sampling: Sampling = field(default_factory=Sampling)  # the likeliest tokens, unless told otherwise
    grammar: Grammar | None = None  # what the text has to be like; it does not fork then

    mask_slots: int | None = None  # most tokens that mask slots draft for each thread; none: as many as the bundle has
    draft: Shape = "tree"
    draft_rows: int | None = None  # most rows of a thread in a step; none: 24, and as many as they take in a chain
    # Most candidates for one place; none: 3, and one in a chain or where a bundle's drafts are exact in one line only.
    draft_siblings: int | None = None
    # Most tokens that are looked up in the text so far; none: some in trees, unless there are to be no mask slots.
    lookup: int | None = None

    fork: bool | None = None  # whether the text may fork; none: if the model can
    # Most threads that write at the same time, the others wait; none: 16, and one where drafts are exact in one line only.
    max_threads: int | None = None
    max_depth: int = 1  # forks on the way to a thread

    logprobs: int | None = None  # tell how likely each token was, and so many of the likeliest; none: neither
    trace: bool = False  # note what every step did

    stops: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops", self._stops())
        for name, kind, kinds in _KINDS:
            if not isinstance(given := getattr(self, name), kind):
                raise OptionFault(f"{name} is {given!r}: expected {kinds}")
        for name, least, most in _NUMBERS:
            self._hold(name, least, most)
        if self.timeout is not None and not self.timeout > 0:
            raise OptionFault(f"timeout is {self.timeout}: expected seconds, more than 0")
        for name in _OF_TREES:
            if self.draft == "chain" and (given := getattr(self, name)):
                raise OptionFault(f"{name} is {given} with draft chain: expected it with draft tree: leave one out")
        if self.grammar is not None and self.fork:
            raise OptionFault(
                "grammar and fork are both asked for: a constrained completion cannot fork: leave one of them out"
            )
        self.drafting(0)

    def _stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence) or not all(isinstance(one, str) and one for one in stops):
            raise OptionFault(f"stop is {self.stop!r}: expected strings of at least one character")
        if (longest := max(map(len, stops), default=0)) > _LONGEST_STOP:
            raise OptionFault(f"a stop string has {longest} characters: expected at most {_LONGEST_STOP}")
        return tuple(stops)

    def _hold(self, name: str, least: int | None, most: int | None) -> None:
        given = getattr(self, name)
        if given is None and name in _OPEN:
            return
        if not isinstance(given, int) or isinstance(given, bool):
            raise OptionFault(f"{name} is {given!r}: expected a whole number")
        if least is not None and (given < least or (most is not None and given > most)):
            raise OptionFault(
                f"{name} is {given}: expected {f'at least {least}' if most is None else f'{least} to {most}'}"
            )

    def threads(self, exact: ExactDrafts = "tree") -> int:
        """How many threads write at the same time with a bundle that has such exact drafts."""
        return self.max_threads or (MAX_THREADS if exact == "tree" else 1)

    def drafting(self, most: int, exact: ExactDrafts = "tree") -> Drafting:
        """How threads draft with a bundle that has `most` mask slots and drafts that are exact in this shape."""
        slots = most if self.mask_slots is None else self.mask_slots
        lookup = self.lookup
        if lookup is None:
            lookup = 0 if self.draft == "chain" or self.mask_slots == 0 else _LOOKUP
        rows = self.draft_rows or Drafting.rows
        siblings = self.draft_siblings or (Drafting.siblings if exact == "tree" else 1)
        return Drafting(slots, self.draft, rows, siblings, lookup)
