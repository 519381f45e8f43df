"""Decoding: how a text is to be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spaceport.graphs.faults import OptionFault
from spaceport.runtime.draft import Drafting, Shape
from spaceport.runtime.grammar import Form
from spaceport.runtime.request import STEP_ROWS
from spaceport.runtime.sampling import Sampling

_LOOKUP = 6  # tokens; more are rarely all right, fewer waste what is free


@dataclass(frozen=True)
class Decoding:
    """What is asked for beside a prompt. Drafts and threads change how long it takes; the rest may change what it says."""

    # Longest way from the prompt to the end of any thread; none: as long as there is room.
    max_tokens: int | None = None
    max_total_tokens: int | None = None  # of all threads together; a safety net, see `Completion.ending`
    stop: str | Sequence[str] = ()  # the text ends before the first of these
    timeout: float | None = None  # seconds until it ends where it is
    sampling: Sampling = field(default_factory=Sampling)  # the likeliest tokens, unless told otherwise
    form: Form | None = None  # what the text has to be like; it does not fork then

    mask_slots: int | None = None  # most tokens that mask slots draft for each thread; none: as many as the bundle has
    draft: Shape = "tree"
    draft_rows: int = Drafting.rows
    draft_siblings: int = Drafting.siblings
    # Most tokens that are looked up in the text so far; none: some in trees, unless there are to be no mask slots.
    lookup: int | None = None

    fork: bool | None = None  # whether the text may fork; none: if the model can
    max_threads: int = 16  # that write at the same time; the others wait, and write the same
    max_depth: int = 1  # forks on the way to a thread

    logprobs: int | None = None  # tell how likely each token was, and so many of the likeliest; none: neither
    trace: bool = False  # note what every step did

    stops: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(one, str) and one for one in stops):
            raise OptionFault(f"stop is {self.stop!r}: expected strings of at least one character")
        object.__setattr__(self, "stops", stops)
        for name, least in (("max_tokens", 1), ("max_total_tokens", 1), ("max_depth", 0), ("logprobs", 0)):
            given = getattr(self, name)
            if given is not None and given < least:
                raise OptionFault(f"{name} is {given}: expected at least {least}")
        if not 1 <= self.max_threads <= STEP_ROWS:
            raise OptionFault(f"max_threads is {self.max_threads}: expected 1 to {STEP_ROWS}")
        if self.timeout is not None and not self.timeout > 0:
            raise OptionFault(f"timeout is {self.timeout}: expected seconds, more than 0")
        if self.draft == "chain" and self.lookup:
            raise OptionFault(
                f"lookup is {self.lookup} with draft chain: looked-up tokens need draft tree: leave one out"
            )
        if self.form is not None and self.fork:
            raise OptionFault(
                "fork is True with a form: expected one of them, since a form is one of a text in one line"
            )
        self.drafting(0)

    def drafting(self, most: int) -> Drafting:
        """How threads draft with a bundle that has so many mask slots."""
        slots = most if self.mask_slots is None else self.mask_slots
        lookup = self.lookup
        if lookup is None:
            lookup = 0 if self.draft == "chain" or self.mask_slots == 0 else _LOOKUP
        return Drafting(slots, self.draft, self.draft_rows, self.draft_siblings, lookup)
