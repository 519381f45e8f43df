"""Decoding: the options of one completion."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import NoneType

from spaceport.graphs.contract.draft_methods import LOOKUP_ONLY, DraftMethod
from spaceport.graphs.contract.exactness import DraftShape
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.decode.draft import DraftConfig, Shape
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling

DEFAULT_LOOKUP = 16  # tokens; how many are drafted depends on their acceptance rate
MAX_THREADS = 16
_MOST_SALT = 256  # characters

# Integer options with their minimum and maximum.
_INTEGERS: tuple[tuple[str, int | None, int | None], ...] = (
    ("max_tokens", 1, None),
    ("max_total_tokens", 1, None),
    ("mask_slots", None, None),  # the maximum depends on the bundle
    ("draft_rows", 1, None),
    ("draft_siblings", 1, None),
    ("lookup", 0, None),
    ("max_threads", 1, STEP_ROWS),
    ("max_depth", 0, None),
    ("logprobs", 0, None),
    ("min_tokens", 0, None),
)
_TREE_OPTIONS = ("draft_rows", "draft_siblings", "lookup")
_OPTIONAL = ("max_tokens", "max_total_tokens", "mask_slots", "max_threads", "logprobs", *_TREE_OPTIONS)
_TYPES: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("sampling", (Sampling,), "a Sampling"),
    ("grammar", (Grammar, NoneType), "a Grammar, such as Grammar(regex='[a-z]+')"),
    ("fork", (bool, NoneType), "True, False or None"),
    ("trace", (bool,), "True or False"),
    ("prefix_cache", (bool,), "True or False"),
    ("cache_salt", (str,), "text"),
    ("tenant", (str,), "text"),
    ("parse_special", (bool,), "True or False"),
    ("ignore_eos", (bool,), "True or False"),
    ("include_stop", (bool,), "True or False"),
    ("skip_special_tokens", (bool,), "True or False"),
    ("timeout", (int, float, NoneType), "a number of seconds above 0, or None"),
)


@dataclass(frozen=True)
class Decoding:
    """Options of one completion; immutable, so several requests can share them.

    What the completion says:

    - `max_tokens`: Maximum tokens from the prompt to the end of any thread; default None: up to `max_seq_len`.
    - `max_total_tokens`: Maximum tokens of all threads together; default None: up to `max_slots`.
    - `stop`: Stop string, or a sequence of them; the text ends before the first match; default: none.
    - `include_stop`: Whether the text ends after the stop string instead of before it; default False.
    - `skip_special_tokens`: Whether the text leaves special tokens out; the end token and `[Fork]` have no text in either
      case; default True.
    - `stop_token_ids`: Token ids that end a thread as an end token does; they are not part of the text; default: none.
    - `min_tokens`: Tokens from the prompt before which no thread ends with an end token or one of `stop_token_ids`: these
      are not generated before; stop strings and limits still end it; default 0.
    - `ignore_eos`: Whether to generate end tokens like others and continue, for benchmarks; default False.
    - `timeout`: Seconds from the submission until the completion ends with what it has; default None: no limit.
    - `sampling`: Temperature, filters, penalties, bans and seed; default: greedy decoding.
    - `grammar`: Regular expression or JSON schema that the completion matches; it cannot fork then; default: none.
    - `fork`: Whether the text may fork into threads; default None: if the bundle forks by default and there is no grammar.
    - `max_depth`: Maximum number of forks between the root thread and any thread; default 1.
    - `parse_special`: Whether special tokens that the prompt spells out become control tokens; default False: they stay
      text, so that users cannot write control tokens into messages.

    How fast it is generated; the tokens are the same:

    - `mask_slots`: Maximum draft tokens from mask slots, or from the heads of a bundle with heads, for each thread in a
      step, 0 = none; default None: the bundle's.
    - `draft`: "tree", or "chain" as published by SPACE; default "tree".
    - `draft_rows`: Maximum rows of a thread in a step of a draft tree; default None: 24, or as many as the candidates of
      all mask slots and all mask slots behind one of them need.
    - `draft_siblings`: Maximum candidates for one position of a draft tree; default None: 3, or 1 where the bundle's
      drafts are exact in one line only.
    - `lookup`: Maximum draft tokens from prompt lookup in a step, 0 = none; default None: 16 in trees, 0 in chains and
      with `mask_slots=0`.
    - `prefix_cache`: Whether the request reuses the KV rows of others with the same beginning and leaves its own for
      others, in a runtime with a prefix cache; default True.
    - `cache_salt`: Text that separates requests in the prefix cache: only those with the same salt reuse each other's
      rows; default "".
    - `tenant`: On whose behalf the request runs: those who wait take turns, and have equal shares of queue and KV buffers;
      default "".
    - `max_threads`: Maximum threads of the request that decode at the same time, the others wait; default None: 16, or 1
      with 8-bit activations of one limb (`int8`).

    What is reported with it:

    - `logprobs`: Number of most probable tokens to report for each token, 0 = only the token's own log probability;
      default None: no log probabilities.
    - `trace`: Whether to record what each step did; default False.
    """

    max_tokens: int | None = None
    max_total_tokens: int | None = None
    stop: str | Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    timeout: float | None = None
    sampling: Sampling = field(default_factory=Sampling)
    grammar: Grammar | None = None

    mask_slots: int | None = None
    draft: Shape = "tree"
    draft_rows: int | None = None
    draft_siblings: int | None = None
    lookup: int | None = None

    fork: bool | None = None
    prefix_cache: bool = True
    cache_salt: str = ""
    tenant: str = ""
    max_threads: int | None = None
    max_depth: int = 1
    parse_special: bool = False

    logprobs: int | None = None
    trace: bool = False

    stops: tuple[str, ...] = field(init=False)  # the stop strings

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops", self._stops())
        object.__setattr__(self, "stop_token_ids", self._stop_token_ids())
        for name, kind, kinds in _TYPES:
            if not isinstance(given := getattr(self, name), kind):
                raise OptionFault(f"{name} is {given!r}: expected {kinds}")
        for name, least, most in _INTEGERS:
            self._check_integer(name, least, most)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionFault(f"min_tokens is {self.min_tokens}: expected at most max_tokens, {self.max_tokens}")
        if self.ignore_eos and self.grammar is not None:
            raise OptionFault("ignore_eos is True with a grammar, which ends with an end token: leave one of them out")
        if self.timeout is not None and not self.timeout > 0:
            raise OptionFault(f"timeout is {self.timeout}: expected a number of seconds above 0")
        for name in _TREE_OPTIONS:
            if self.draft == "chain" and (given := getattr(self, name)):
                raise OptionFault(
                    f"{name} is {given} with draft='chain': it applies to draft='tree' only: leave one of them out"
                )
        if self.grammar is not None and self.fork:
            raise OptionFault(
                "fork is True with a grammar: a constrained completion cannot fork: leave one of them out"
            )
        if len(self.cache_salt) > _MOST_SALT:
            raise OptionFault(f"cache_salt has {len(self.cache_salt)} characters: expected at most {_MOST_SALT}")
        self.draft_config()

    def _stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence) or not all(isinstance(one, str) and one for one in stops):
            raise OptionFault(f"stop is {self.stop!r}: expected strings of at least one character")
        return tuple(stops)

    def _stop_token_ids(self) -> tuple[int, ...]:
        given = self.stop_token_ids
        if (
            isinstance(given, Sequence)
            and not isinstance(given, str | bytes)
            and all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in given)
        ):
            return tuple(given)
        raise OptionFault(f"stop_token_ids is {reprlib.repr(given)}: expected token ids, such as (2,)")

    def _check_integer(self, name: str, least: int | None, most: int | None) -> None:
        given = getattr(self, name)
        if given is None and name in _OPTIONAL:
            return
        if not isinstance(given, int) or isinstance(given, bool):
            raise OptionFault(f"{name} is {given!r}: expected a whole number")
        if least is not None and (given < least or (most is not None and given > most)):
            raise OptionFault(
                f"{name} is {given}: expected {f'at least {least}' if most is None else f'{least} to {most}'}"
            )

    def threads(self, parallel: bool = True) -> int:
        """Maximum threads that decode at the same time, with a bundle whose threads are `parallel` by default."""
        return self.max_threads or (MAX_THREADS if parallel else 1)

    def draft_config(self, method: DraftMethod = LOOKUP_ONLY, exact: DraftShape = "tree") -> DraftConfig:
        """Draft limits with a bundle that drafts by this method; its drafts are exact in this shape."""
        most = 0 if exact == "none" and self.draft == "tree" else method.max_tokens
        slots = most if self.mask_slots is None else self.mask_slots
        lookup = 0 if exact == "none" and self.lookup is None else self.lookup
        if lookup is None:
            lookup = 0 if self.draft == "chain" or self.mask_slots == 0 else DEFAULT_LOOKUP
        rows = self.draft_rows or max(DraftConfig.rows, 1 + slots + method.layout.rows(slots))
        siblings = self.draft_siblings or (DraftConfig.siblings if exact == "tree" else 1)
        masks, heads = (0, slots) if method.predictor == "head" else (slots, 0)
        return DraftConfig(
            masks,
            self.draft,
            rows,
            siblings,
            lookup,
            mask_layout=method.layout,
            heads=heads,
            grammar=self.grammar is not None,
        )
