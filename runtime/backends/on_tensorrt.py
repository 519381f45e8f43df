"""TensorRT: engines built from the bundle's graph; KV buffers are bound once and updated in place."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import LIBRARIES, EngineRecord, Flavour
from spaceport.graphs.contract.signature import BEST_TOKENS, Signature, logit_rows
from spaceport.runtime.backends.built_engines import Named, check_contract, engine_for, read_engine
from spaceport.runtime.backends.machine import gpu
from spaceport.runtime.backends.private_files import read_private, replace_private, state_folder
from spaceport.runtime.backends.staging import Block, CallLimits, CallShape, end_of, filled_up, ranges_of
from spaceport.runtime.bundle import Bundle, BundleError
from spaceport.runtime.engine import (
    UNTIMED,
    Batch,
    Costs,
    EngineFault,
    EngineOptions,
    Moves,
    SelectedRows,
    selected_rows,
)

Work = Callable[[], None]

_MOST = 256  # graphs; each takes some megabytes of GPU memory
_MOST_SEEN = 4096  # shapes that are counted
_FIRST = 2  # the call of a shape that is captured: many shapes come only once


class Captured:
    """CUDA graphs by key; the least recently used one is dropped first."""

    def __init__(self, capture: Callable[[Work], Work], most: int = _MOST) -> None:
        self._capture = capture
        self._most = most
        self._graphs: OrderedDict[Hashable, Work] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()

    def play(self, key: Hashable, plain: Work, prepare: Work) -> None:
        """Run the work of a key: replay its graph, or call `prepare` and `plain`."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph()
            return
        prepare()
        plain()  # also before the capture: a graph must not contain what TensorRT does once for a new shape
        self._seen[key] += 1
        if self._seen[key] >= _FIRST and self._most:
            self._graphs[key] = self._capture(plain)
            if len(self._graphs) > self._most:
                self._graphs.popitem(last=False)
        elif len(self._seen) > _MOST_SEEN:
            self._seen.clear()

    def __len__(self) -> int:
        return len(self._graphs)


class Device(Protocol):
    """The GPU functions that an engine needs; all work goes to one stream, in order."""

    @property
    def stream(self) -> int:
        """The handle of the stream."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed device memory."""

    def host(self, size: int) -> torch.Tensor:
        """Pinned host memory."""

    def working(self) -> AbstractContextManager[None]:
        """A context in which torch's work goes to the stream."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work` as a CUDA graph; returns the function that replays it."""

    def wait(self) -> None:
        """Wait until the stream is idle."""

    def release_cached(self) -> None:
        """Release cached GPU memory."""


class Cuda:
    """The first GPU of the process."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", 0)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> int:
        return int(self._stream.cuda_stream)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return torch.zeros(tuple(shape), dtype=dtype, device=self._device)

    def host(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def working(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile; only the work of this one is captured.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def wait(self) -> None:
        self._stream.synchronize()

    def release_cached(self) -> None:
        torch.cuda.empty_cache()


_FOLDER = "kernels"
_DIGEST = 32  # bytes of the SHA-256 at the start of the file


class Kernels:
    """Execution contexts of one engine, which share the kernels that are compiled while it runs."""

    def __init__(self, api: Any, engine: Any, name: str) -> None:
        self._api, self._engine = api, engine
        self._file = state_folder() / _FOLDER / name
        self._cache: Any = None
        self._content = b""
        self._configs: list[Any] = []  # contexts need theirs as long as they live
        if self._compiles:
            self._cache = engine.create_runtime_config().create_runtime_cache()
            self._content = self._read()
            if self._content:
                self._cache.deserialize(
                    self._content
                )  # kernels of another driver or GPU are ignored and compiled again

    def context(self, at_once: bool) -> Any:
        """A context whose memory is given to it. Kernels for a new shape are compiled at once, or beside the work, while
        slower ones serve: a call that is captured has to have its own."""
        strategy = self._api.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self._compiles:
            return self._engine.create_execution_context(strategy)
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        kinds = self._api.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER if at_once else kinds.LAZY
        config.set_runtime_cache(self._cache)
        self._configs.append(config)
        return self._engine.create_execution_context(config)

    def keep(self) -> None:
        """Store the compiled kernels for the next process."""
        if self._cache is None:
            return
        content = bytes(self._cache.serialize())
        if content == self._content:
            return
        with contextlib.suppress(OSError):  # without the file, the next process compiles again
            replace_private(self._file, hashlib.sha256(content).digest() + content)

    def let_go(self) -> None:
        """Release everything of the engine, after its contexts."""
        self._engine = self._cache = None
        self._configs.clear()

    @property
    def _compiles(self) -> bool:
        return hasattr(self._api, "DynamicShapesKernelSpecializationStrategy")

    def _read(self) -> bytes:
        """The stored kernels; empty if there are none, or if their file was damaged or may be another user's."""
        stored = read_private(self._file) or b""
        digest, content = stored[:_DIGEST], stored[_DIGEST:]
        return content if hashlib.sha256(content).digest() == digest else b""


