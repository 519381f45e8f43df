"""Cases: the calls that a runtime really makes, recorded from its own loop over a reference engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.exporter.accuracy import Feed
from spaceport.graphs.manifest import Manifest, TokenIds
from spaceport.graphs.signature import VISIBLE_STEP, Signature
from spaceport.runtime.draft import Draft, chain
from spaceport.runtime.engine import Batch, Engine
from spaceport.runtime.loop import step
from spaceport.runtime.plan import Plan, plan_thread
from spaceport.runtime.request import Request, new_thread
from spaceport.runtime.sampling import greedy
from spaceport.runtime.slots import Moves, Slots

REQUESTS = 3
DEFAULT_LONG = 1024
_CHUNK = 256

Array = NDArray[Any]


class Recorder:
    """An engine that passes every call on to another one and notes it down."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.signature: Signature = engine.signature
        self.capacity, self.requests, self.rows, self.device = (
            engine.capacity,
            engine.requests,
            engine.rows,
            engine.device,
        )
        self.feeds: list[Feed] = []
        self.case = ""
        self._moves: list[tuple[int, int, int]] = []  # request, source, target: since the last call

    def run(self, batch: Batch) -> NDArray[np.float32]:
        arrays: dict[str, Array] = {name: array.copy() for name, array in batch.arrays(self.signature)}
        arrays["first"] = np.array([batch.first], np.int64)
        arrays["moves"] = np.array(self._moves, np.int64).reshape(-1, 3)
        self._moves = []
        logits = self.engine.run(batch)
        self.feeds.append(Feed(self.case, arrays, logits.copy()))
        return logits

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        for request, (sources, targets) in enumerate(moves, first):
            self._moves.extend((request, int(s), int(t)) for s, t in zip(sources, targets, strict=True))
        self.engine.move(first, moves)

    def close(self) -> None:
        self.engine.close()


def replay(engine: Engine) -> Callable[[Any], NDArray[np.float32]]:
    """An engine as something that takes the recorded calls."""

    def call(arrays: dict[str, Array]) -> NDArray[np.float32]:
        names = [tensor.name for tensor in engine.signature.rows]
        batch = Batch(first=int(arrays["first"][0]), **{name: np.ascontiguousarray(arrays[name]) for name in names})
        moves = arrays["moves"]
        for request in np.unique(moves[:, 0]):
            own = moves[moves[:, 0] == request]
            engine.move(int(request), [(own[:, 1].copy(), own[:, 2].copy())])
        return engine.run(batch)

    return call


def record(reference: Engine, manifest: Manifest, length: int, seed: int = 0) -> list[Feed]:
    """The calls of every case, in an order in which any engine can follow them."""
    recorder = Recorder(reference)
    builder = _Builder(recorder, manifest, np.random.default_rng(seed))
    k = manifest.max_mask_slots
    builder.tree("prompt, every row", 1, builder.line(min(23, length - 2)))
    builder.text("prompt in chunks", [length // 4 + 1], 0, 1, chunk=max(1, length // 16))
    builder.text("cached rows", [min(10, length // 2)], 0, 4)
    if k:
        builder.text(f"SPACE steps, k = {k}", [min(17, length // 2)], k, 4)
        builder.text("SPACE steps, k = 1", [min(17, length // 2)], 1, 4)
    for number in range(3):
        builder.tree(f"random tree {number + 1}", min(9, length // 2), builder.random_tree(12))
    builder.text("two requests, padding rows", [min(7, length // 2), min(33, length // 2)], k, 4)
    builder.text("an idle request between two", [min(5, length // 2), 0, min(19, length // 2)], k, 4)
    for edge in (VISIBLE_STEP, 2 * VISIBLE_STEP):
        if edge + 4 < length:
            builder.text(f"across slot {edge}", [edge - 2], 0, 5)
    builder.text(f"long context, {length - 8} tokens", [length - 8], k, 3, chunk=_CHUNK)
    return recorder.feeds


class _Builder:
    def __init__(self, recorder: Recorder, manifest: Manifest, random: np.random.Generator) -> None:
        self._recorder = recorder
        self._tokens = replace(manifest.tokens, end=()) if manifest.tokens.mask else TokenIds()
        self._random = random
        unwritable = set(manifest.tokens.unwritable)
        self._words = np.array([i for i in range(manifest.signature.vocab_size) if i not in unwritable], np.int64)

    def text(self, case: str, lengths: Sequence[int], mask_slots: int, steps: int, chunk: int = 512) -> None:
        """Prompts of these lengths fed and continued by so many steps, all in the same calls; 0 leaves one out."""
        self._recorder.case = case
        requests = [self._request(i, n, mask_slots, chunk) for i, n in enumerate(lengths) if n]
        while any(request.statistics.steps < steps and request.live for request in requests):
            step(self._recorder, [request for request in requests if request.live])

    def tree(self, case: str, length: int, draft: Draft) -> None:
        """A prompt, then one step over a draft of any shape."""
        self._recorder.case = case
        request = self._request(0, length, 0, 512)
        (thread,) = request.threads
        if length > 1:
            step(self._recorder, [request])
        tokens = self._tokens if self._tokens.mask else TokenIds(mask=(0,))
        plan = Plan((plan_thread(thread, draft, tokens, 512),))
        request.plan = lambda: plan  # type: ignore[method-assign]
        step(self._recorder, [request])

    def line(self, count: int) -> Draft:
        """A chain of candidates: the logits of each are asked for."""
        return chain(self._some(count).tolist(), 0, count + 2)

    def random_tree(self, nodes: int) -> Draft:
        """Candidates that hang from any before them, with up to two mask slots behind each."""
        parents = tuple(int(self._random.integers(0, node + 1)) for node in range(nodes))
        most = 3 if self._tokens.mask else 1
        masks = tuple(int(count) for count in self._random.integers(0, most, nodes + 1))
        return Draft(tuple(self._some(nodes).tolist()), parents, masks)

    def _some(self, count: int) -> NDArray[np.int64]:
        chosen: NDArray[np.int64] = self._random.choice(self._words, count)
        return chosen

    def _request(self, index: int, length: int, mask_slots: int, chunk: int) -> Request:
        capacity = self._recorder.capacity
        return Request(
            index=index,
            slots=Slots(capacity, self._recorder.signature.lowering),
            threads=[new_thread(self._some(length).tolist(), capacity)],
            tokens=self._tokens,
            choose=greedy(self._tokens.unwritable),
            listener=lambda thread, token, drafted: False,
            limit=length + 64,
            mask_slots=mask_slots,
            chunk=chunk,
        )
