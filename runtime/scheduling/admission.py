"""Admission of requests: prompts and options are checked and become sequences, on the caller's OS thread or others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import monotonic
from typing import cast

from tokenizers import Tokenizer

from spaceport.graphs.contract.draft_methods import CorrectionTables
from spaceport.graphs.contract.exactness import Exactness
from spaceport.graphs.contract.faults import OptionFault, PanicsContained
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.decode.draft import Phrases
from spaceport.runtime.decode.planner import DraftPlanner, drafter_for
from spaceport.runtime.decode.sequence import EventLog, TokenSelector
from spaceport.runtime.decode.sequence_group import Observer, SequenceGroup
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Engine
from spaceport.runtime.isolation import DeadlinePassed, HelperPool
from spaceport.runtime.limits import DEFAULT_LIMITS, Limits
from spaceport.runtime.sampling.choice import Bans, Corrected
from spaceport.runtime.sampling.grammar import GrammarCompiler, Vocabulary, open_vocabulary
from spaceport.runtime.sampling.logprobs import Logprobs, Scoring, Speller, check_top
from spaceport.runtime.sampling.sampler import Sampling, check_ids, chooser, seeded
from spaceport.runtime.scheduling.request import Echo, Outcome, Output, Request
from spaceport.runtime.scheduling.worker import RuntimeClosed, Worker
from spaceport.runtime.text.messages import ChatPrompt, shown
from spaceport.runtime.text.prompt import Prompt, PromptEncoder, TooManyTokens
from spaceport.runtime.text.transcript import Transcript
from spaceport.runtime.trace import Trace

_log = logging.getLogger("spaceport.runtime")

_OS_THREADS = 2  # that prepare requests, and again for those that need a helper process
_QUICK_IDS = 4096  # token ids that need no OS thread of their own to be checked


@dataclass(frozen=True)
class Admission:
    """The limits of requests on one engine."""

    bundle: Bundle
    tokenizer: Tokenizer
    engine: Engine
    max_seq_len: int  # maximum tokens of a thread, prompt included
    max_slots: int  # maximum tokens of a prompt and all its threads
    planner: DraftPlanner
    exactness: Exactness
    limits: Limits = DEFAULT_LIMITS
    correction: CorrectionTables | None = None  # of the candidates of mask slots
    phrases: Phrases | None = None
    prefix_cache: bool = False  # whether requests reuse rows of others
    helpers: HelperPool = field(default_factory=HelperPool)  # for templates and grammars that may take long
    grammars: GrammarCompiler = field(init=False)  # compiled grammars of the bundle's vocabulary

    def __post_init__(self) -> None:
        object.__setattr__(self, "grammars", GrammarCompiler(self._open_vocabulary, self.helpers))

    def close(self) -> None:
        """End the helper processes."""
        self.helpers.close()

    @cached_property
    def prompts(self) -> PromptEncoder:
        """Encoder of prompts."""
        return PromptEncoder(self.bundle, self.tokenizer, self.helpers)

    @cached_property
    def speller(self) -> Speller:
        """Text and bytes of single tokens, for log probabilities."""
        return Speller(self.tokenizer)

    def tokens_of(
        self, prompt: Prompt, parse_special: bool, deadline: float | None = None, most: int | None = None
    ) -> list[int]:
        """The tokens of a prompt within the limits; one that surely has more than `most` is not tokenized as a whole."""
        self.limits.check_prompt(prompt)
        ids = self.prompts.tokens_of(prompt, parse_special, deadline=deadline, most=most)
        self.limits.check_tokens(len(ids))
        return ids

    def check_decoding(self, decoding: Decoding) -> None:
        """Raise for options that are no `Decoding`, or are beyond the limits."""
        if not isinstance(decoding, Decoding):
            raise OptionFault(f"decoding is {shown(decoding)}: expected a Decoding, such as Decoding(max_tokens=64)")
        self.limits.check_decoding(decoding)

    def isolates(self, request: Request) -> bool:
        """Whether a request needs a helper process to be prepared."""
        grammar, prompt = request.decoding.grammar, request.prompt
        if grammar is not None and self.grammars.isolates(grammar):
            return True
        if isinstance(prompt, str | bytes) or prompt is None:
            return False
        chat = isinstance(prompt, ChatPrompt) or (
            isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        )
        return chat and self.prompts.template.isolates

    def prepare(self, request: Request) -> SequenceGroup | None:
        """The sequences of a request, with enough KV slots for all its limits; None if it has ended.

        Its output is set as well; invalid prompts and options raise.
        """
        prompt = cast("Prompt", request.prompt)
        if not request.begin():
            return None
        if request.deadline is not None and monotonic() >= request.deadline:
            raise DeadlinePassed("the deadline passed before the prompt was tokenized")
        self.bundle.require_unchanged()
        return (
            self._completion(request, prompt) if request.echo is None else self._scoring(request, prompt, request.echo)
        )

    def _completion(self, request: Request, prompt: Prompt) -> SequenceGroup:
        """The sequences of a request that generates a completion."""
        decoding, manifest, deadline = request.decoding, self.bundle.manifest, request.deadline
        try:
            ids = self.tokens_of(prompt, decoding.parse_special, deadline, most=self.max_seq_len)
        except TooManyTokens as error:
            raise self._too_long(f"more than {error.count}", "prompt") from error
        sampling = seeded(decoding.sampling)
        max_length = self._max_length(ids, decoding.max_tokens)
        fork = self._forks(decoding)
        self._check_mask_slots(decoding.mask_slots)
        draft_config = decoding.draft_config(manifest.drafts, self.exactness.allows_drafts)
        draft_config = replace(draft_config, phrases=self.phrases)
        decoding.sampling.check(manifest.signature.vocab_size)
        check_ids("stop_token_ids", decoding.stop_token_ids, manifest.signature.vocab_size)
        max_total = self._max_total(ids, decoding.max_total_tokens)
        selector = self._selector(decoding, sampling, fork, len(ids), deadline)
        request.output = output = self._output(decoding, sampling)
        return SequenceGroup(
            prompt=ids,
            capacity=self.engine.capacity,
            lowering=self.engine.signature.lowering,
            tokens=manifest.tokens,
            selector=selector,
            max_length=max_length,
            max_total=max_total,
            draft_config=draft_config,
            drafter=drafter_for(draft_config, self.planner, sampling.temperature),
            max_rows=self.engine.rows,
            max_threads=decoding.threads(self.exactness.allows_drafts),
            end=frozenset() if decoding.ignore_eos else frozenset(manifest.tokens.end),
            stop=frozenset((*decoding.stop_token_ids, *self.prompts.ends_of(prompt))),
            cache_salt=decoding.cache_salt if self.prefix_cache and decoding.prefix_cache else None,
            listener=output.events or output.transcript,
            observers=(*output.observers, *request.observers),
        )

    def _output(self, decoding: Decoding, sampling: Sampling) -> Output:
        """What the reader of a request gets."""
        logprobs = self._logprobs(decoding.logprobs)
        transcript = Transcript(
            self.tokenizer,
            decoding.stops,
            self.bundle.manifest.tokens.fork,
            logprobs,
            include_stop=decoding.include_stop,
            skip_special=decoding.skip_special_tokens,
        )
        trace = Trace() if decoding.trace else None
        return Output(
            transcript,
            None if decoding.stops else EventLog(),
            sampling.seed if sampling.temperature else None,
            trace,
            tuple(observer for observer in (logprobs, trace) if observer is not None),
        )

    def _scoring(self, request: Request, prompt: Prompt, echo: Echo) -> SequenceGroup:
        """The sequences of a request that generates nothing and scores its tokens."""
        self.limits.check_prompt(prompt)
        self.limits.check_prompt(echo.continuation)
        self.limits.check_logprobs("top", echo.top)
        try:
            ids, start = self.prompts.parts_of(prompt, echo.continuation, echo.parse_special, most=self.max_seq_len)
        except TooManyTokens as error:
            raise self._too_long(f"more than {error.count}", "text") from error
        self.limits.check_tokens(len(ids))
        if len(ids) > self.max_seq_len:
            raise self._too_long(str(len(ids)), "text")
        check_top("top", echo.top, self.bundle.manifest.signature.vocab_size)
        scoring, plain = Scoring(ids, start, echo.top, self.speller), request.decoding
        request.output = scoring
        return SequenceGroup(
            prompt=ids,
            capacity=self.engine.capacity,
            lowering=self.engine.signature.lowering,
            tokens=self.bundle.manifest.tokens,
            selector=self._selector(plain, plain.sampling, self._forks(plain), len(ids)),
            max_length=len(ids),
            max_total=0,
            cache_salt=plain.cache_salt if self.prefix_cache else None,
            echo=start - 1,
            observers=(scoring,),
        )

    def _logprobs(self, top: int | None) -> Logprobs | None:
        if top is None:
            return None
        check_top("logprobs", top, self.bundle.manifest.signature.vocab_size)
        return Logprobs(top, self.speller)

    def _open_vocabulary(self) -> Vocabulary:
        """The vocabulary as grammars use it; building it takes a while, so only requests with a grammar wait for it."""
        manifest = self.bundle.manifest
        tokens = manifest.tokens
        never = (*tokens.forbidden, *tokens.fork_ids)
        with PanicsContained("llguidance read the bundle's tokenizer"):
            return open_vocabulary(self.tokenizer, manifest.signature.vocab_size, tokens.end, never)

    def _selector(
        self, decoding: Decoding, sampling: Sampling, fork: bool, prompt_length: int, deadline: float | None = None
    ) -> TokenSelector:
        tokens = self.bundle.manifest.tokens
        bans = Bans(frozenset(tokens.forbidden), tokens.fork, tokens.child, decoding.max_depth)
        if not fork:
            bans = Bans(frozenset((*tokens.forbidden, *tokens.fork_ids)))
        if decoding.min_tokens:
            ends = frozenset((*decoding.stop_token_ids, *(() if decoding.ignore_eos else tokens.end)))
            bans = replace(bans, ends=ends, ends_from=prompt_length + decoding.min_tokens)
        selector = chooser(sampling, bans, prompt_length)
        if decoding.grammar is not None:
            with PanicsContained(f"llguidance compiled {decoding.grammar.label}"):
                selector = self.grammars.constrained(selector, decoding.grammar, deadline)
        return selector if self.correction is None else Corrected(selector, self.correction)

    def _forks(self, decoding: Decoding) -> bool:
        able = self.bundle.manifest.tokens.fork is not None
        if decoding.fork and not able:
            raise OptionFault(
                "fork is True: expected a bundle with a fork token, this one has none: leave the option out"
            )
        if decoding.fork is not None:
            return decoding.fork
        return able and self.bundle.manifest.fork_by_default and decoding.grammar is None

    def _max_length(self, ids: Sequence[int], max_tokens: int | None) -> int:
        free = self.max_seq_len - len(ids)
        if free < 1:
            raise self._too_long(str(len(ids)), "prompt")
        if max_tokens is None:
            return self.max_seq_len
        if max_tokens > free:
            _log.info("max_tokens %d is lowered to %d: max_seq_len is %d", max_tokens, free, self.max_seq_len)
        return len(ids) + min(max_tokens, free)

    def _too_long(self, count: str, what: str) -> OptionFault:
        return OptionFault(f"the {what} has {count} tokens, {self._limit(f'shorten the {what}')}")

    def _limit(self, remedy: str) -> str:
        """The length limit and what to do; it can be raised unless it is the model's."""
        most = self.bundle.manifest.max_positions
        if self.max_seq_len >= most:
            return f"max_seq_len is {self.max_seq_len}, the model's limit: {remedy}"
        return f"max_seq_len is {self.max_seq_len}: {remedy}, or raise max_seq_len (the model's limit is {most})"

    def _max_total(self, ids: Sequence[int], max_total_tokens: int | None) -> int:
        free = self.max_slots - len(ids)
        if max_total_tokens is None:
            return free
        if max_total_tokens > free:
            raise OptionFault(
                f"{len(ids)} prompt tokens and max_total_tokens {max_total_tokens} make {len(ids) + max_total_tokens} slots, "
                f"max_slots is {self.max_slots}: lower max_total_tokens to {free}, or raise max_slots"
            )
        return max_total_tokens

    def _check_mask_slots(self, mask_slots: int | None) -> None:
        manifest = self.bundle.manifest
        most = manifest.drafts.max_tokens
        if mask_slots is not None and not 0 <= mask_slots <= most:
            expected = f"0 to {most}, the number that the bundle was exported with"
            if manifest.drafts.heads:
                expected = f"0 to {most}, the number of heads of the bundle"
            elif not most:
                expected = "0, since the bundle has no mask token; its drafts come from prompt lookup"
            raise OptionFault(f"mask_slots is {mask_slots}: expected {expected}")


