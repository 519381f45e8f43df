"""Exactness and step costs of an engine: measured once for a machine and a bundle, and stored in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from operator import attrgetter
from pathlib import Path
from time import perf_counter, thread_time
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.exactness import Exactness, tolerated_noise
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.installation import installed_version
from spaceport.graphs.contract.json_fields import JsonField, Rules, read
from spaceport.kernels.native_library import instruction_set, library_path
from spaceport.runtime.backends.machine import cpu_name, instruction_sets, usable_cpus
from spaceport.runtime.backends.private_files import cache_folder, read_private, replace_private
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.costs import CostSource, Points, StepCosts, ascending, lowest, relative_costs
from spaceport.runtime.engine import Batch, Engine, EngineOptions

_SCHEMA = 7
_TIMES = 3  # openings of a bundle that measure its step costs: other processes may disturb one of them
_PACKAGES = ("spaceport", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "torch")
_MOST_BYTES = 100_000  # maximum size of a file

# Kernels change at these numbers of rows: one row, few, the rows of a tile, one more, and those of wide drafts.
_COMPARED_ROWS = (2, 9, 33, 3, 8)  # the most informative first
_ALWAYS_COMPARED = 2  # of them, always compared
_EXACTNESS_SECONDS = 0.15  # no further width is compared after this time
_CONTEXT, _COMPARED_VISIBLE = 31, 64  # KV slots
_LAYOUTS = 8  # orders of the KV slots
# Attention adds floating-point numbers in the order of the slots. Rounding of activations can hide that from all rows here,
# never from all rows of a text. Attention over 8-bit keys and values adds integers.
_LEAST_SLOTS = 1e-7

SECONDS = 2.0  # of a measurement; the widths in _NEEDED are timed a few times in any case
_ROUNDS, _FEWEST = 7, 3  # calls of each shape: usual and minimum number
_MOST_ROUNDS = 60
_QUICK = SECONDS / 4  # more rounds are run for this time: short calls are disturbed more often
_VISIBLE, _FAR = 256, 1024  # KV slots
# The most informative first: with a large model there is no time for all. GPU times jump at 8/9, 17, 33 and 64 rows;
# 8-bit products with VNNI take as long for 3, 5 and 7 rows as for one more.
_SINGLE = (1, 4, 16, 9, 36, 2, 6, 3, 5, 24, 12, 64, 8, 7, 17, 33)
_BATCHED = (1, 4, 9)
_FAR_ROWS = (1, 16)
_MOST_REQUESTS = 8  # maximum requests of a call: more of them take long and show little more
_NEEDED = (1, 4)  # always timed: with one point alone, rows would look free
_LEAST_ROW = 0.01  # minimum cost of a further row on a CPU, relative to a one-row call; less is a disturbed measurement


# Of graphs that native operators compute: their sums are integers, or are added in one order.
EXACT = Exactness(0.0, 0.0, 0.0, (1,))


@dataclass(frozen=True)
class Measurements:
    """What was measured on an engine."""

    exactness: Exactness
    table: StepCosts | None = None  # None: it was opened with other step costs than measured ones
    times: int = 0  # measurements of which the table has the lowest times
    schema: int = _SCHEMA


class _Shape(NamedTuple):
    rows: int
    requests: int
    visible: int


def measure_exactness(engine: Engine, tolerated: float) -> Exactness:
    """The exactness of an engine that no request uses; its first KV slots are zero afterwards."""
    started = perf_counter()
    visible = min(_COMPARED_VISIBLE, engine.capacity)
    context = min(_CONTEXT, visible // 2, engine.rows)
    most = min(visible - context, engine.rows)
    order, causal = np.arange(context), np.tri(context, visible, dtype=np.bool_)
    engine.run(
        _batch(engine, _tokens(engine, context), order, order, causal, order[-1:])
    )  # a prompt in the lowest slots
    (alone,) = _logits(engine, 1, context, visible)
    rows, compared = 0.0, list[int]()
    for width in (width for width in _COMPARED_ROWS if width <= most):
        if len(compared) >= _ALWAYS_COMPARED and perf_counter() - started > _EXACTNESS_SECONDS:
            break
        rows = max(rows, _noise(_logits(engine, width, context, visible), alone[None]))
        compared.append(width)
    count = max(compared, default=1)
    in_order = _logits(engine, count, context, visible, varied=True)
    slots = _LEAST_SLOTS if engine.signature.kv_cache == "same" else 0.0
    for seed in range(_LAYOUTS):
        if seed and perf_counter() - started > _EXACTNESS_SECONDS:
            break
        engine.copy(0, 0, np.random.default_rng(seed).permutation(context))
        slots = max(slots, _noise(_logits(engine, count, context, visible, varied=True), in_order))
    engine.clear(0)
    return Exactness(rows, slots, tolerated, tuple(sorted(compared)))


def _logits(engine: Engine, rows: int, context: int, visible: int, *, varied: bool = False) -> NDArray[np.float32]:
    """Logits of rows behind a prompt that see nothing else: all of the same token, or each of another one."""
    mask = np.broadcast_to(np.arange(visible) < context, (rows, visible))
    tokens = _tokens(engine, rows)[::-1] if varied else _tokens(engine, 1).repeat(rows)
    batch = _batch(engine, tokens, np.full(rows, context), context + np.arange(rows), mask, np.arange(rows))
    logits: NDArray[np.float32] = engine.run(batch)[0, : rows * engine.signature.lines].reshape(rows, -1).copy()
    return logits


def _batch(
    engine: Engine,
    tokens: NDArray[np.int64],
    positions: NDArray[np.int64],
    slots: NDArray[np.int64],
    mask: NDArray[np.bool_],
    wanted: NDArray[np.int64],
    requests: int = 1,
) -> Batch:
    """A call of requests that all have these rows."""
    ids, places, into, lines = (np.tile(array, (requests, 1)) for array in (tokens, positions, slots, wanted))
    masks = np.tile(mask, (requests, 1, 1, 1))
    return Batch(0, ids, places, into, masks, lines, masks if engine.signature.window else None)


def _tokens(engine: Engine, count: int) -> NDArray[np.int64]:
    """Token ids that are spread over the vocabulary."""
    return (7 + 7919 * np.arange(count, dtype=np.int64)) % engine.signature.vocab_size


def _noise(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The largest difference, relative to the largest logit of its row."""
    if np.isnan(got).any() or np.isnan(expected).any():
        return 1.0  # as wrong as can be
    if got.tobytes() == np.broadcast_to(expected, got.shape).tobytes():
        return 0.0
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    return max(float((np.abs(got - expected) / np.maximum(largest, 1e-30)).max()), float(np.finfo(np.float32).tiny))


