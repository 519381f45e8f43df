"""Limits: what one request may ask for, so that no request can stall the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.text.messages import characters_of

_POSITIVE = ("prompt_chars", "prompt_tokens", "threads", "grammar_chars", "grammar_depth")


@dataclass(frozen=True)
class Limits:
    """Limits of each request and of the queue; all but the tokens of a text are checked before it is tokenized.

    - `prompt_chars`: Maximum characters of a prompt, of all texts of its messages together; default 1,000,000.
    - `prompt_tokens`: Maximum tokens of a prompt; default None: `max_seq_len`.
    - `stop_strings`: Maximum number of stop strings; default 16.
    - `stop_chars`: Maximum characters of a stop string; default 256.
    - `logprobs`: Maximum number of most probable tokens to report for each token; default 20.
    - `bias_entries`: Maximum entries of `Sampling.logit_bias`; default 1,024.
    - `banned_tokens`: Maximum entries of `Sampling.banned`, and of `Decoding.stop_token_ids`; default 1,024.
    - `threads`: Maximum threads of a request that decode at the same time; default 32.
    - `fork_depth`: Maximum `Decoding.max_depth`; default 8.
    - `grammar_chars`: Maximum characters of a regular expression or a JSON schema; default 65,536.
    - `grammar_depth`: Maximum nesting of a regular expression or a JSON schema; default 64.
    - `queued_requests`: Maximum number of requests that wait; default 256.
    - `queued_prompt_tokens`: Maximum prompt tokens of all requests that wait; default 1,048,576.
    """

    prompt_chars: int = 1_000_000
    prompt_tokens: int | None = None
    stop_strings: int = 16
    stop_chars: int = 256
    logprobs: int = 20
    bias_entries: int = 1024
    banned_tokens: int = 1024
    threads: int = 32
    fork_depth: int = 8
    grammar_chars: int = 65_536
    grammar_depth: int = 64
    queued_requests: int = 256
    queued_prompt_tokens: int = 2**20

    def __post_init__(self) -> None:
        for name, value in self.as_dict().items():
            least = int(name in _POSITIVE)
            if value is None and name == "prompt_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionFault(f"{name} is {value!r}: expected a whole number of at least {least}")

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