STEPS, PROMPTS = 0, 1  # profiles of an engine


class Words:
    """Log messages of a library; they are shown only if something fails."""

    def __init__(self) -> None:
        self.said: deque[str] = deque(maxlen=3)

    def __str__(self) -> str:
        return "; ".join(self.said) or "it gives no reason"

    @property
    def memory_ended(self) -> bool:
        """Whether the last message is about missing memory."""
        return any("out of memory" in one.lower() or "OutOfMemory" in one for one in self.said)


@dataclass
class _Context:
    """An execution context for one profile of the engine, and what is bound to it."""

    run: Any  # IExecutionContext
    first: int = -1  # first request whose buffers are bound
    shape: CallShape | None = None


class TensorRtEngine:
    """A TensorRT or TensorRT-RTX engine on a GPU."""

    costs: Costs = UNTIMED
    selects = True

    def __init__(
        self,
        api: Any,
        engine: Any,
        record: EngineRecord,
        signature: Signature,
        options: EngineOptions,
        device: Device,
        name: str,
        words: Words,
    ) -> None:
        self.signature = signature
        self.capacity = record.capacity
        self.requests = options.requests
        self.rows = record.prefill_rows
        self.device = name
        self.notes: tuple[str, ...] = ()
        self._record, self._device, self._words = record, device, words
        self._engine: Any = engine
        wanted = logit_rows(record.prefill_rows, signature.row_logits)
        self._limits = CallLimits(record.capacity, record.prefill_rows, wanted)
        widest = CallShape(options.requests, record.prefill_rows, record.capacity, wanted)
        # one block, so that one statement moves slots in all layers; zeroed, since 0 * NaN is NaN
        layers = (2 * signature.layers, options.requests, signature.kv_heads, record.capacity, signature.head_dim)
        self._kv = device.zeros(layers, getattr(torch, signature.dtype))
        block = device.host(end_of(signature, widest))
        self._block, self._rows_in = Block(block.numpy(), signature), block
        self._rows = device.zeros((block.numel(),), torch.uint8)
        self._logits = device.zeros((options.requests * wanted * signature.row_logits,), torch.float32)
        self._logits_out = device.host(4 * self._logits.numel()).view(torch.float32)
        scratch = max(engine.get_device_memory_size_for_profile_v2(profile) for profile in (STEPS, PROMPTS))
        self._scratch = device.zeros(
            (max(1, scratch),), torch.uint8
        )  # shared by both contexts: only one runs at a time
        self._kernels = Kernels(api, engine, f"{record.sha256[:32]}-{record.version}")
        self._contexts = [self._context(profile, options.graphs) for profile in (STEPS, PROMPTS)]
        self._captured = Captured(self._capture) if options.graphs else None

    def run(self, batch: Batch) -> NDArray[np.float32]:
        with self._device.working():
            shape = self._compute(batch)
            logits = self._take(shape)
        return logits[:, : batch.lines(self.signature)]

    def select(self, batch: Batch) -> list[SelectedRows]:
        """The best tokens of the needed rows of each request; only these are copied to the host."""
        with self._device.working():
            shape = self._compute(batch)
            dims = shape.logits(self.signature)
            packed = selection(self._logits[: math.prod(dims)].view(dims))
            found: NDArray[np.float32] = packed.cpu().numpy()  # waits for the stream

        def logits() -> NDArray[np.float32]:
            with self._device.working():
                return self._take(shape)

        return selected_rows(found, logits, batch.lines(self.signature))

    def _compute(self, batch: Batch) -> CallShape:
        """Copy the inputs of a call and enqueue it; returns its padded shape."""
        if self._engine is None:
            raise EngineFault(f"{self._record.backend}: the engine is closed")
        shape = filled_up(batch, self.signature, self._limits)
        used = self._block.write(batch, shape, self.capacity)
        self._rows[:used].copy_(self._rows_in[:used], non_blocking=True)
        self._play(batch.first, shape)
        return shape

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        with self._device.working():
            move_slots(self._kv, first, moves)

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        with self._device.working():
            copy_slots(self._kv, source, target, slots)

    def clear(self, request: int) -> None:
        with self._device.working():
            self._kv[:, request] = 0

    def close(self) -> None:
        if self._engine is not None:
            self._device.wait()
            self._kernels.keep()
            self._captured, self._contexts = None, []  # release graphs before contexts, and contexts before the engine
            self._kernels.let_go()
            self._engine = None
            self._kv = self._kv.new_zeros((0, *self._kv.shape[1:]))
            self._rows = self._logits = self._scratch = self._rows_in = self._logits_out = self._kv
            self._block = Block(np.zeros(0, np.uint8), self.signature)
            self._device.release_cached()

    def _play(self, first: int, shape: CallShape) -> None:
        """Enqueue a call, by its CUDA graph if there is one."""
        step = max(shape.rows, shape.wanted) <= self._record.step_rows
        context = self._contexts[STEPS if step else PROMPTS]

        def prepare() -> None:
            self._bind(context, first, shape)

        def plain() -> None:
            if not context.run.execute_async_v3(self._device.stream):
                raise EngineFault(f"{self._record.backend} failed in a step of shape {shape}: {self._words}")

        if step and self._captured is not None:
            self._captured.play((first, shape), plain, prepare)
        else:
            prepare()
            plain()

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._device.capture(work)
        except RuntimeError as error:
            raise EngineFault(
                f"{self._record.backend}: a step cannot be captured as a CUDA graph ({error}): {self._words}"
            ) from error

    def _take(self, shape: CallShape) -> NDArray[np.float32]:
        """The logits of a call, copied to the host."""
        dims = shape.logits(self.signature)
        size = math.prod(dims)
        self._logits_out[:size].copy_(self._logits[:size], non_blocking=True)
        self._device.wait()
        taken: NDArray[np.float32] = self._logits_out[:size].numpy()
        return taken.reshape(dims)

    def _context(self, profile: int, graphs: bool) -> _Context:
        """A context for a profile, with everything bound that never changes."""
        context = self._kernels.context(at_once=profile == STEPS and graphs)
        try:
            ready = context is not None and context.set_optimization_profile_async(profile, self._device.stream)
        except RuntimeError:  # raised by TensorRT's bindings if it fails
            ready = False
        if not ready and self._words.memory_ended:
            raise MemoryError(str(self._words))
        if not ready:
            raise EngineFault(f"{self._record.backend} opens no context for profile {profile}: {self._words}")
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        context.set_tensor_address("logits", self._logits.data_ptr())
        return _Context(context)

    def _bind(self, context: _Context, first: int, shape: CallShape) -> None:
        """Bind the inputs of a call that are not bound yet."""
        if context.shape != shape:
            base = self._rows.data_ptr()
            for name, part in ranges_of(self.signature, shape).items():
                self._set(context, name, part.shape, base + part.offset)
        if context.first != first or context.shape is None or context.shape.requests != shape.requests:
            for index, (past, present) in enumerate(zip(self.signature.past, self.signature.present, strict=True)):
                view = self._kv[index, first : first + shape.requests]
                self._set(context, past.name, tuple(view.shape), view.data_ptr())
                context.run.set_tensor_address(present.name, view.data_ptr())
        context.first, context.shape = first, shape

    def _set(self, context: _Context, name: str, shape: tuple[int, ...], address: int) -> None:
        if not context.run.set_input_shape(name, shape) or not context.run.set_tensor_address(name, address):
            context.shape = None
            raise EngineFault(f"{self._record.backend} takes no {name} of shape {list(shape)}: {self._words}")


