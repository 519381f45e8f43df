"""Traced: generations of the fake engine with their traces, and a tokenizer for its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.sequence import Listener
from spaceport.runtime.decode.sequence_group import Observer, SequenceGroup
from spaceport.runtime.text.transcript import Transcript
from spaceport.runtime.trace import Trace
from support.arrivals import DRAFT_CONFIGS
from support.hash_engine import CHILD, END, FORK, MASKS, VOCAB, HashEngine, Language, advance, request_for

# Texts of the fake engine's tokens: bytes of é and of an emoji, so that most outputs split characters.
# The decoder removes a space at the beginning.
LETTERS = (*("<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>"), *"ab \n<&", "[End]", "[M1]", "[M2]", "[Fork]", "[Child]")
TOKENIZER = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, [], byte_fallback=True))
TOKENIZER.add_special_tokens([LETTERS[token] for token in (END, *MASKS, FORK, CHILD)])
TOKENIZER.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
assert TOKENIZER.get_vocab_size() == VOCAB


@dataclass(frozen=True)
class Case:
    """Options of a generation with a trace."""

    seed: int
    prompt: tuple[int, ...] = (1, 2, 3)
    quality: int = 80
    end_every: int = 30
    fork_every: int = 8
    max_tokens: int = 40
    total: int = 10**6
    draft_config: DraftConfig = field(default_factory=lambda: DraftConfig(3, "tree", 16, 2, 4))
    chunk: int = 512
    max_threads: int = 4
    max_depth: int = 2


CASES = st.builds(
    Case,
    seed=st.integers(0, 10**6),
    prompt=st.lists(st.integers(0, END - 1), min_size=1, max_size=20).map(tuple),
    quality=st.sampled_from((0, 60, 90, 100)),
    end_every=st.sampled_from((4, 10, 30)),
    fork_every=st.sampled_from((4, 8, 10**9)),
    max_tokens=st.integers(1, 25),
    total=st.integers(1, 80) | st.just(10**6),
    draft_config=DRAFT_CONFIGS,
    chunk=st.integers(1, 30),
    max_threads=st.sampled_from((1, 2, 8)),
    max_depth=st.integers(0, 2),
)


def request_of(
    case: Case, observers: Sequence[Observer] = (), listener: Listener | None = None
) -> tuple[HashEngine, SequenceGroup]:
    """The new request of a case, on an engine with enough slots."""
    language = Language(case.seed, case.quality, case.end_every, case.fork_every)
    text = language.tree(case.prompt, len(case.prompt) + case.max_tokens, case.max_depth)
    most = len(case.prompt) + sum(map(len, text.values())) + len(text)
    engine = HashEngine(language, most + STEP_ROWS + 1, 1)
    request = request_for(
        engine,
        case.prompt,
        case.max_tokens,
        case.draft_config,
        max_threads=case.max_threads,
        max_depth=case.max_depth,
        total=case.total,
        listener=listener,
        observers=observers,
    )
    return engine, request


def traced(case: Case) -> tuple[SequenceGroup, Trace, Transcript]:
    """A finished request with its trace and its transcript."""
    trace, transcript = Trace(), Transcript(TOKENIZER, (), FORK)
    engine, request = request_of(case, [trace], transcript)
    while request.live:
        advance(engine, request, chunk=case.chunk)
        request.statistics.outside_seconds += 0.001 * (request.statistics.rows % 7)
    return request, trace, transcript
