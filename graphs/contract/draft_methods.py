"""Draft methods: how a model drafts its own next tokens, how often they were accepted, and how scores are corrected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date
from itertools import accumulate, pairwise
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField, between, read

Group = Literal["causal", "block"]
GROUPS: tuple[Group, ...] = get_args(Group)

Predictor = Literal["mask", "head"]
PREDICTOR_NAMES: dict[Predictor, str] = {"mask": "mask slot", "head": "head"}  # as users read them

MAX_MASK_SLOTS = 64
UNKNOWN, LOOKUP = "unknown", "lookup"  # names of a method that no file names, and of prompt lookup alone

MAX_DEPTHS = 64
_MATCHES = (2, 3, 4)  # matching tokens before a token of prompt lookup
_COPIED = (4, 16)  # accepted tokens of prompt lookup in a row before it: few, many
LOOKUP_KINDS = len(_MATCHES) + len(_COPIED)
_MAX_DATA = 200  # characters
_DIGITS = 4

CORRECTION_FILE = "draft_correction.npy"
CANDIDATES = 32  # most probable tokens of a mask slot, whose scores are corrected


def drafts_in_words(count: int, predictor: str) -> str:
    """What drafts, such as "3 mask slots"."""
    return f"{count} {predictor}{'s' * (count > 1)}" if count else "prompt lookup"


@dataclass(frozen=True)
class MaskLayout:
    """What the mask rows of a group predict and see; all of them see the text before the group."""

    shift: bool = True  # a mask row predicts the token after its position; False: the one at its position
    group: Group = "causal"  # a mask row sees the mask rows of its group before it; block: all of them

    @property
    def lead(self) -> int:
        """Mask rows of a group before those of its mask slots.

        Without shift it is one: the mask row at the next position predicts what the token's own row decides.
        """
        return 0 if self.shift else 1

    def rows(self, mask_slots: int) -> int:
        """Mask rows of a group with this number of mask slots."""
        if self.shift or not mask_slots:  # first, since a step asks for the rows of each node several times
            return mask_slots
        return mask_slots + self.lead


CAUSAL = MaskLayout()


@dataclass(frozen=True)
class DraftAcceptance:
    """Acceptance rates of one model at one temperature."""

    # By depth: share of the steps in which mask slots or heads predicted at least that many tokens.
    rates: tuple[float, ...]
    # of a prompt-lookup token behind accepted ones, by kind of match; empty: not measured
    lookup: tuple[float, ...] = ()
    temperature: float = 0.0
    tokens: int = 0  # generated tokens that were measured
    data: str = ""  # file name or description of the held-out text
    date: str = ""  # ISO day of the measurement; empty: not known

    def __post_init__(self) -> None:
        if len(self.rates) > MAX_DEPTHS:
            raise ValueError(f"rates has {len(self.rates)} depths: expected at most {MAX_DEPTHS}")
        if len(self.lookup) not in (0, LOOKUP_KINDS):
            raise ValueError(f"lookup has {len(self.lookup)} rates: expected {LOOKUP_KINDS} or none")
        for name, rates in (("rates", self.rates), ("lookup", self.lookup)):
            if not all(0 <= rate <= 1 for rate in rates):
                raise ValueError(f"{name} is {list(rates)}: expected rates from 0 to 1")
        if any(later > rate for rate, later in pairwise(self.rates)):
            raise ValueError(f"rates is {list(self.rates)}: expected rates that do not increase with depth")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: expected a number of at least 0")
        if len(self.data) > _MAX_DATA or not self.data.isprintable() or set(self.data) & set("/\\"):
            raise ValueError(
                f"data is {self.data!a:.80}: expected a file name or up to {_MAX_DATA} characters, no path"
            )
        if self.date and not _is_day(self.date):
            raise ValueError(f"date is {self.date!a:.80}: expected a day such as 2026-01-31")

    def __str__(self) -> str:
        """The rates in one line, such as "71 52 33 % by depth; lookup 30 45 60 85 95 %; 1,234 tokens of x.jsonl"."""
        drafts = _shares(self.rates) + " by depth" if self.rates else ""
        lookup = "lookup " + _shares(self.lookup) if self.lookup else ""
        source = ", ".join(filter(None, (f"{self.tokens:,} tokens of {self.data or 'unnamed text'}", self.date)))
        return "; ".join(filter(None, (drafts, lookup, source)))


def measured_acceptance(
    shares: Iterable[float | None], tokens: int, data: str, day: date, lookup: Iterable[float] = ()
) -> DraftAcceptance:
    """The rates of a greedy measurement, from the shares of its steps by depth; None: no step reached that depth.

    Fewer steps reach later depths, so a later share may be higher by chance: it then counts as the one before.
    """
    known = (share for share in shares if share is not None)
    printable = "".join(letter for letter in data if letter.isprintable() and letter not in "/\\")
    return DraftAcceptance(
        rates=tuple(round(share, _DIGITS) for share in accumulate(known, min)),
        lookup=tuple(round(rate, _DIGITS) for rate in lookup),
        tokens=tokens,
        data=printable[:_MAX_DATA],
        date=day.isoformat(),
    )


def lookup_kind(equal: int, copied: int) -> int:
    """Index into `lookup` of a prompt-lookup token, by the matching tokens and the accepted lookup tokens before it."""
    if copied >= _COPIED[0]:
        return len(_MATCHES) + (copied >= _COPIED[1])
    return max(0, min(equal, _MATCHES[-1]) - _MATCHES[0])


def with_acceptance(known: Iterable[DraftAcceptance], measured: DraftAcceptance) -> tuple[DraftAcceptance, ...]:
    """Known measurements with a new one, which replaces that of its temperature; by temperature."""
    others = (rates for rates in known if rates.temperature != measured.temperature)
    return tuple(sorted((*others, measured), key=lambda rates: rates.temperature))


def draft_acceptances(entry: JsonField) -> tuple[DraftAcceptance, ...]:
    """The measurements in parsed JSON, which are of different temperatures."""
    measured: tuple[DraftAcceptance, ...] = entry.each(lambda rates: read(rates, DraftAcceptance))
    temperatures = [rates.temperature for rates in measured]
    twice = [temperature for temperature in temperatures if temperatures.count(temperature) > 1]
    if twice:
        entry.fail(f"has temperature {twice[0]:g} twice: expected one entry for each temperature")
    return measured


@dataclass(frozen=True)
class DraftMethod:
    """How a model drafts its own next tokens, besides prompt lookup, which needs nothing of the model."""

    # As `spaceport adopt` names it, such as "uno", or as the checkpoint does.
    name: str = LOOKUP
    # Published weights with which the model drafts, as far as known.
    adapter: str | None = None
    # What predicts the tokens after the next one: mask rows behind a token by their own logits, or heads by further
    # lines of logits of the token's own row.
    predictor: Predictor = "mask"
    # Maximum draft tokens behind a token: mask slots or heads.
    max_tokens: Annotated[int, between(0, MAX_MASK_SLOTS)] = 0
    # What mask rows predict and see.
    layout: MaskLayout = CAUSAL
    # What drafts add to the base model: the entry of each mechanism in sar_config.json, by its name.
    mechanisms: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Measured rates, one entry for each temperature.
    acceptance: Annotated[tuple[DraftAcceptance, ...], draft_acceptances] = ()

    @property
    def mask_slots(self) -> int:
        """Maximum mask slots behind a token."""
        return self.max_tokens if self.predictor == "mask" else 0

    @property
    def heads(self) -> int:
        """Number of draft heads, each with a line of logits."""
        return self.max_tokens if self.predictor == "head" else 0

    @property
    def mask_rows(self) -> int:
        """Maximum mask rows behind a token."""
        return self.layout.rows(self.mask_slots)


LOOKUP_ONLY = DraftMethod()


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _shares(rates: Iterable[float]) -> str:
    return " ".join(f"{100 * rate:.0f}" for rate in rates) + " %"


class CorrectionTables(NamedTuple):
    """Vectors of all tokens, each V x rank: the correction of a candidate is a product of two of them."""

    before: NDArray[np.float16]  # of the token before the candidate
    after: NDArray[np.float16]  # of the candidate


def read_array(file: BinaryIO, name: str, expected: str, fits: Callable[[NDArray[Any]], bool]) -> NDArray[Any]:
    """The array in a file of a bundle; raises if it is not the expected one."""
    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputFault(f"{name} is not an array: {error}; export the checkpoint again") from error
    if not isinstance(array, np.ndarray) or not fits(array):
        got = f"{getattr(array, 'dtype', '?')} {getattr(array, 'shape', '?')}"
        raise InputFault(f"{name} holds {got}: expected {expected}; export the checkpoint again")
    return array


def write_tables(file: BinaryIO, tables: CorrectionTables) -> None:
    """Write tables to a file: one array, 2 x V x rank."""
    np.save(file, np.stack(tables), allow_pickle=False)


def read_tables(file: BinaryIO, vocab_size: int) -> CorrectionTables:
    """The tables in a file; raises if they are not those of a model with this vocabulary."""
    tables = read_array(
        file,
        CORRECTION_FILE,
        f"float16 (2, {vocab_size}, rank)",
        lambda tables: tables.dtype == np.float16 and tables.shape[:-1] == (2, vocab_size),
    )
    if not np.isfinite(tables).all():
        raise InputFault(f"{CORRECTION_FILE} holds numbers that are not finite: export the checkpoint again")
    return CorrectionTables(tables[0], tables[1])