def measure_step_costs(
    engine: Engine,
    mask: int = 0,
    budget: float = SECONDS,
    clock: Callable[[], float] = perf_counter,
    cpu_clock: Callable[[], float] = thread_time,
) -> StepCosts:
    """The costs of an engine's calls; shapes alternate, so that a busy machine affects all alike.

    The last of several rows has the token `mask`: with a mask row, its adapters take part in a call. Calls on a CPU are
    timed with the CPU time of this thread: other processes do not add to it, and it waits actively for the engine's
    other threads.
    """
    deadline = clock() + budget
    timer = cpu_clock if engine.device == "cpu" else clock
    times: dict[_Shape, list[float]] = {}
    for shape in _shapes(
        engine
    ):  # the first call of a shape compiles: its time does not count; CUDA graphs are captured in later rounds
        again = _FEWEST * sum(map(min, times.values()))  # time of a few more rounds
        if shape.rows not in _NEEDED and clock() + again + 2 * max(map(min, times.values())) > deadline:
            break
        _call(engine, shape, mask, timer)
        times[shape] = [_call(engine, shape, mask, timer)]
    started = clock()
    for number in count():
        if (number >= _ROUNDS and clock() - started > _QUICK) or number == _MOST_ROUNDS:
            break
        buffers: tuple[int, int] | None = None
        for shape in sorted(times, key=attrgetter("visible", "requests", "rows")):
            seconds = times[shape]
            if clock() + seconds[-1] > deadline and (number >= _FEWEST - 1 or shape.rows not in _NEEDED):
                continue
            if buffers != shape[1:]:  # a call with other KV buffers than the one before binds them
                _call(engine, shape, mask, timer)
                buffers = shape[1:]
            seconds.append(_call(engine, shape, mask, timer))
    return _table(engine, times)


def idle(engine: Engine, rows: int, requests: int = 1, visible: int = _VISIBLE, mask: int = 0) -> Batch:
    """A call that computes like any other and writes to unused slots; the last of several rows has the token `mask`."""
    visible = min(visible, engine.capacity)
    zeros, order = np.zeros(rows, np.int64), np.arange(rows)
    tokens = np.where(order[::-1], 0, mask if rows > 1 else 0)
    seen = np.broadcast_to(np.arange(visible) == 0, (rows, visible))
    return _batch(engine, tokens, zeros, visible - rows + order, seen, order, requests)


def batched_requests(engine: Engine) -> int:
    """The number of requests in the batched calls of an engine's table."""
    return min(engine.requests, _MOST_REQUESTS)


def _shapes(engine: Engine) -> Iterator[_Shape]:
    near, far = min(_VISIBLE, engine.capacity), min(_FAR, engine.capacity)
    for rows in _SINGLE:
        if rows <= min(engine.rows, near):
            yield _Shape(rows, 1, near)
            if rows in _BATCHED and engine.requests > 1:
                yield _Shape(rows, batched_requests(engine), near)
    for rows in _FAR_ROWS if far >= 2 * near else ():
        if rows <= min(engine.rows, near):
            yield _Shape(rows, 1, far)