def selection(logits: torch.Tensor) -> torch.Tensor:
    """The best tokens of each row of logits, ... x V, as `SelectedRows` reads them: ... x (2n + 1)."""
    scores, tokens = logits.topk(min(BEST_TOKENS, logits.shape[-1]), dim=-1)
    return torch.cat((scores, tokens.to(scores.dtype), logits.logsumexp(dim=-1, keepdim=True)), dim=-1)


def move_slots(kv: torch.Tensor, first: int, moves: Sequence[Moves]) -> None:
    """Copy slots of some requests in all layers, reading all before writing any; kv is 2L x requests x Hkv x S x D."""
    busy = [(request, *move) for request, move in enumerate(moves, first) if move[0].size]
    if not busy:
        return
    lines = np.concatenate([np.full(sources.size, request) for request, sources, _ in busy])
    sources, targets = (np.concatenate([move[side] for move in busy]) for side in (1, 2))
    where = torch.from_numpy(np.stack((lines, sources, targets))).to(kv.device)
    kv[:, where[0], :, where[2]] = kv[:, where[0], :, where[1]]


def copy_slots(kv: torch.Tensor, source: int, target: int, slots: NDArray[np.int64]) -> None:
    """Copy slots of a request to the lowest ones of another in all layers; kv is 2L x requests x Hkv x S x D."""
    kv[:, target, :, : slots.size] = kv[:, source][:, :, torch.from_numpy(slots).to(kv.device)]


