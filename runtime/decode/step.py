"""Step: one step of the decode loop: plan, run, verify, keep; and the arrays of its engine calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import LibraryPanic, is_panic
from spaceport.graphs.contract.signature import Signature, visible_length
from spaceport.runtime.decode.draft import Draft
from spaceport.runtime.decode.plan import Plan, accept, sees, within
from spaceport.runtime.decode.planner import SharedCall
from spaceport.runtime.decode.sequence_group import ScheduledStep, SequenceGroup, VerifiedStep
from spaceport.runtime.engine import NO_MOVES, PREFILL_ROWS, Batch, Engine, SelectedRows, selecting

_NO_ROWS = np.zeros((1, 1), np.int64)  # a graph returns the logits of at least one row

Call = Sequence[ScheduledStep]
Grouping = Callable[[Sequence[ScheduledStep]], Sequence[Call]]
# Called with the index of a request that failed, and its error; the other requests of the step continue. When a whole
# call fails, it is called for each request of the call, also for those that failed before or ended in this step.
OnFailure = Callable[[int, Exception], None]
OnCall = Callable[[], None]  # called after each engine call


class StepInput(NamedTuple):
    """A request in a step."""

    request: SequenceGroup
    engine_index: int = 0  # index of its KV buffers in the engine
    prefill_rows: int = PREFILL_ROWS  # maximum known tokens of a thread to feed in this step


class Ran(NamedTuple):
    """The result of one engine call."""

    first: int  # index of the first request of the call
    requests: int  # number of requests from the first to the last one, idle ones between them included
    logits: NDArray[np.float32] | list[SelectedRows]  # requests x lines x vocabulary, or the best tokens instead
    seconds: float
    lines: int = 1  # of logits for each needed row: its own, then those of the heads


def pack(engine: Engine, call: Sequence[ScheduledStep]) -> Batch:
    """The arrays of one call; its steps are in the order of their indices."""
    if len(call) == 1 and len(call[0].plan.parts) == 1:
        return _pack_one(engine.signature, call[0])
    return _pack_many(engine, call)


def _pack_many(engine: Engine, call: Sequence[ScheduledStep]) -> Batch:
    """The arrays of a call with several threads or requests, padded to the widest plan.

    Padding rows see slot 0, write to a slot that no row sees, and their results are not read.
    """
    signature = engine.signature
    first = call[0].engine_index
    count = call[-1].engine_index - first + 1
    rows = max(step.plan.rows for step in call)
    wanted = max(1, *(step.plan.wanted for step in call))
    visible = visible_length(max(step.request.slots.height for step in call))
    batch = Batch(
        first=first,
        input_ids=np.zeros((count, rows), np.int64),
        position_ids=np.zeros((count, rows), np.int64),
        slot_ids=np.full((count, rows), engine.capacity - 1, np.int64),
        attention_mask=np.zeros((count, 1, rows, visible), np.bool_),
        logit_rows=np.zeros((count, wanted), np.int64),
        sliding_attention_mask=np.zeros((count, 1, rows, visible), np.bool_) if signature.window else None,
    )
    if count > len(call) or len({step.plan.rows for step in call}) > 1:
        _pad(batch, engine)
    for step in call:
        _fill(batch, signature, step)
    return batch


def _pack_one(signature: Signature, step: ScheduledStep) -> Batch:
    """The same as `_pack_many` for one thread of one request: without padding, the plan's own arrays are used."""
    (part,) = step.plan.parts
    slots = step.request.slots
    mask = sees(step.plan, step.slots, visible_length(slots.height))
    near = None
    if signature.window is not None:
        near = within(signature.window, mask, part.positions, slots.positions)[None, None]
    return Batch(
        first=step.engine_index,
        input_ids=part.tokens[None],
        position_ids=part.positions[None],
        slot_ids=step.slots[None],
        attention_mask=mask[None, None],
        logit_rows=part.rows_wanted[None] if part.rows_wanted.size else _NO_ROWS,
        sliding_attention_mask=near,
    )


