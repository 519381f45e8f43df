"""Decoding: the options of one completion."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from spaceport.graphs.contract.draft_methods import LOOKUP_ONLY, DraftMethod
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.decode.draft import DraftConfig, Shape
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.option_fields import check_options, documented, option
from spaceport.runtime.sampling.sampler import Sampling

DEFAULT_LOOKUP = 16  # tokens; how many are drafted depends on their acceptance rate
MAX_THREADS = 16
_TREE_OPTIONS = ("draft_rows", "draft_siblings", "lookup")


@documented
@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Options of one completion; immutable, so several requests can share them.

    Those from `mask_slots` to `lookup`, `max_threads` and the prefix cache change the speed only, the tokens are the same.
    """

    parse_special: bool = option(
        False,
        "Read special tokens that the prompt spells out, such as `</s>`, as control tokens; else they stay text.",
        request=None,
    )
    max_tokens: int | None = option(
        None,
        "Maximum generated tokens from the prompt to the end of any thread; at most what `max_seq_len` leaves.",
        1,
        unset="up to `max_seq_len`",
        request="max_tokens",
    )
    max_total_tokens: int | None = option(
        None, "Maximum generated tokens of all threads together.", 1, unset="up to `max_slots`"
    )
    stop: str | Sequence[str] = option(
        (),
        "String, or several, at whose first match the text ends.",
        unset="none",
        metavar="TEXT",
        request="stop",
    )
    include_stop: bool = option(
        False,
        "End the text after the stop string instead of before it.",
        request="include_stop_str_in_output",
    )
    stop_token_ids: Sequence[int] = option(
        (),
        "Token ids that end a thread as an end token does; they are not part of the text.",
        unset="none",
        flag="--stop-token-id",
        request="stop_token_ids",
    )
    min_tokens: int = option(
        0,
        "Tokens from the prompt before which no end token and none of `stop_token_ids` is generated.",
        0,
        request="min_tokens",
    )
    ignore_eos: bool = option(
        False, "Generate end tokens like others and continue, for benchmarks.", request="ignore_eos"
    )
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.", request="skip_special_tokens")
    timeout: float | None = option(
        None,
        "Seconds from the submission until the completion ends with what it has.",
        unset="no limit",
        metavar="SECONDS",
        request=None,
    )

    mask_slots: int | None = option(
        None,
        "Maximum draft tokens from mask slots or heads for each thread in a step; 0 = none.",
        unset="the bundle's",  # as is the maximum
        metavar="K",
    )
    draft: Shape = option("tree", "Draft trees of candidates, or a chain with one candidate per position.")
    draft_rows: int | None = option(
        None,
        "Maximum rows of a thread in a step of a draft tree.",
        1,
        unset=f"{DraftConfig.rows}, or what all mask slots need",
    )
    draft_siblings: int | None = option(
        None,
        "Maximum candidates for one position of a draft tree.",
        1,
        unset=f"{DraftConfig.siblings}",
    )
    lookup: int | None = option(
        None,
        "Maximum draft tokens from prompt lookup (n-grams of prompt and text), and from phrases, in a step; 0 = none.",
        0,
        unset=f"{DEFAULT_LOOKUP}, or 0 in chains and with `mask_slots=0`",
    )

    fork: bool | None = option(
        None,
        "Let the text fork into parallel threads.",
        unset="the bundle's, without a grammar",
        request_default=False,
    )
    max_threads: int | None = option(
        None,
        "Maximum threads that decode at the same time; the others wait.",
        1,
        STEP_ROWS,
        unset=f"{MAX_THREADS}, or 1 where drafts are not exact",
    )
    max_depth: int = option(1, "Maximum number of forks between the root thread and any thread.", 0)

    prefix_cache: bool = option(
        True,
        "Reuse KV rows of requests with the same beginning, and leave those of this one for others.",
        flag=None,
    )
    cache_salt: str = option(
        "",
        "Reuse KV rows only of requests with the same salt.",
        most=256,
        unset="none",
        flag=None,
        request="cache_salt",
    )
    tenant: str = option(
        "",
        "On whose behalf the request runs: tenants who wait take turns, and have equal shares of queue and KV buffers.",
        unset="none",
        flag=None,
        request=None,
    )
    logprobs: int | None = option(
        None,
        "Number of most probable tokens to report for each token; 0 = only the token's own log probability.",
        0,
        unset="no log probabilities",
        request="top_logprobs",
    )
    trace: bool = option(False, "Record what each step did.", flag=None)

    sampling: Sampling = option(
        Sampling, "Temperature, filters, penalties, bans and seed.", unset="greedy decoding", flag=None, request=None
    )
    grammar: Grammar | None = option(
        None, "What the text matches; it cannot fork then.", unset="none", flag=None, request=None
    )

    stops: tuple[str, ...] = field(init=False)  # the stop strings

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops", self._stops())
        object.__setattr__(self, "stop_token_ids", self._stop_token_ids())
        check_options(self)
        if not isinstance(self.sampling, Sampling):
            raise OptionFault(f"sampling is {self.sampling!r}: expected a Sampling, such as Sampling(temperature=0.8)")
        if not isinstance(self.grammar, Grammar | None):
            raise OptionFault(f"grammar is {self.grammar!r}: expected a Grammar, such as Grammar(regex='[a-z]+')")
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

    def without_drafts(self) -> Decoding:
        """The same options for plain decoding: no draft source proposes tokens."""
        return replace(self, mask_slots=0, lookup=0)

    def threads(self, parallel: bool = True) -> int:
        """Maximum threads that decode at the same time, with a bundle whose threads are `parallel` by default."""
        return self.max_threads or (MAX_THREADS if parallel else 1)

    def draft_config(self, method: DraftMethod = LOOKUP_ONLY, default: bool = True) -> DraftConfig:
        """Draft limits with a bundle that drafts by this method, by default or only if this asks for drafts."""
        most = method.max_tokens if default or self.draft == "chain" else 0
        slots = most if self.mask_slots is None else self.mask_slots
        lookup = self.lookup if default or self.lookup is not None else 0
        if lookup is None:
            lookup = 0 if self.draft == "chain" or self.mask_slots == 0 else DEFAULT_LOOKUP
        rows = self.draft_rows or max(DraftConfig.rows, 1 + slots + method.layout.rows(slots))
        siblings = self.draft_siblings or DraftConfig.siblings
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