def open_engine(bundle: Bundle, options: EngineOptions, flavour: Flavour) -> TensorRtEngine:
    """The bundle's engine for this GPU."""
    api: Any = import_module(LIBRARIES[flavour])
    named = engine_for(bundle, flavour, api.__version__, gpu().target, options)
    plan = read_engine(bundle, named, options.trust_engines)
    name = f"cuda:0 ({gpu().name}, {flavour} {api.__version__})"
    try:
        engine = deserialized(api, plan, named, bundle, options, Cuda(), name)
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        gigabytes = bundle.manifest.signature.kv_bytes(options.requests, named.record.capacity) / 1e9
        raise OptionFault(
            f"{named.record.size / 1e9:.1f} GB of engine, {gigabytes:.1f} GB of KV buffers and its activations do not fit "
            f"into the GPU's {gpu().memory / 1e9:.1f} GB: lower max_requests, or run `spaceport build` with "
            "a shorter --max-seq-len"
        ) from error
    return engine


def deserialized(
    api: Any, plan: bytes, named: Named, bundle: Bundle, options: EngineOptions, device: Device, name: str
) -> TensorRtEngine:
    """An engine from its bytes, checked against the manifest."""
    words, logger = _listening(api)
    words.said.clear()
    runtime = api.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None and words.memory_ended:
        raise MemoryError(str(words))
    if engine is None:
        raise BundleError(f"{bundle.path}: {named.name} does not open: {words}: build it again with `spaceport build`")
    check_contract(api, engine, bundle.manifest.signature, named)
    return TensorRtEngine(api, engine, named.record, bundle.manifest.signature, options, device, name, words)


@cache
def _listening(api: Any) -> tuple[Words, Any]:
    """Messages of a library about failures, and the logger that receives them.

    There is one of each in a process: a library uses the first logger that it gets for everything that is opened until
    all of its objects are released.
    """
    words = Words()

    class Listening(api.ILogger):  # type: ignore[misc]  # its type is known at run time only
        def __init__(self) -> None:
            api.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (api.ILogger.INTERNAL_ERROR, api.ILogger.ERROR):
                words.said.append(message)

    return words, Listening()