def split(plan: Plan, logits: NDArray[np.float32], lines: int = 1) -> list[NDArray[np.float32]]:
    """The logits of one request, L x V, part by part; each row has `lines` lines: its own, then those of the heads."""
    if len(plan.parts) == 1:
        return [logits[: plan.parts[0].rows_wanted.size * lines]]
    parts, first = [], 0
    for part in plan.parts:
        last = first + part.rows_wanted.size * lines
        parts.append(logits[first:last])
        first = last
    return parts


def _pad(batch: Batch, engine: Engine) -> None:
    batch.attention_mask[..., 0] = True
    if batch.sliding_attention_mask is not None:
        batch.sliding_attention_mask[..., 0] = True
    if engine.signature.lowering == "append":
        rows = batch.slot_ids.shape[1]
        batch.slot_ids[:] = np.arange(engine.capacity - rows, engine.capacity)


def _fill(batch: Batch, signature: Signature, step: ScheduledStep) -> None:
    line, plan, rows = step.engine_index - batch.first, step.plan, step.plan.rows
    positions = plan.positions
    visible = batch.attention_mask.shape[-1]
    wanted, start = 0, 0
    for part in plan.parts:
        end = start + part.layout.rows
        batch.input_ids[line, start:end] = part.tokens
        rows_wanted = part.rows_wanted
        batch.logit_rows[line, wanted : wanted + rows_wanted.size] = rows_wanted + start
        start, wanted = end, wanted + rows_wanted.size
    batch.position_ids[line, :rows] = positions
    batch.slot_ids[line, :rows] = step.slots
    if signature.lowering == "append":
        batch.slot_ids[line] = step.slots[0] + np.arange(batch.slot_ids.shape[1])
    mask = sees(plan, step.slots, visible, batch.attention_mask[line, 0, :rows])
    if batch.sliding_attention_mask is not None and signature.window is not None:
        near = within(signature.window, mask, positions, step.request.slots.positions)
        batch.sliding_attention_mask[line, 0, :rows] = near


def one_call(steps: Sequence[ScheduledStep]) -> Sequence[Call]:
    """All requests in one call of the engine."""
    return [steps] if steps else []


def step(
    engine: Engine,
    inputs: Sequence[StepInput],
    group: Grouping = one_call,
    on_failure: OnFailure | None = None,
    on_call: OnCall | None = None,
) -> float:
    """Feed a prefill chunk or generate at least one token in every live thread; returns the seconds spent in the engine.

    `inputs` are in the order of their indices. Without `on_failure`, an error of a request is raised.
    """
    seconds = 0.0
    for call in group(plan(inputs, on_failure)):
        try:
            ran = run(engine, call)
            seconds += ran.seconds
            if on_call is not None:
                on_call()
            verified = verify(call, ran, on_failure)
            keep(engine, ran, verified, on_failure)
        except BaseException as error:
            if not _reported(call, error, on_failure):
                raise
    return seconds


def plan(inputs: Sequence[StepInput], on_failure: OnFailure | None = None) -> list[ScheduledStep]:
    """The rows of each request, and a KV slot for each row."""
    steps = []
    for step_input, drafts in draft(inputs, on_failure):
        request, index, prefill_rows = step_input
        try:
            planned = request.plan(prefill_rows, drafts)
            slots = request.slots.take(planned.positions, planned.slot_order)
            steps.append(ScheduledStep(request, index, planned, slots))
        except BaseException as error:
            if not _reported((step_input,), error, on_failure):
                raise
    return steps


def draft(inputs: Sequence[StepInput], on_failure: OnFailure | None = None) -> list[tuple[StepInput, list[Draft]]]:
    """The drafts of each request that has not failed; requests in one call get the width that pays for all of them."""
    decoding = len([step_input for step_input in inputs if not step_input.request.prefilling])
    call = SharedCall(decoding) if decoding > 1 else None
    drafted, shared = [], []
    for step_input in inputs:
        request = step_input.request
        try:
            drafts = request.draft(step_input.prefill_rows, None if request.prefilling else call)
            drafted.append((step_input, drafts))
            if not request.prefilling:
                shared.append(drafts)
        except BaseException as error:
            if not _reported((step_input,), error, on_failure):
                raise
    if call is not None:
        fixed = [drafts for drafts in shared if len(drafts) > 1 or not drafts[0].worth]
        call.decide(max([sum([own.rows for own in drafts]) for drafts in fixed], default=1))
        for drafts in shared:
            if len(drafts) == 1:
                drafts[0] = drafts[0].cut(call.width, "shared_call")
    return drafted


