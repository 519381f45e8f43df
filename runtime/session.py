"""Session: `Runtime`, the public entry point."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType

from spaceport.graphs.contract.exactness import Exactness, unmeasured
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.backends import Opened, open_with_engine
from spaceport.runtime.backends.measurements import measured_here
from spaceport.runtime.bundle import Bundle, read_correction, read_phrase_table
from spaceport.runtime.costs import CostSource, StepCosts, relative_costs
from spaceport.runtime.decode.draft import Phrases
from spaceport.runtime.decode.planner import DraftPlanner
from spaceport.runtime.decode.sequence_group import Observer
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Engine, EngineOptions, capacity_for, seq_len, slots_for
from spaceport.runtime.limits import DEFAULT_LIMITS, Limits
from spaceport.runtime.sampling.logprobs import Score
from spaceport.runtime.scheduling.admission import Admission, Intake
from spaceport.runtime.scheduling.request import Completion, Echo
from spaceport.runtime.scheduling.scheduler import Scheduler
from spaceport.runtime.scheduling.stream import AsyncStream, Stream
from spaceport.runtime.scheduling.worker import RuntimeStatus, Worker
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.text.tokenizer import open_tokenizer

DEFAULT_CALL_TIMEOUT = 300.0  # seconds
MOST_REQUESTS = 1024  # against typing errors that would allocate all memory

_log = logging.getLogger("spaceport.runtime")


class Runtime:
    """An open bundle that generates and scores text; its methods are safe to call from any OS thread or event loop."""

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        max_seq_len: int,
        max_slots: int | None = None,
        queue_limit: int | None = None,
        notes: tuple[str, ...] = (),
        costs: StepCosts | None = None,
        call_timeout: float | None = None,
        limits: Limits | None = None,
        prefix_cache: bool = False,
        exactness: Exactness | None = None,
    ) -> None:
        self.bundle = bundle
        self.engine = engine
        self.max_seq_len = max_seq_len
        self.limits = limits = limits or DEFAULT_LIMITS
        self.exactness = exactness or unmeasured(bundle.manifest)
        # about the choice of the backend, its engine and its drafts, one sentence each
        self.notes = (*notes, *engine.notes, *_without_drafts(self.exactness, engine.device))
        self.tokenizer = open_tokenizer(bundle)
        self.costs = costs or relative_costs(engine.costs.row)
        planner = DraftPlanner(self.costs, bundle.manifest.drafts.acceptance)
        table = read_phrase_table(bundle)
        self._admission = Admission(
            bundle,
            self.tokenizer,
            engine,
            max_seq_len,
            slots_for(max_seq_len, max_slots),
            planner,
            self.exactness,
            limits,
            read_correction(bundle),
            None if table is None else Phrases(table),
            prefix_cache,
        )
        queued = limits.queued_requests if queue_limit is None else queue_limit
        scheduler = Scheduler(
            engine,
            queued,
            costs=self.costs,
            queued_tokens=limits.queued_prompt_tokens,
            check=bundle.require_unchanged,
        )
        self._worker = Worker(scheduler, call_timeout=call_timeout)
        self._intake = Intake(self._admission, self._worker)

    @classmethod
    def open(
        cls,
        bundle: str | os.PathLike[str],
        *,
        backend: str = "auto",
        max_seq_len: int | None = None,
        max_requests: int = 1,
        max_slots: int | None = None,
        queue_limit: int | None = None,
        limits: Limits | None = None,
        threads: int = 0,
        trust_engines: bool = False,
        step_costs: CostSource = "measured",
        call_timeout: float | None = DEFAULT_CALL_TIMEOUT,
        prefix_cache: bool = False,
        allow_links: bool = False,
        copy_weights: bool | None = None,
    ) -> Runtime:
        """Open a bundle on a backend.

        - `bundle`: Folder that `spaceport export` wrote.
        - `backend`: "onnxruntime", "onnxruntime-cuda", "tensorrt" or "tensorrt-rtx"; default "auto": the best one that can
          run the bundle here.
        - `max_seq_len`: Maximum context length in tokens, prompt included; default None: the model's limit,
          at most 32768 and what 2 GiB of KV buffers hold, but at least 4096; for append graphs at most 4096.
        - `max_requests`: Maximum number of requests that decode at the same time; default 1.
        - `max_slots`: KV slots for each request: maximum tokens of its prompt and all its threads; default None:
          `max_seq_len`.
        - `queue_limit`: Maximum number of requests that wait, beyond it `QueueFull` is raised; default None:
          `limits.queued_requests`.
        - `limits`: Limits of each request and of the queue; default: those of `Limits()`.
        - `threads`: CPU threads of the engine; default 0: one for each core that the process and its container may use.
        - `trust_engines`: Whether to run TensorRT engines that were not built on this machine; engines are code; default
          False.
        - `step_costs`: Where the step costs come from that limit the width of drafts; default "measured": by the first
          three openings of a bundle on a machine, in about two seconds each. "standard": constants, so that the same
          request takes the same steps each time. "free": rows cost nothing, drafts are as wide as their options allow;
          for tests.
        - `call_timeout`: Seconds after which an engine call counts as hung: all requests fail with `EngineFault`, and the
          bundle has to be opened again; None: no limit; default 300.
        - `prefix_cache`: Whether ended requests leave their KV rows for requests with the same beginning, such as the next
          turn of a chat; default False.
        - `allow_links`: Whether the bundle's files may be links, as in caches of a model hub; default False.
        - `copy_weights`: Whether to copy the weights into memory of their own, so that changes of their file have no
          effect. False: the file is mapped; processes share its memory, and truncating it ends them with SIGBUS. Default
          None: weights of native operators are copied from 32 MB on, if twice as much memory is free, to huge pages,
          which are read faster.
        """

        if not 1 <= max_requests <= MOST_REQUESTS:
            raise OptionFault(f"max_requests is {max_requests}: expected 1 to {MOST_REQUESTS}")
        if queue_limit is not None and queue_limit < 0:
            raise OptionFault(f"queue_limit is {queue_limit}: expected at least 0")
        if call_timeout is not None and not call_timeout > 0:
            raise OptionFault(f"call_timeout is {call_timeout}: expected a number of seconds above 0, or None")

        def length_for(manifest: Manifest) -> int:
            return seq_len(manifest, max_seq_len, max_slots, max_requests)

        def options_for(opened: Bundle) -> EngineOptions:
            slots = slots_for(length_for(opened.manifest), max_slots)
            return EngineOptions(capacity_for(opened.manifest, slots), max_requests, threads, trust_engines)

        opened = open_with_engine(bundle, backend, options_for, allow_links=allow_links, copy_weights=copy_weights)
        length = length_for(opened.bundle.manifest)
        started = perf_counter()
        costs, exactness = measured_here(opened.bundle, opened.backend, opened.engine, opened.options, step_costs)
        costs_seconds = perf_counter() - started
        runtime = cls(
            opened.bundle,
            opened.engine,
            length,
            max_slots,
            queue_limit,
            notes=opened.notes,
            costs=costs,
            call_timeout=call_timeout,
            limits=limits,
            prefix_cache=prefix_cache,
            exactness=exactness,
        )
        _log_opened(opened, length, costs_seconds, exactness)
        return runtime

    def generate(self, prompt: Prompt, decoding: Decoding | None = None) -> Completion:
        """The completion of a prompt: text, token ids or chat messages."""
        with self.stream(prompt, decoding) as stream:
            return stream.completion()

    def stream(self, prompt: Prompt, decoding: Decoding | None = None) -> Stream:
        """A stream of the pieces of a completion, while it is generated."""
        request = self._intake.completion(prompt, decoding or Decoding())
        stream = Stream(request)
        self._intake.admit(request)
        return stream

    async def agenerate(self, prompt: Prompt, decoding: Decoding | None = None) -> Completion:
        """The completion of a prompt, for asyncio; cancelling the call cancels the request."""
        async with self.astream(prompt, decoding) as stream:
            return await stream.completion()

    def astream(
        self, prompt: Prompt, decoding: Decoding | None = None, *, observers: Sequence[Observer] = ()
    ) -> AsyncStream:
        """A stream for asyncio: `async for piece in runtime.astream(prompt)`.

        Text and messages are tokenized on another OS thread; `await stream.submitted()` waits for that and raises the
        error of an invalid request, as the first piece does. `observers` get each step with its logits, on the worker
        thread; an error of theirs fails the request.
        """
        asyncio.get_running_loop()  # raises without one, before the request counts
        request = self._intake.completion(prompt, decoding or Decoding(), observers)
        stream = AsyncStream(request)
        self._intake.admit_elsewhere(request)
        return stream

    def score(
        self,
        prompt: Prompt,
        continuation: str | Sequence[int] | None = None,
        *,
        top: int = 0,
        parse_special: bool = False,
        tenant: str = "",
        cache_salt: str = "",
    ) -> Score:
        """Log probability of each token of a continuation, or of the prompt itself; `top` most probable tokens with each."""
        decoding = Decoding(tenant=tenant, cache_salt=cache_salt)
        request = self._intake.scoring(prompt, Echo(continuation, top, parse_special), decoding)
        with Stream(request) as stream:
            self._intake.admit(request)
            for _ in stream:
                pass
        return request.score()

    async def ascore(
        self,
        prompt: Prompt,
        continuation: str | Sequence[int] | None = None,
        *,
        top: int = 0,
        parse_special: bool = False,
        tenant: str = "",
        cache_salt: str = "",
    ) -> Score:
        """Log probabilities of given text, for asyncio; see `score`."""
        decoding = Decoding(tenant=tenant, cache_salt=cache_salt)
        request = self._intake.scoring(prompt, Echo(continuation, top, parse_special), decoding)
        async with AsyncStream(request) as stream:
            self._intake.admit_elsewhere(request)
            async for _ in stream:
                pass
        return request.score()

    def prepare_grammars(self) -> None:
        """Begin to prepare constrained decoding in the background, so that the first request with a grammar waits less."""
        self._intake.prepare_grammars()

    def tokens_of(self, prompt: Prompt, *, parse_special: bool = False) -> list[int]:
        """Token ids of a prompt: text, token ids or chat messages.

        Special tokens that text or messages spell out stay text, unless `parse_special` is set.
        """
        self._worker.check_process()
        return self._admission.tokens_of(prompt, parse_special)

    def status(self) -> RuntimeStatus:
        """The state at this moment: active and queued requests, KV slots, heartbeat and tokens/s."""
        return self._worker.status()

    def close(self, timeout: float | None = None) -> None:
        """End all requests after the current step, and release the engine.

        If an engine call does not return within `timeout` seconds, or within `call_timeout`, the requests fail at once, and
        the engine keeps its memory until the call returns.
        """
        self._intake.close()
        if self._worker.close(timeout):
            self.engine.close()
            _log.info("closed %s", self.bundle.path)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _without_drafts(exactness: Exactness, device: str) -> tuple[str, ...]:
    """The note of an engine on which drafts are off by default."""
    if exactness.allows_drafts:
        return ()
    place = "this CPU" if device == "cpu" else device
    return (
        f"drafts are off by default: on {place}, logits of this bundle change with the rows and KV slots of a call (by "
        f"{max(exactness.rows, exactness.slots):.0e}, tolerated {exactness.tolerated:.0e}), and drafted text could differ from plain text: export the checkpoint again, or request "
        "drafts with --mask-slots or --lookup",
    )


def _log_opened(opened: Opened, max_seq_len: int, costs_seconds: float, exactness: Exactness) -> None:
    fields = {
        "verify_seconds": round(opened.verify_seconds, 3),
        "engine_seconds": round(opened.engine_seconds, 3),
        "step_costs_seconds": round(costs_seconds, 3),
    }
    _log.info(
        "opened %s on %s: max_requests %d, max_seq_len %d; drafted text is %s",
        *(opened.bundle.path, opened.backend, opened.options.requests, max_seq_len, exactness),
        extra={"fields": fields},
    )
