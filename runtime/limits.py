"""Limits: what one request may ask for, so that no request can stall the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.option_fields import check_options, documented, option
from spaceport.runtime.text.messages import characters_of


@documented
@dataclass(frozen=True)
class Limits:
    """Limits of each request and of the queue; all but the tokens of a text are checked before it is tokenized."""

    prompt_chars: int = option(1_000_000, "Maximum characters of a prompt, of all texts of its messages together.", 1)
    prompt_tokens: int | None = option(None, "Maximum tokens of a prompt.", 1, unset="`max_seq_len`")
    stop_strings: int = option(16, "Maximum number of stop strings.", 0)
    stop_chars: int = option(256, "Maximum characters of a stop string.", 0)
    logprobs: int = option(20, "Maximum number of most probable tokens to report for each token.", 0)
    bias_entries: int = option(1024, "Maximum entries of `Sampling.logit_bias`.", 0)
    banned_tokens: int = option(1024, "Maximum entries of `Sampling.banned`, and of `Decoding.stop_token_ids`.", 0)
    threads: int = option(32, "Maximum threads of a request that decode at the same time.", 1)
    fork_depth: int = option(8, "Maximum `Decoding.max_depth`.", 0)
    grammar_chars: int = option(65_536, "Maximum characters of a regular expression or a JSON schema.", 1)
    grammar_depth: int = option(64, "Maximum nesting of a regular expression or a JSON schema.", 1)
    queued_requests: int = option(256, "Maximum number of requests that wait.", 0)
    queued_prompt_tokens: int = option(2**20, "Maximum prompt tokens of all requests that wait.", 0)

    def __post_init__(self) -> None:
        check_options(self)

    def check_prompt(self, prompt: object) -> None:
        """Raise for a prompt with too many characters or token ids, before anything is copied."""
        if isinstance(prompt, list | tuple | np.ndarray):
            self.check("the prompt has", len(prompt), "prompt_tokens", " items")
        characters = characters_of(prompt, self.prompt_chars)
        self.check("the prompt has", characters, "prompt_chars", " characters or more")

    def check_tokens(self, count: int) -> None:
        """Raise for a prompt with too many tokens."""
        self.check("the prompt has", count, "prompt_tokens", " tokens")

    def check_decoding(self, decoding: Decoding) -> None:
        """Raise for options of a completion beyond the limits."""
        self.check("stop has", len(decoding.stops), "stop_strings", " stop strings")
        self.check("a stop string has", max(map(len, decoding.stops), default=0), "stop_chars", " characters")
        self.check_logprobs("logprobs", decoding.logprobs)
        self.check("logit_bias has", len(decoding.sampling.logit_bias), "bias_entries", " entries")
        self.check("banned has", len(decoding.sampling.banned), "banned_tokens", " entries")
        self.check("stop_token_ids has", len(decoding.stop_token_ids), "banned_tokens", " entries")
        self.check("max_threads is", decoding.max_threads or 0, "threads")
        self.check("max_depth is", decoding.max_depth, "fork_depth")
        if decoding.grammar is not None:
            self.check_grammar(decoding.grammar)

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise for a grammar that is too long or nested too deeply."""
        name = grammar.name or "the grammar"
        self.check(f"{name} has", len(grammar.source), "grammar_chars", " characters")
        self.check(f"{name} has", grammar.depth, "grammar_depth", " nested levels")

    def check_logprobs(self, name: str, top: object) -> None:
        """Raise for more log probabilities of each token than allowed; other values are checked later."""
        if isinstance(top, int):
            self.check(f"{name} is", top, "logprobs")

    def as_dict(self) -> dict[str, Any]:
        """The limits by name."""
        return asdict(self)

    def check(self, subject: str, value: int, limit: str, unit: str = "") -> None:
        """Raise for a value beyond the limit with this name."""
        most = getattr(self, limit)
        if most is not None and value > most:
            raise OptionFault(f"{subject} {value}{unit}: expected at most {most}; Limits({limit}=…) allows more")


DEFAULT_LIMITS = Limits()