def run(engine: Engine, call: Call) -> Ran:
    """Run a call; its time counts for each of its requests."""
    batch = pack(engine, call)
    started = perf_counter()
    logits = _logits(engine, call, batch)
    seconds = perf_counter() - started
    requests, rows = batch.input_ids.shape
    for scheduled in call:
        statistics = scheduled.request.statistics
        statistics.engine_seconds += seconds
        statistics.padding_rows += rows - scheduled.plan.rows
    call[0].request.statistics.padding_rows += rows * (requests - len(call))  # idle requests between them
    return Ran(batch.first, requests, logits, seconds, engine.signature.lines)


def verify(call: Call, ran: Ran, on_failure: OnFailure | None = None) -> list[VerifiedStep]:
    """The accepted rows of each request, by the tokens that the model itself selects."""
    verified = []
    for scheduled in call:
        try:
            outcome = _verified(scheduled, ran)
            for observer in scheduled.request.observers:
                observer.on_step(outcome)
            verified.append(outcome)
        except BaseException as error:
            if not _reported((scheduled,), error, on_failure):
                raise
    return verified


def keep(engine: Engine, ran: Ran, verified: Sequence[VerifiedStep], on_failure: OnFailure | None = None) -> None:
    """Retain the slots of accepted rows, release those of rejected rows, and append the accepted tokens."""
    moves = [NO_MOVES] * ran.requests
    for outcome in verified:
        try:
            moves[outcome.engine_index - ran.first] = outcome.request.keep(outcome)
        except BaseException as error:
            if not _reported((outcome,), error, on_failure):
                raise
    engine.move(ran.first, moves)


def _logits(engine: Engine, call: Call, batch: Batch) -> NDArray[np.float32] | list[SelectedRows]:
    """The logits of the needed rows, or their best tokens if no request needs more."""
    selector = selecting(engine)
    if selector is not None and all(scheduled.request.selects for scheduled in call):
        return selector.select(batch)
    return engine.run(batch)


def _verified(scheduled: ScheduledStep, ran: Ran) -> VerifiedStep:
    request, index, planned, slots = scheduled
    # selected rows are only made for selectors that take them, and are split like logits
    logits = split(planned, cast("NDArray[np.float32]", ran.logits[index - ran.first]), ran.lines)
    drafts = request.draft_config
    verdicts = [
        accept(part, lines, request.selector, drafts.candidates, ran.lines, drafts.heads)
        for part, lines in zip(planned.parts, logits, strict=True)
    ]
    held, queued, outside = request.slots.held, tuple(request.queue), request.statistics.outside_seconds
    own: list[NDArray[np.float32]] = []
    heads: list[NDArray[np.float32]] = []
    if request.observers:
        by_row = [lines.reshape(-1, ran.lines, lines.shape[-1]) for lines in logits if isinstance(lines, np.ndarray)]
        own, heads = [rows[:, 0] for rows in by_row], [rows[:, 1:] for rows in by_row]
    return VerifiedStep(request, index, planned, slots, verdicts, own, held, queued, ran.seconds, outside, heads)


def _reported(
    steps: Sequence[StepInput | ScheduledStep | VerifiedStep], error: BaseException, on_failure: OnFailure | None
) -> bool:
    """Report an error that these requests had; False: it has to be raised, as always without `on_failure`."""
    if is_panic(error):
        error = LibraryPanic(f"a panic in a step: {error}: change the request, or update the library")
    if on_failure is None or not isinstance(error, Exception):
        return False
    for failed in steps:
        on_failure(failed.engine_index, error)
    return True