def _call(engine: Engine, shape: _Shape, mask: int, clock: Callable[[], float]) -> float:
    """Seconds of a call as decoding makes it: with the tokens selected on the device where that is possible."""
    batch = idle(engine, shape.rows, shape.requests, shape.visible, mask)
    step = engine.select if engine.selects else engine.run
    started = clock()
    step(batch)
    return max(clock() - started, 1e-9)


def _table(engine: Engine, times: dict[_Shape, list[float]]) -> StepCosts:
    seconds = {shape: min(calls) for shape, calls in times.items()}  # disturbances only make calls longer
    near = min(shape.visible for shape in seconds)
    least = _LEAST_ROW if engine.device == "cpu" else 0.0
    single = _points(seconds, 1, near, least)
    further = {
        shape.rows: max(0.0, (time - seconds[shape._replace(visible=near)]) / (shape.visible - near))
        for shape, time in seconds.items()
        if shape.visible > near
    }
    slot = further.get(1, 0.0)
    rows = max(further, default=1)
    row_slot = max(0.0, further[rows] - slot) / (rows - 1) if rows > 1 else 0.0
    requests = batched_requests(engine)
    batched = _points(seconds, requests, near, least) if requests > 1 else ()
    return StepCosts(near, single, requests, batched, slot, row_slot)


def _points(seconds: dict[_Shape, float], requests: int, visible: int, least: float) -> Points:
    """The points of calls of one kind, of which each row costs at least `least`."""
    points = ascending(
        (shape.rows, time) for shape, time in seconds.items() if (shape.requests, shape.visible) == (requests, visible)
    )
    return tuple((rows, max(time, points[0][1] * (1 + least * requests * (rows - 1)))) for rows, time in points)


def measured_here(
    bundle: Bundle, backend: str, engine: Engine, options: EngineOptions, source: CostSource
) -> tuple[StepCosts, Exactness]:
    """The step costs of an opened engine, which are measured here, standard constants or free, and its exactness."""
    if source not in get_args(CostSource):
        raise OptionFault(f"step_costs is {source!r}: expected {', '.join(get_args(CostSource))}")
    file = _file(bundle, backend, engine.device, options)
    stored = load(file)
    exactness = _known(bundle, backend, stored)
    if exactness is None:
        exactness = measure_exactness(engine, tolerated_noise(bundle.manifest, engine.device))
    table, times = (None, 0) if stored is None else (stored.table, stored.times)
    if source == "measured" and times < _TIMES:
        measured = measure_step_costs(engine, next(iter(bundle.manifest.tokens.mask), 0))
        table, times = measured if table is None else lowest(table, measured), times + 1
    if (measurements := Measurements(exactness, table, times)) != stored:
        # full disk, read-only folder or that of another user: they are measured again next time
        with suppress(OSError):
            replace_private(file, json.dumps(asdict(measurements)).encode())
    if source == "measured" and table is not None:
        return table, exactness
    return relative_costs(engine.costs.row if source == "standard" else 0.0), exactness


def known_exactness(bundle: Bundle, backend: str, device: str, options: EngineOptions) -> Exactness | None:
    """The exactness that was measured when a bundle was opened here before, or needs no measurement; else None."""
    return _known(bundle, backend, load(_file(bundle, backend, device, options)))


def _known(bundle: Bundle, backend: str, stored: Measurements | None) -> Exactness | None:
    # native operators, if they compute all of the graph and are compiled, are exact by construction
    if bundle.manifest.signature.has_scales and backend == "onnxruntime" and library_path() is not None:
        return EXACT
    return None if stored is None else stored.exactness


def load(file: Path) -> Measurements | None:
    """The measurements in a file; None if there are no valid ones, or if another user may have written them."""
    try:
        content = json.loads(read_private(file, _MOST_BYTES) or b"")
        stored: Measurements = read(JsonField(content, "measurements", Rules(InputFault)), Measurements)
    except (ValueError, RecursionError):
        return None
    return stored if stored.schema == _SCHEMA else None


def _file(bundle: Bundle, backend: str, device: str, options: EngineOptions) -> Path:
    """The file of measurements, named by a digest of everything that they depend on."""
    native = None
    if bundle.manifest.native:
        library = library_path()  # its instruction set, and when it was compiled
        compiled = None if library is None else (instruction_set(library), library.stat().st_mtime_ns)
        native = (compiled, bundle.copies_weights)
    facts = (
        bundle.manifest.graph,
        backend,
        device,
        (options.capacity, options.requests, options.threads),
        [(package, installed_version(package) or "") for package in _PACKAGES],
        (cpu_name(), instruction_sets(), usable_cpus()),
        native,
    )
    return cache_folder() / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"
