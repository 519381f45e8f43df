"""Admission: turns a prompt and a Decoding into a request, or raises if they are invalid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tokenizers import Tokenizer

from spaceport.graphs.contract.draft_correction import CorrectionTables
from spaceport.graphs.contract.exactness import Exactness
from spaceport.graphs.contract.faults import OptionFault, PanicsContained
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.decode.events import EventLog, Listener
from spaceport.runtime.decode.planner import DraftPlanner
from spaceport.runtime.decode.request import Observer, Request
from spaceport.runtime.decode.request_config import RequestConfig
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Engine
from spaceport.runtime.isolation import HelperPool
from spaceport.runtime.limits import DEFAULT_LIMITS, Limits
from spaceport.runtime.sampling.choice import Bans, Corrected
from spaceport.runtime.sampling.constrained import GrammarCompiler, Vocabulary, open_vocabulary
from spaceport.runtime.sampling.logprobs import Logprobs, Scoring, Speller, check_top
from spaceport.runtime.sampling.sampler import Sampling, check_ids, chooser, seeded
from spaceport.runtime.scheduling.generation import Deliver, Generation, ScoringTask
from spaceport.runtime.text.messages import ChatPrompt, shown
from spaceport.runtime.text.prompt import Prompt, PromptEncoder, TooManyTokens
from spaceport.runtime.text.transcript import Transcript
from spaceport.runtime.trace.trace import Trace


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
    helpers: HelperPool = field(default_factory=HelperPool)  # for templates and grammars that may take long

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

    def tokens_of(self, prompt: Prompt, parse_special: bool) -> list[int]:
        """The tokens of a prompt within the limits."""
        self.limits.check_prompt(prompt)
        ids = self.prompts.tokens_of(prompt, parse_special)
        self.limits.check_tokens(len(ids))
        return ids

    def check_decoding(self, decoding: Decoding) -> None:
        """Raise for options that are no `Decoding`, or are beyond the limits."""
        if not isinstance(decoding, Decoding):
            raise OptionFault(f"decoding is {shown(decoding)}: expected a Decoding, such as Decoding(max_tokens=64)")
        self.limits.check_decoding(decoding)

    def isolates(self, prompt: Prompt, decoding: Decoding | None) -> bool:
        """Whether a request needs a helper process to be admitted."""
        if decoding is not None and decoding.grammar is not None and self.grammars.isolates(decoding.grammar):
            return True
        if not isinstance(prompt, ChatPrompt):
            items = not isinstance(prompt, str | bytes) and isinstance(prompt, Sequence) and len(prompt)
            if not items or not isinstance(prompt[0], Mapping):
                return False
        return self.prompts.template.isolates

    def generation(
        self,
        prompt: Prompt,
        decoding: Decoding,
        deliver: Deliver,
        deadline: float | None = None,
        observers: Sequence[Observer] = (),
    ) -> Generation:
        """A request for a completion, with enough KV slots for all its limits."""
        self.check_decoding(decoding)
        ids = self._within_context(prompt, decoding.parse_special, deadline)
        sampling = seeded(decoding.sampling)
        config = self._config(ids, decoding, sampling, deadline)
        logprobs = self._logprobs(decoding.logprobs)
        transcript = Transcript(
            self.tokenizer,
            decoding.stops,
            config.tokens.fork,
            logprobs,
            include_stop=decoding.include_stop,
            skip_special=decoding.skip_special_tokens,
        )
        events = None if decoding.stops else EventLog()
        trace = Trace() if decoding.trace else None
        own = [observer for observer in (logprobs, trace) if observer is not None]
        return Generation(
            request=self._request(ids, config, (*own, *observers), events or transcript),
            deadline=deadline,
            transcript=transcript,
            events=events,
            deliver=deliver,
            seed=sampling.seed if sampling.temperature else None,
            trace=trace,
        )

    def _config(
        self, ids: Sequence[int], decoding: Decoding, sampling: Sampling, deadline: float | None
    ) -> RequestConfig:
        """The limits, token selection and drafts of a completion; raises for options that the model does not have."""
        manifest = self.bundle.manifest
        max_length = self._max_length(ids, decoding.max_tokens)
        fork = self._forks(decoding)
        self._check_mask_slots(decoding.mask_slots)
        draft_config = decoding.drafts_with(manifest, self.exactness)
        decoding.sampling.check(manifest.signature.vocab_size)
        check_ids("stop_token_ids", decoding.stop_token_ids, manifest.signature.vocab_size)
        return RequestConfig(
            tokens=manifest.tokens,
            selector=self._selector(decoding, sampling, fork, len(ids), deadline),
            max_length=max_length,
            max_total=self._max_total(ids, decoding.max_total_tokens),
            draft_config=draft_config,
            planner=self.planner,
            kind=(round(min(sampling.temperature, 2.0), 1), decoding.grammar is not None),
            temperature=sampling.temperature,
            max_rows=self.engine.rows,
            max_threads=decoding.threads(self.exactness.parallel_threads),
            end=frozenset() if decoding.ignore_eos else frozenset(manifest.tokens.end),
            stop=frozenset(decoding.stop_token_ids),
            cache_salt=decoding.cache_salt if decoding.prefix_cache else None,
        )

    def scoring(
        self, prompt: Prompt, continuation: str | Sequence[int] | None, top: int, parse_special: bool = False
    ) -> ScoringTask:
        """A request that generates nothing and scores its tokens."""
        self.limits.check_prompt(prompt)
        self.limits.check_prompt(continuation)
        self.limits.check_logprobs("top", top)
        try:
            ids, start = self.prompts.parts_of(prompt, continuation, parse_special, most=self.max_seq_len)
        except TooManyTokens as error:
            raise self._too_long(f"more than {error.count}", "text") from error
        self.limits.check_tokens(len(ids))
        if len(ids) > self.max_seq_len:
            raise self._too_long(str(len(ids)), "text")
        check_top("top", top, self.bundle.manifest.signature.vocab_size)
        scoring, plain = Scoring(ids, start, top, self.speller), Decoding()
        config = RequestConfig(
            tokens=self.bundle.manifest.tokens,
            selector=self._selector(plain, plain.sampling, self._forks(plain), len(ids)),
            max_length=len(ids),
            max_total=0,
            cache_salt=plain.cache_salt,
            echo=start - 1,
        )
        return ScoringTask(request=self._request(ids, config, (scoring,)), scoring=scoring)

    def _within_context(self, prompt: Prompt, parse_special: bool, deadline: float | None) -> list[int]:
        """The tokens of a prompt; one that is surely too long is not tokenized as a whole."""
        self.limits.check_prompt(prompt)
        try:
            ids = self.prompts.tokens_of(prompt, parse_special, deadline=deadline, most=self.max_seq_len)
        except TooManyTokens as error:
            raise self._too_long(f"more than {error.count}", "prompt") from error
        self.limits.check_tokens(len(ids))
        return ids

    def _request(
        self,
        prompt: Sequence[int],
        config: RequestConfig,
        observers: Sequence[Observer],
        listener: Listener | None = None,
    ) -> Request:
        engine = self.engine
        return Request(
            prompt, config, engine.capacity, engine.signature.lowering, listener=listener, observers=observers
        )

    def _logprobs(self, top: int | None) -> Logprobs | None:
        if top is None:
            return None
        check_top("logprobs", top, self.bundle.manifest.signature.vocab_size)
        return Logprobs(top, self.speller)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiled grammars of the bundle's vocabulary."""
        return GrammarCompiler(self.vocabulary, self.helpers)

    @cached_property
    def vocabulary(self) -> Vocabulary:
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
            raise OptionFault(
                f"{len(ids)} prompt tokens and max_tokens {max_tokens} make {len(ids) + max_tokens}, "
                f"{self._limit(f'lower max_tokens to {free}')}"
            )
        return len(ids) + max_tokens

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