class Intake:
    """Takes requests for one worker: they are in its queue from the first moment, and are prepared here or elsewhere.

    Requests that need a helper process, which may take long, delay no others: they are prepared on OS threads of their own.
    """

    def __init__(self, admission: Admission, worker: Worker) -> None:
        self._admission = admission
        self._worker = worker
        self._pool = ThreadPoolExecutor(_OS_THREADS, "spaceport-admission")
        self._isolated = ThreadPoolExecutor(_OS_THREADS, "spaceport-isolated")

    def completion(self, prompt: Prompt, decoding: Decoding, observers: Sequence[Observer] = ()) -> Request:
        """A request for a completion; its timeout counts from now."""
        self._worker.check_process()
        self._admission.check_decoding(decoding)
        deadline = None if decoding.timeout is None else monotonic() + decoding.timeout
        return self._entered(Request(prompt, decoding, observers=observers, deadline=deadline))

    def scoring(self, prompt: Prompt, echo: Echo, decoding: Decoding) -> Request:
        """A request for the log probabilities of given text."""
        self._worker.check_process()
        return self._entered(Request(prompt, decoding, echo=echo))

    def admit(self, request: Request) -> None:
        """Prepare a request in this OS thread, and raise its error."""
        self._prepare(request)
        if not request.prepared and request.error is not None:
            raise request.error

    def admit_elsewhere(self, request: Request) -> None:
        """Prepare a request on another OS thread, unless it takes no time."""
        prompt, decoding = request.prompt, request.decoding
        quick = isinstance(prompt, list | tuple) and 0 < len(prompt) <= _QUICK_IDS and isinstance(prompt[0], int)
        if quick and request.echo is None and decoding.grammar is None and not self._admission.bundle.maybe_changed:
            self.admit(request)
        else:
            self._submit(self._pool, self._sort, request)

    def prepare_grammars(self) -> None:
        """Begin to prepare constrained decoding; an error is that of the first request with a grammar."""
        with suppress(RuntimeError):  # closed
            self._isolated.submit(self._admission.grammars.prepare)

    def close(self) -> None:
        """Fail the requests that are being prepared, without waiting for what is done for them."""
        for pool in (self._pool, self._isolated):  # first: what comes later fails where it is submitted
            pool.shutdown(wait=False, cancel_futures=True)
        for request in self._worker.preparing:
            request.end(RuntimeClosed("the runtime was closed before the completion ended"))
        self._admission.close()

    def _entered(self, request: Request) -> Request:
        self._worker.enter(request)
        return request

    def _submit(self, pool: Executor, work: Callable[[Request], None], request: Request) -> None:
        try:
            pool.submit(work, request)
        except RuntimeError:
            self._worker.leave(request)
            request.end(RuntimeClosed("the runtime is closed"))

    def _sort(self, request: Request) -> None:
        """Prepare a request here, or where it may take long."""
        try:
            isolated = not request.done and self._admission.isolates(request)
        except BaseException:  # noqa: BLE001  (its preparation raises it again)
            isolated = False
        if isolated:
            self._submit(self._isolated, self._prepare, request)
        else:
            self._prepare(request)

    def _prepare(self, request: Request) -> None:
        """Prepare and submit a request, unless it has ended."""
        outcome: Outcome = "cancelled"
        try:
            sequences = self._admission.prepare(request)
            if sequences is not None:
                self._worker.submit(request, sequences)
        except DeadlinePassed:
            outcome = "deadline"
        except BaseException as error:  # noqa: BLE001  (its reader gets it)
            outcome = error
        if request.prepared:
            request.changed()
        else:
            self._worker.leave(request)
            request.end(outcome)
