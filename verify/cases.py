"""The engine calls that a runtime makes, recorded from its own decode loop over a reference engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import Manifest, TokenIds
from spaceport.graphs.contract.signature import VISIBLE_STEP, Signature
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.draft import PLAIN, Candidates, Draft, DraftConfig, chain
from spaceport.runtime.decode.plan import Part, Verdict
from spaceport.runtime.decode.planner import Drafter, DraftPlanner, Sharing, drafter_for
from spaceport.runtime.decode.sequence import TokenSelector, TokenSequence
from spaceport.runtime.decode.sequence_group import RequestStep, SequenceGroup
from spaceport.runtime.decode.step import step
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import PREFILL_ROWS, Batch, Engine, Moves
from spaceport.runtime.sampling.choice import Bans, Greedy
from spaceport.runtime.sampling.option_fields import check_options, option

REQUESTS = 3  # of a call
DEFAULT_LONG, SHORTEST = 1024, 32  # tokens of the longest case
_SPARE = 8  # positions that the longest prompt leaves for generated tokens
_PLAIN = DraftConfig(0, "chain")
Array = NDArray[Any]


@dataclass(frozen=True)
class CheckOptions:
    """What a check compares, and how."""

    checkpoint: Path | None = None  # of the PyTorch model; None: compare the engines with each other
    backends: tuple[str, ...] = ()  # empty: all that can run here
    length: int | None = option(
        None,
        "Tokens of the long-context case.",
        SHORTEST,
        unset=f"{DEFAULT_LONG}, or the maximum of the model and all engines",
        flag="--long-context",
    )
    layers: bool = option(False, "Find the first layer whose output is out of tolerance.")
    seed: int = option(0, "Random seed of prompts and draft trees.", 0)
    threads: int = 0
    trust_remote_code: bool = False
    trust_engines: bool = False
    adapter: Path | None = None  # adapter folder of the checkpoint

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class RecordedCall:
    """One engine call, the case that it belongs to, and the logits of the engine that it was recorded on."""

    case: str
    batch: Batch
    expected: NDArray[np.float32]
    moves: tuple[tuple[int, Sequence[Moves]], ...] = ()  # KV slots that move before the call, from a request on

    def run(self, engine: Engine) -> NDArray[np.float32]:
        """The logits of an engine that has run the calls before this one."""
        for first, moves in self.moves:
            engine.move(first, moves)
        return engine.run(self.batch)


@dataclass(frozen=True)
class EngineLimits:
    """Limits that all compared engines share."""

    length: int  # tokens of the longest prompt
    capacity: int  # KV slots per request
    requests: int  # requests per call
    rows: int  # rows of a request per call


class Recording(NamedTuple):
    """The calls of all cases, and the cases that were skipped."""

    calls: list[RecordedCall]
    skipped: list[str]  # skipped cases, each with the reason


class Recorder(Engine):
    """An engine that records every call and passes it on to another engine, within the shared limits."""

    def __init__(self, engine: Engine, limits: EngineLimits) -> None:
        self.engine = engine
        self.signature: Signature = engine.signature
        self.capacity, self.requests, self.rows = limits.capacity, limits.requests, limits.rows
        self.device = engine.device
        self.costs, self.notes = engine.costs, engine.notes
        self.calls: list[RecordedCall] = []
        self.case = ""
        self._moves: list[tuple[int, Sequence[Moves]]] = []  # since the last call

    def run(self, batch: Batch) -> NDArray[np.float32]:
        logits = self.engine.run(batch)
        self.calls.append(RecordedCall(self.case, deepcopy(batch), logits.copy(), tuple(self._moves)))
        self._moves = []
        return logits

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        self._moves.append((first, deepcopy(moves)))
        self.engine.move(first, moves)

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        raise NotImplementedError("the cases use no prefix cache: a copy would have to be recorded like moves")

    def clear(self, request: int) -> None:
        self.engine.clear(request)

    def close(self) -> None:
        self.engine.close()


def record(
    engine: Engine,
    manifest: Manifest,
    limits: EngineLimits,
    seed: int = 0,
    few: bool = False,
    on_case: Callable[[int, int], None] = lambda done, total: None,
) -> Recording:
    """The calls of all cases, in the order in which they must be replayed.

    `few` leaves three, for engines that need half a minute for one: a prompt at once, then tokens one at a time.
    """
    recorder = Recorder(engine, limits)
    builder = _Builder(recorder, manifest, np.random.default_rng(seed))
    if not few:
        cases = [*_step_cases(builder, manifest, limits), *_more_cases(builder, manifest, limits)]
    else:
        cases = [partial(builder.text, "prompt, every row, and cached rows", [9], _PLAIN, 3, echo=0)]
        builder.skipped.append(
            "all others, as standard operators need long for each call of a large bundle: name --long-context to include them"
        )
    for done, case in enumerate(cases, 1):
        case()
        on_case(done, len(cases))
    window, longest = manifest.signature.window, limits.length - _SPARE
    if not few and window is not None and longest <= window < manifest.max_positions:
        builder.skipped.append(
            f"contexts longer than the attention window of {window} positions: raise --long-context to include them"
        )
    return Recording(recorder.calls, builder.skipped)


def _step_cases(builder: _Builder, manifest: Manifest, limits: EngineLimits) -> list[Callable[[], None]]:
    """Functions that record one case of each kind of step."""
    k, length, layout = manifest.drafts.mask_slots, limits.length, manifest.drafts.layout
    chains = DraftConfig(k, "chain", mask_layout=layout)
    trees = DraftConfig(k, "tree", mask_layout=layout)
    short, longest = min(17, length // 2), length - _SPARE
    full = [limits.rows] * (longest > limits.rows)
    drafted = _drafted_rows(manifest, limits)

    def long_context() -> None:
        widths = [*full, *builder.drawn(longest - sum(full), drafted)]
        builder.text(f"long context, {longest} tokens", [longest], chains, 3, widths=widths)

    drafting = [
        lambda: builder.text(f"SPACE steps, k = {k}", [short], chains, 4),
        lambda: builder.text(f"draft trees, k = {k}", [short], trees, 4),
    ]
    threads = [min(9, length // 2), min(20, length // 2)]
    return [
        lambda: builder.tree("prompt, every row", 1, builder.chain(min(23, length - 2))),
        lambda: builder.text("cached rows", [min(10, length // 2)], _PLAIN, 4),
        *(drafting if k else []),
        lambda: builder.text("forked threads beside a request", threads, chains, 6, forks=(1, 3)),
        long_context,
    ]


def _drafted_rows(manifest: Manifest, limits: EngineLimits) -> int:
    """The rows of the widest default draft, within the limits."""
    return min(Decoding().draft_config(manifest.drafts).rows, limits.rows, limits.length - _SPARE)


def _more_cases(builder: _Builder, manifest: Manifest, limits: EngineLimits) -> list[Callable[[], None]]:
    """Functions that record the other cases: every row count of default drafts, and layouts of requests and of slots."""
    k, length, layout = manifest.drafts.mask_slots, limits.length, manifest.drafts.layout
    chains, single = (DraftConfig(slots, "chain", mask_layout=layout) for slots in (k, 1))
    longest, third = length - _SPARE, [min(size, length // 2) for size in (5, 19)]
    drafted = _drafted_rows(manifest, limits)

    def every_row_count() -> None:
        for counts in builder.shuffled(range(1, drafted + 1), longest):
            builder.text(f"prompts in calls of 1 to {drafted} rows", [sum(counts)], _PLAIN, 2, widths=counts, echo=0)

    def random_tree(number: int) -> None:
        builder.tree(f"random tree {number}", min(9, length // 2), builder.random_tree(12))

    def across(edge: int) -> None:
        builder.text(f"across slot {edge}", [edge - 2], _PLAIN, 5, widths=builder.drawn(edge - 2, drafted))

    two = [min(7, length // 2), min(33, length // 2)]
    idle = [third[0], 0, third[1]]
    return [
        every_row_count,
        *([lambda: builder.text("SPACE steps, k = 1", [min(17, length // 2)], single, 4)] if k else []),
        *(partial(random_tree, number) for number in (1, 2, 3)),
        lambda: builder.text("two requests, padding rows", two, chains, 4, accept_all=True),
        lambda: builder.text("an idle request between two", idle, chains, 4, cancel_after=2),
        *(partial(across, edge) for edge in (VISIBLE_STEP, 2 * VISIBLE_STEP) if edge + 4 < length),
        *(
            [lambda: builder.text("up to the last position", [longest], chains, length, accept_all=True)]
            if length == manifest.max_positions
            else []
        ),
    ]


@dataclass(frozen=True)
class _ForksAt:
    """A greedy selector that selects [Fork] at given positions of the root thread."""

    greedy: Greedy
    fork: int
    positions: frozenset[int]

    def token(self, logits: NDArray[np.float32], thread: TokenSequence, ahead: Sequence[int]) -> int:
        forks = not thread.path and len(thread.tokens) + len(ahead) in self.positions
        return self.fork if forks else self.greedy.token(logits, thread, ahead)

    def candidates(
        self, logits: NDArray[np.float32], thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        return self.greedy.candidates(logits, thread, position, most)


@dataclass(frozen=True)
class _AcceptAll:
    """A selector that accepts every draft: the token at each position is fixed, whatever the logits are.

    So rows are accepted after rejected ones, and an append engine has to move their KV slots.
    """

    tokens: Array

    def token(self, logits: NDArray[np.float32], thread: TokenSequence, ahead: Sequence[int]) -> int:
        return self._at(len(thread.tokens) + len(ahead))

    def candidates(
        self, logits: NDArray[np.float32], thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        return tuple(Candidates((self._at(position + number),), (1.0,)) for number in range(len(logits)))

    def _at(self, position: int) -> int:
        return int(self.tokens[position % self.tokens.size])


@dataclass
class _Scripted:
    """A drafter with one fixed draft per step."""

    remaining_drafts: list[Draft]
    drafts: bool = True

    def draft(self, thread: TokenSequence, remaining: int, rows: int, sharing: Sharing) -> Draft:
        return self.remaining_drafts.pop(0)

    def learn(self, part: Part, verdict: Verdict) -> None:
        """Learn nothing: the drafts are fixed."""


class _Builder:
    def __init__(self, recorder: Recorder, manifest: Manifest, random: np.random.Generator) -> None:
        self._recorder = recorder
        self._random = random
        self.skipped: list[str] = []
        self._max_positions = manifest.max_positions
        self._mask_layout = manifest.drafts.layout
        tokens = manifest.tokens
        special = {*tokens.forbidden, *tokens.fork_ids}
        self._ordinary_tokens = np.array(
            [i for i in range(manifest.signature.vocab_size) if i not in special], np.int64
        )
        # A model without [Fork] and [Child] gets two ordinary tokens for them: an engine treats all tokens alike.
        fork, child = (int(token) for token in self._ordinary_tokens[:2])
        forking = (fork, child) if tokens.fork is None else (tokens.fork, tokens.child)
        self._tokens = TokenIds(tokens.mask, *forking)

    def text(
        self,
        case: str,
        lengths: Sequence[int],
        draft_config: DraftConfig,
        steps: int,
        widths: Iterable[int] = (),
        echo: int | None = None,
        forks: Sequence[int] = (),
        accept_all: bool = False,
        cancel_after: int | None = None,
    ) -> None:
        """Record requests with prompts of these lengths over a number of decode steps, batched; length 0 skips a request.

        The first calls have at most `widths` prompt rows, the others as many as the engines take, with logits of the rows
        from position `echo` on. The first request forks at these positions after its prompt, and is cancelled after
        `cancel_after` steps. With `accept_all` every draft is accepted.
        """
        if len(lengths) > self._recorder.requests:
            self.skipped.append(f"{case}: an engine takes fewer requests per call")
            return
        self._recorder.case = case
        forking = self._forks_at(lengths[0] + offset for offset in forks)
        groups = {
            index: self._sequences(
                length,
                draft_config,
                forking if forks and not index else _AcceptAll(self._ordinary_tokens) if accept_all else self._greedy(),
                echo=echo,
            )
            for index, length in enumerate(lengths)
            if length
        }
        remaining_widths, first = iter(widths), groups[0]
        decoded = dict.fromkeys(groups, 0)  # decode steps of each request
        while any(sequences.live and decoded[index] < steps for index, sequences in groups.items()):
            if decoded[0] == cancel_after and first.live:
                first.finish("cancelled")
            rows = min(next(remaining_widths, PREFILL_ROWS), self._recorder.rows)
            live = [RequestStep(sequences, index, rows) for index, sequences in groups.items() if sequences.live]
            step(self._recorder, live)
            for index, sequences in groups.items():
                decoded[index] += not sequences.prefilling

    def tree(self, case: str, length: int, draft: Draft) -> None:
        """Record a prompt, then one step that verifies this draft."""
        self._recorder.case = case
        tokens = self._tokens if self._tokens.mask else replace(self._tokens, mask=(0,))
        assert length <= self._recorder.rows, "a prompt in several chunks would use up the drafts"
        drafts = _Scripted([PLAIN, draft] if length > 1 else [draft])
        sequences = self._sequences(length, _PLAIN, self._greedy(), tokens, drafts)
        for _ in range(len(drafts.remaining_drafts)):
            step(self._recorder, [RequestStep(sequences, 0, min(PREFILL_ROWS, self._recorder.rows))])

    def shuffled(self, counts: Iterable[int], most: int) -> list[list[int]]:
        """The row counts in random order, in groups whose sums are at most `most`."""
        groups: list[list[int]] = [[]]
        for count in self._random.permutation(list(counts)).tolist():
            if sum(groups[-1]) + count > most:
                groups.append([])
            groups[-1].append(count)
        return groups

    def drawn(self, total: int, least: int) -> list[int]:
        """Row counts above `least`, if the engines take as many, that sum up to `total`; small ones are more frequent."""
        most = min(self._recorder.rows, total)
        low = np.log(least + 1 if least < most else 1)
        counts: list[int] = []
        while (remaining := total - sum(counts)) > 0:
            counts.append(min(remaining, int(np.exp(self._random.uniform(low, np.log(most + 1))))))
        return counts

    def chain(self, count: int) -> Draft:
        """A chain of random candidates, each with logits."""
        return chain(self._random_tokens(count).tolist(), 0, count + 2)

    def random_tree(self, nodes: int) -> Draft:
        """Random candidates, each a child of any earlier one, with up to two mask slots after each."""
        parents = tuple(int(self._random.integers(0, node + 1)) for node in range(nodes))
        most = 3 if self._tokens.mask else 1
        masks = tuple(int(count) for count in self._random.integers(0, most, nodes + 1))
        return Draft(tuple(self._random_tokens(nodes).tolist()), parents, masks, mask_layout=self._mask_layout)

    def _random_tokens(self, count: int) -> NDArray[np.int64]:
        chosen: NDArray[np.int64] = self._random.choice(self._ordinary_tokens, count)
        return chosen

    def _forks_at(self, positions: Iterable[int]) -> _ForksAt:
        assert self._tokens.fork is not None
        return _ForksAt(self._greedy(), self._tokens.fork, frozenset(positions))

    def _greedy(self) -> Greedy:
        return Greedy(Bans(frozenset((*self._tokens.forbidden, *self._tokens.fork_ids))))

    def _sequences(
        self,
        length: int,
        draft_config: DraftConfig,
        selector: TokenSelector,
        tokens: TokenIds | None = None,
        drafter: Drafter | None = None,
        echo: int | None = None,
    ) -> SequenceGroup:
        capacity = self._recorder.capacity
        planner = DraftPlanner(relative_costs(0.0))  # rows count as free, so drafts are as wide as allowed
        return SequenceGroup(
            prompt=self._random_tokens(length).tolist(),
            capacity=capacity,
            lowering=self._recorder.signature.lowering,
            tokens=tokens or self._tokens,
            selector=selector,
            max_length=min(length + 64, self._max_positions + 1),  # the last token is not fed
            max_total=capacity,
            draft_config=draft_config,
            drafter=drafter or drafter_for(draft_config, planner),
            max_rows=self._recorder.rows,
            max_threads=3,
            echo=echo,
        )
