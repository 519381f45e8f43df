"""Admission: a prompt and how to decode it as a request, or what keeps them from being one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import numpy as np
from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.graphs.contract.signature import STEP_ROWS, visible_length
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.decode.request import Request
from spaceport.runtime.decode.slots import Slots
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decode.threads import new_thread
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Engine
from spaceport.runtime.sampling.choice import Bans, Choose
from spaceport.runtime.sampling.grammar import constrained
from spaceport.runtime.sampling.logprobs import Logprobs, check_top
from spaceport.runtime.sampling.sampler import Sampling, chooser, seeded
from spaceport.runtime.sampling.scoring import Scoring, encode_parts
from spaceport.runtime.sampling.vocabulary import Vocabulary, open_vocabulary
from spaceport.runtime.scheduling.scheduler import PROMPT_ROWS
from spaceport.runtime.text.chat import Message, render
from spaceport.runtime.text.reading import Reading
from spaceport.runtime.text.tokenizer import encode
from spaceport.runtime.trace.trace import Trace

DEFAULT_SEQ_LEN = 4096

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Admitted:
    """A request with what hears and sees it."""

    request: Request
    reading: Reading
    seed: int | None  # of what is drawn; none: nothing is
    trace: Trace | None


@dataclass(frozen=True)
class Admission:
    """What requests on one engine have to keep to."""

    bundle: Bundle
    tokenizer: Tokenizer
    engine: Engine
    max_seq_len: int  # longest prompt and text of one thread
    max_slots: int  # most tokens of a prompt and all its threads

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt: text, token ids, or chat messages."""
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
            raise OptionFault(f"the prompt is {_shown(prompt)}: expected text, token ids or chat messages")
        if not len(prompt):
            raise OptionFault("the prompt is empty: expected at least one character, token id or message")
        if isinstance(prompt, str):
            ids = encode(self.tokenizer, prompt, special=True)
        elif all(isinstance(item, Integral) for item in prompt):
            ids = [int(item) for item in prompt if isinstance(item, Integral)]
            if any(isinstance(item, bool) for item in prompt):
                raise OptionFault(f"the prompt is {_shown(prompt)}: expected token ids, not True or False")
        elif any(isinstance(item, Integral) for item in prompt):
            raise OptionFault(f"the prompt is {_shown(prompt)}: expected token ids or chat messages, not both")
        else:
            ids = encode(self.tokenizer, self._rendered(prompt), special=False)
        self._check_tokens(ids)
        return ids

    def parts_of(self, prompt: Prompt, continuation: str | Sequence[int] | None) -> tuple[list[int], int]:
        """The tokens of a prompt and what continues it, and the place of the first one of which that is to be told."""
        ids = self.tokens_of(prompt)
        if continuation is None:
            return ids, 1
        if not continuation:
            raise OptionFault(
                "the continuation is empty: expected at least one token, or none at all to score the prompt"
            )
        if not isinstance(continuation, str):
            return [*ids, *self.tokens_of(continuation)], len(ids)
        if isinstance(prompt[0], int):
            raise OptionFault(
                "the prompt is token ids and the continuation is text: expected both as ids or both as text"
            )
        text = prompt if isinstance(prompt, str) else self._rendered(prompt)
        ids, start = encode_parts(self.tokenizer, text, continuation, special=isinstance(prompt, str))
        if not 0 < start < len(ids):
            empty = "continuation" if start else "prompt"
            raise OptionFault(f"the {empty} has no token of its own: expected a longer one, or both as token ids")
        self._check_tokens(ids)
        return ids, start

    def _rendered(self, prompt: Sequence[int] | Sequence[Message]) -> str:
        return render(self.bundle, [item for item in prompt if not isinstance(item, int)])

    def _check_tokens(self, ids: Sequence[int]) -> None:
        vocab = self.bundle.manifest.signature.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise OptionFault(f"the prompt holds the token id {wrong}: expected ids from 0 to {vocab - 1}")
        if not ids:
            raise OptionFault("the prompt has no tokens: expected at least one")

    def text(self, prompt: Prompt, decoding: Decoding) -> Admitted:
        """A request that will not run out of slots half way."""
        if not isinstance(decoding, Decoding):
            raise OptionFault(f"decoding is {_shown(decoding)}: expected a Decoding, such as Decoding(max_tokens=64)")
        ids = self.tokens_of(prompt)
        manifest, capacity = self.bundle.manifest, self.engine.capacity
        limit = self._limit(ids, decoding.max_tokens)
        fork = self._forks(decoding)
        drafting = decoding.drafting(manifest.max_mask_slots, self.engine.costs)
        self._check_mask_slots(drafting.mask_slots)
        decoding.sampling.check(manifest.signature.vocab_size)
        sampling = seeded(decoding.sampling)
        logprobs = self._logprobs(decoding.logprobs)
        reading = Reading(self.tokenizer, decoding.stops, manifest.tokens.fork, logprobs)
        trace = Trace() if decoding.trace else None
        request = Request(
            slots=Slots(capacity, self.engine.signature.lowering),
            threads=[new_thread(ids, capacity, lookup=drafting.lookup > 0)],
            tokens=manifest.tokens,
            choose=self._choose(decoding, sampling, fork, len(ids)),
            limit=limit,
            total=self._total(ids, decoding.max_total_tokens),
            drafting=drafting,
            widest=self.engine.rows,
            max_threads=decoding.max_threads,
            listener=reading,
            observers=tuple(observer for observer in (logprobs, trace) if observer is not None),
            end=frozenset(manifest.tokens.end),
            statistics=Statistics(prompt_tokens=len(ids)),
        )
        return Admitted(request, reading, sampling.seed if sampling.temperature else None, trace)

    def scoring(self, prompt: Prompt, continuation: str | Sequence[int] | None, top: int) -> tuple[Request, Scoring]:
        """A request that writes nothing, and what sees how likely its tokens are."""
        ids, start = self.parts_of(prompt, continuation)
        if len(ids) > self.max_seq_len:
            raise self._too_long(ids, "text")
        check_top("top", top, self.bundle.manifest.signature.vocab_size)
        scoring, plain = Scoring(ids, start, top), Decoding()
        request = Request(
            slots=Slots(self.engine.capacity, self.engine.signature.lowering),
            threads=[new_thread(ids, self.engine.capacity)],
            tokens=self.bundle.manifest.tokens,
            choose=self._choose(plain, plain.sampling, self._forks(plain), len(ids)),
            limit=len(ids),
            total=0,
            observers=(scoring,),
            echo=start - 1,
            statistics=Statistics(prompt_tokens=len(ids)),
        )
        return request, scoring

    def _logprobs(self, top: int | None) -> Logprobs | None:
        if top is None:
            return None
        check_top("logprobs", top, self.bundle.manifest.signature.vocab_size)
        return Logprobs(top)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens as a form reads them; it takes a while to make, so only who asks for a form waits for it."""
        manifest = self.bundle.manifest
        tokens = manifest.tokens
        never = (*tokens.unwritable, *tokens.forking)
        return open_vocabulary(self.tokenizer, manifest.signature.vocab_size, tokens.end, never)

    def _choose(self, decoding: Decoding, sampling: Sampling, fork: bool, prompt_length: int) -> Choose:
        tokens = self.bundle.manifest.tokens
        bans = Bans(frozenset(tokens.unwritable), tokens.fork, tokens.child, decoding.max_depth)
        if not fork:
            bans = Bans(frozenset((*tokens.unwritable, *tokens.forking)))
        choose = chooser(sampling, bans, prompt_length)
        return choose if decoding.form is None else constrained(choose, decoding.form, self.vocabulary)

    def _forks(self, decoding: Decoding) -> bool:
        able = self.bundle.manifest.tokens.fork is not None
        if decoding.fork and not able:
            raise OptionFault(
                "fork is True: expected a bundle with a fork token, this one has none: leave the option out"
            )
        return able and decoding.form is None if decoding.fork is None else decoding.fork

    def _limit(self, ids: Sequence[int], max_tokens: int | None) -> int:
        room = self.max_seq_len - len(ids)
        if room < 1:
            raise self._too_long(ids, "prompt")
        if max_tokens is None:
            return self.max_seq_len
        if max_tokens > room:
            raise OptionFault(
                f"{len(ids)} prompt tokens and max_tokens {max_tokens} make {len(ids) + max_tokens}, max_seq_len is "
                f"{self.max_seq_len}: lower max_tokens to {room}, or raise max_seq_len (--max-seq-len)"
            )
        return len(ids) + max_tokens

    def _too_long(self, ids: Sequence[int], what: str) -> OptionFault:
        return OptionFault(
            f"the {what} has {len(ids)} tokens, max_seq_len is {self.max_seq_len}: shorten the {what}, or raise max_seq_len "
            f"(--max-seq-len; the model goes up to {self.bundle.manifest.max_positions})"
        )

    def _total(self, ids: Sequence[int], max_total_tokens: int | None) -> int:
        room = self.max_slots - len(ids)
        if max_total_tokens is None:
            return room
        if max_total_tokens > room:
            raise OptionFault(
                f"{len(ids)} prompt tokens and max_total_tokens {max_total_tokens} make {len(ids) + max_total_tokens} slots, "
                f"max_slots is {self.max_slots}: lower max_total_tokens to {room}, or raise max_slots (--max-slots)"
            )
        return max_total_tokens

    def _check_mask_slots(self, mask_slots: int) -> None:
        most = self.bundle.manifest.max_mask_slots
        if not 0 <= mask_slots <= most:
            reason = (
                f"the bundle was exported with up to {most} mask slots"
                if most
                else "the bundle has no mask token and only decodes plainly"
            )
            raise OptionFault(f"mask_slots is {mask_slots}: expected 0 to {most} ({reason})")


def _shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:59]}…"


def seq_len(manifest: Manifest, max_seq_len: int | None) -> int:
    """The longest text that a runtime makes room for."""
    if max_seq_len is None:
        return min(manifest.max_positions, DEFAULT_SEQ_LEN)
    if not 2 <= max_seq_len <= manifest.max_positions:
        raise OptionFault(
            f"max_seq_len is {max_seq_len}: expected 2 to {manifest.max_positions}, the positions that the model knows"
        )
    return max_seq_len


def slots_for(max_seq_len: int, max_slots: int | None) -> int:
    """The most tokens that a prompt and all its threads may have."""
    if max_slots is None:
        return max_seq_len
    if max_slots < max_seq_len:
        raise OptionFault(
            f"max_slots is {max_slots}: expected at least max_seq_len, {max_seq_len}, so that one thread can be as long as that"
        )
    return max_slots


def capacity_for(manifest: Manifest, max_slots: int) -> int:
    """Slots of a request: all its tokens, the rows of its widest step, and one that padding rows write to."""
    widest = STEP_ROWS
    if manifest.signature.lowering == "append":
        widest += PROMPT_ROWS  # all requests of a call write runs of one length: a prompt's last rows and a draft's
    return visible_length(max_slots + widest + 1)
