"""Hash runtime: the public runtime over a fake engine, its log probabilities, and an engine that steps on command."""

from __future__ import annotations

import atexit
import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models

from spaceport.graphs.contract.draft_methods import DraftMethod
from spaceport.graphs.contract.manifest import TOKENIZER_FILE, Manifest, TokenIds
from spaceport.graphs.contract.signature import Lowering, Signature
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import PREFILL_ROWS, Batch, EngineFault, capacity_for
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.session import Runtime
from support.hash_engine import CHILD, END, FORK, FREE_ROWS, MASKS, VOCAB, Cell, HashEngine, Language

WORDS = "abcdefghij.[]{}"  # a letter for each token; "." is the end token, "[" and "]" are masks, "{" is [Fork] and "}" is [Child]


def hash_runtime(
    language: Language,
    max_seq_len: int = 64,
    max_slots: int | None = None,
    requests: int = 1,
    lowering: Lowering = "scatter",
    prompt_rows: int = PREFILL_ROWS,
    row: float = 0.0,
    before: Callable[[Batch], None] | None = None,
    after: Callable[[Batch, NDArray[np.float32]], None] | None = None,
    **options: Any,
) -> Runtime:
    """A runtime whose model generates a language; `row` is the cost of a further row in plain steps."""
    manifest = Manifest(
        signature=Signature(1, 1, 1, VOCAB, "float32", lowering, language.window),
        tokens=TokenIds(mask=(MASKS * 3)[:5], fork=FORK, child=CHILD, end=(END,)),
        drafts=DraftMethod(max_tokens=5),
        max_positions=4096,
        model_type="llama",
        parameters=1,
        opset=23,
        attention="plain",
    )
    bundle = Bundle(_folder(), manifest)
    capacity = capacity_for(manifest, max_slots or max_seq_len)
    costs = replace(FREE_ROWS, row=row, prompt_rows=prompt_rows)
    engine = HashEngine(language, capacity, requests, lowering, costs=costs, before=before, after=after)
    return Runtime(bundle, engine, max_seq_len, max_slots, **options)


def expected_logprobs(language: Language, tokens: Sequence[int], start: int, top: int) -> list[TokenLogprob]:
    """Log probabilities of each token from an index on, computed from the model's logits at each position."""
    cells: list[Cell] = []
    for token in tokens:
        cells.append(language.follow(cells, token))
    found = []
    for index in range(start, len(tokens)):
        logits = language.logits(cells[index - 1].state).astype(np.float64)
        logprobs = (logits - np.log(np.exp(logits).sum())).tolist()
        best = sorted(range(VOCAB), key=lambda token: (-logprobs[token], token))[:top]
        found.append(
            TokenLogprob(tokens[index], logprobs[tokens[index]], tuple(TokenLogprob(t, logprobs[t]) for t in best))
        )
    return found


def same(found: Sequence[TokenLogprob], expected: Sequence[TokenLogprob], within: float = 1e-6) -> bool:
    """Whether the tokens are equal, and their log probabilities within rounding."""
    return len(found) == len(expected) and all(
        one.token == other.token
        and math.isclose(one.logprob, other.logprob, abs_tol=within)
        and [each.token for each in one.top] == [each.token for each in other.top]
        and np.allclose([each.logprob for each in one.top], [each.logprob for each in other.top], rtol=0, atol=within)
        for one, other in zip(found, expected, strict=True)
    )


@functools.cache
def _folder() -> Path:
    """A folder with the tokenizer, the same for all runtimes of a process."""
    kept = tempfile.TemporaryDirectory(prefix="spaceport-hash-")
    atexit.register(kept.cleanup)
    folder = Path(kept.name)
    tokens = (*WORDS, "x", "ax")  # the last two are beyond the model's vocabulary
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(tokens)}, [("a", "x")]))
    tokenizer.decoder = decoders.Fuse()
    (folder / TOKENIZER_FILE).write_text(tokenizer.to_str(), "utf-8")
    return folder


_PATIENCE = 60.0  # seconds after which a test fails
_ALL = 10**4  # steps; releasing a semaphore takes a microsecond for each


@dataclass
class Steps:
    """The steps of an engine, which waits in each until the test allows it."""

    asked: Semaphore = field(default_factory=lambda: Semaphore(0))
    leave: Semaphore = field(default_factory=lambda: Semaphore(0))
    broken: bool = False  # whether they fail

    def __call__(self, batch: Batch) -> None:
        self.asked.release()
        assert self.leave.acquire(timeout=_PATIENCE)
        if self.broken:
            raise EngineFault("the fake engine failed")

    def wait(self) -> None:
        """Wait until the next step is requested."""
        assert self.asked.acquire(timeout=_PATIENCE)

    def step(self) -> None:
        """Run the requested step, and wait until the next one is requested."""
        self.leave.release()
        self.wait()

    def go(self) -> None:
        """Run all further steps."""
        self.leave.release(_ALL)


def stepwise_runtime(language: Language, requests: int = 1, **options: Any) -> tuple[Runtime, Steps]:
    """A runtime over an engine that steps on command."""
    steps = Steps()
    return hash_runtime(language, requests=requests, before=steps, **options), steps


def close_between_steps(runtime: Runtime, steps: Steps) -> None:
    """Close a runtime whose engine waits in a step, with no more steps than that needs."""
    closing = Thread(target=runtime.close)
    closing.start()
    while closing.is_alive():
        steps.leave.release()
        closing.join(0.1)
