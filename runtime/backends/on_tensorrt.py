"""TensorRT: engines built from the bundle's graph; KV buffers are bound once and updated in place."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import LIBRARIES, EngineRecord, Flavour
from spaceport.graphs.contract.signature import BEST_TOKENS, Signature
from spaceport.runtime.backends.built_engines import NamedEngine, check_contract, engine_for, read_engine
from spaceport.runtime.backends.machine import gpu
from spaceport.runtime.backends.on_torch import TorchBuffers
from spaceport.runtime.backends.private_files import read_private, replace_private, state_folder
from spaceport.runtime.backends.staging import CallShape, Staging
from spaceport.runtime.bundle import Bundle, BundleError
from spaceport.runtime.engine import (
    GPU_COSTS,
    Batch,
    EngineFault,
    EngineOptions,
    SelectedRows,
    selected_rows,
)

Work = Callable[[], None]

STEPS, PROMPTS = 0, 1  # profiles of an engine
_DIGEST = 32  # bytes of the SHA-256 at the start of a file of kernels
_MOST = 256  # graphs; each takes some megabytes of GPU memory
_MOST_SEEN = 4096  # shapes that are counted
_FIRST = 2  # the call of a shape that is captured: many shapes come only once


class CudaGraphs:
    """CUDA graphs by key; the least recently used one is dropped first."""

    def __init__(self, capture: Callable[[Work], Work], most: int = _MOST) -> None:
        self._capture = capture
        self._most = most
        self._graphs: OrderedDict[Hashable, Work] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()

    def run(self, key: Hashable, plain: Work, prepare: Work) -> None:
        """Run the work of a key: replay its graph, or call `prepare` and `plain`."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph()
            return
        prepare()
        plain()  # also before the capture: a graph must not contain what TensorRT does once for a new shape
        self._seen[key] += 1
        if self._seen[key] >= _FIRST:
            self._graphs[key] = self._capture(plain)
            if len(self._graphs) > self._most:
                self._graphs.popitem(last=False)
        elif len(self._seen) > _MOST_SEEN:
            self._seen.clear()


class Device:
    """The first GPU of the process; all work goes to one stream, in order."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", 0)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.stream = int(self._stream.cuda_stream)  # its handle

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed device memory."""
        with self.working():
            return torch.zeros(tuple(shape), dtype=dtype, device=self._device)

    def host(self, size: int) -> torch.Tensor:
        """Pinned host memory."""
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def working(self) -> AbstractContextManager[None]:
        """A context in which torch's work goes to the stream."""
        return torch.cuda.stream(self._stream)

    def capture(self, work: Work) -> Work:
        """Capture `work` as a CUDA graph; returns the function that replays it."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile; only the work of this one is captured.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def wait(self) -> None:
        """Wait until the stream is idle."""
        self._stream.synchronize()

    def release_cached(self) -> None:
        """Release cached GPU memory."""
        torch.cuda.empty_cache()


class Kernels:
    """A deserialized engine and the kernels that are compiled while it runs, which its contexts and other processes share."""

    def __init__(self, api: Any, engine: Any, name: str) -> None:
        self.engine = engine
        self._api = api
        self._file = state_folder() / "kernels" / name
        self._cache: Any = None  # None: all kernels are in the engine
        self._stored = b""
        self._configs: list[Any] = []  # contexts need theirs as long as they live
        if hasattr(api, "DynamicShapesKernelSpecializationStrategy"):
            self._cache = engine.create_runtime_config().create_runtime_cache()
            self._stored = self._read()
            if self._stored:  # kernels of another driver or GPU are ignored and compiled again
                self._cache.deserialize(self._stored)

    def context(self, at_once: bool) -> Any:
        """A context whose memory is given to it. Kernels for a new shape are compiled at once, or beside the work, while
        slower ones serve: a call that is captured has to have its own."""
        strategy = self._api.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._cache is None:
            return self.engine.create_execution_context(strategy)
        config = self.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        kinds = self._api.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER if at_once else kinds.LAZY
        config.set_runtime_cache(self._cache)
        self._configs.append(config)
        return self.engine.create_execution_context(config)

    def store(self) -> None:
        """Store the compiled kernels for the next process."""
        content = b"" if self._cache is None else bytes(self._cache.serialize())
        if content != self._stored:
            with contextlib.suppress(OSError):  # without the file, the next process compiles again
                replace_private(self._file, hashlib.sha256(content).digest() + content)

    def _read(self) -> bytes:
        """The stored kernels; empty if there are none, or if their file was damaged or may be another user's."""
        stored = read_private(self._file) or b""
        digest, content = stored[:_DIGEST], stored[_DIGEST:]
        return content if hashlib.sha256(content).digest() == digest else b""


@dataclass
class _Context:
    """An execution context for one profile of the engine, and what is bound to it."""

    run: Any  # IExecutionContext
    first: int = -1  # first request whose buffers are bound
    shape: CallShape | None = None


class TensorRtEngine(TorchBuffers):
    """A TensorRT or TensorRT-RTX engine on a GPU."""

    costs = GPU_COSTS
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
        log: Any,
    ) -> None:
        self.signature = signature
        self.capacity = record.capacity
        self.requests = options.requests
        self.rows = record.prefill_rows
        self.device = name
        self._record, self._device, self._log = record, device, log
        self.working = device.working
        self._staging = Staging(signature, record.capacity, record.prefill_rows)
        widest = CallShape(options.requests, record.prefill_rows, record.capacity, self._staging.wanted)
        # one block, so that one statement moves slots in all layers; zeroed, since 0 * NaN is NaN
        layers = (2 * signature.layers, options.requests, signature.kv_heads, record.capacity, signature.head_dim)
        self._kv = device.zeros(layers, getattr(torch, signature.kv_dtype))
        self._rows_in = device.host(self._staging.bytes(widest))
        self._rows = device.zeros((self._rows_in.numel(),), torch.uint8)
        self._logits = device.zeros((math.prod(widest.logits(signature)),), torch.float32)
        self._logits_out = device.host(4 * self._logits.numel()).view(torch.float32)
        scratch = max(engine.get_device_memory_size_for_profile_v2(profile) for profile in (STEPS, PROMPTS))
        # shared by both contexts: only one runs at a time
        self._scratch = device.zeros((max(1, scratch),), torch.uint8)
        kernels = Kernels(api, engine, f"{record.sha256[:32]}-{record.version}")
        self._kernels: Kernels | None = kernels  # None: closed
        self._contexts = [
            self._context(kernels.context(profile == STEPS and options.graphs), profile) for profile in (STEPS, PROMPTS)
        ]
        self._graphs = CudaGraphs(self._capture) if options.graphs else None

    def run(self, batch: Batch) -> NDArray[np.float32]:
        return self._take(self._compute(batch))[:, : batch.lines(self.signature)]

    def select(self, batch: Batch) -> list[SelectedRows]:
        """The best tokens of the needed rows of each request; only these are copied to the host."""
        shape = self._compute(batch)
        dims = shape.logits(self.signature)
        with self.working():
            packed = selection(self._logits[: math.prod(dims)].view(dims))
            best: NDArray[np.float32] = packed.cpu().numpy()  # waits for the stream
        return selected_rows(best, partial(self._take, shape), batch.lines(self.signature))

    def _compute(self, batch: Batch) -> CallShape:
        """Copy the inputs of a call and enqueue it; returns its padded shape."""
        if self._kernels is None:
            raise EngineFault(f"{self._record.backend}: the engine is closed")
        shape = self._staging.padded(batch)
        self._staging.write(batch, shape, self._rows_in.numpy())
        used = self._staging.bytes(shape)
        with self.working():
            self._rows[:used].copy_(self._rows_in[:used], non_blocking=True)
            self._play(batch.first, shape)
        return shape

    def close(self) -> None:
        if self._kernels is not None:
            self._device.wait()
            self._kernels.store()
            self._graphs, self._contexts = None, []  # release graphs before contexts, and contexts before the engine
            self._kernels = None
            self._kv = self._kv.new_zeros((0, *self._kv.shape[1:]))
            self._rows = self._logits = self._scratch = self._rows_in = self._logits_out = self._kv
            self._device.release_cached()

    def _play(self, first: int, shape: CallShape) -> None:
        """Enqueue a call, by its CUDA graph if there is one."""
        step = max(shape.rows, shape.wanted) <= self._record.step_rows
        context = self._contexts[STEPS if step else PROMPTS]

        def prepare() -> None:
            self._bind(context, first, shape)

        def plain() -> None:
            if not context.run.execute_async_v3(self._device.stream):
                raise EngineFault(f"{self._record.backend} failed in a step of shape {shape}: {self._log}")

        if step and self._graphs is not None:
            self._graphs.run((first, shape), plain, prepare)
        else:
            prepare()
            plain()

    def _capture(self, work: Work) -> Work:
        try:
            return self._device.capture(work)
        except RuntimeError as error:
            raise EngineFault(
                f"{self._record.backend}: a step cannot be captured as a CUDA graph ({error}): {self._log}"
            ) from error

    def _take(self, shape: CallShape) -> NDArray[np.float32]:
        """The logits of a call, copied to the host."""
        dims = shape.logits(self.signature)
        size = math.prod(dims)
        with self.working():
            self._logits_out[:size].copy_(self._logits[:size], non_blocking=True)
            self._device.wait()
        taken: NDArray[np.float32] = self._logits_out[:size].numpy()
        return taken.reshape(dims)

    def _context(self, context: Any, profile: int) -> _Context:
        """A context with its profile, and with everything bound that never changes."""
        try:
            ready = context is not None and context.set_optimization_profile_async(profile, self._device.stream)
        except RuntimeError:  # raised by TensorRT's bindings if it fails
            ready = False
        if not ready and self._log.memory_ended:
            raise MemoryError(str(self._log))
        if not ready:
            raise EngineFault(f"{self._record.backend} opens no context for profile {profile}: {self._log}")
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        context.set_tensor_address("logits", self._logits.data_ptr())
        return _Context(context)

    def _bind(self, context: _Context, first: int, shape: CallShape) -> None:
        """Bind the inputs of a call that are not bound yet."""
        if context.shape != shape:
            base = self._rows.data_ptr()
            for name, part in self._staging.ranges(shape).items():
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
            raise EngineFault(f"{self._record.backend} takes no {name} of shape {list(shape)}: {self._log}")


def selection(logits: torch.Tensor) -> torch.Tensor:
    """The best tokens of each row of logits, ... x V, as `SelectedRows` reads them: ... x (2n + 1)."""
    scores, tokens = logits.topk(min(BEST_TOKENS, logits.shape[-1]), dim=-1)
    return torch.cat((scores, tokens.to(scores.dtype), logits.logsumexp(dim=-1, keepdim=True)), dim=-1)


def open_engine(bundle: Bundle, options: EngineOptions, flavour: Flavour) -> TensorRtEngine:
    """The bundle's engine for this GPU."""
    api: Any = import_module(LIBRARIES[flavour])
    named = engine_for(bundle, flavour, api.__version__, gpu().target, options)
    plan = read_engine(bundle, named, options.trust_engines)
    name = f"cuda:0 ({gpu().name}, {flavour} {api.__version__})"
    try:
        return deserialized(api, plan, named, bundle, options, Device(), name)
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        gigabytes = bundle.manifest.signature.kv_bytes(options.requests, named.record.capacity) / 1e9
        raise OptionFault(
            f"{named.record.size / 1e9:.1f} GB of engine, {gigabytes:.1f} GB of KV buffers and its activations do not fit "
            f"into the GPU's {gpu().memory / 1e9:.1f} GB: lower max_requests, or run `spaceport build` with "
            "a shorter --max-seq-len"
        ) from error


def deserialized(
    api: Any, plan: bytes, named: NamedEngine, bundle: Bundle, options: EngineOptions, device: Device, name: str
) -> TensorRtEngine:
    """An engine from its bytes, checked against the manifest."""
    log = _failure_log(api)
    log.messages.clear()
    runtime = api.Runtime(log)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None and log.memory_ended:
        raise MemoryError(str(log))
    if engine is None:
        raise BundleError(f"{bundle.path}: {named.name} does not open: {log}: build it again with `spaceport build`")
    check_contract(api, engine, bundle.manifest.signature, named)
    return TensorRtEngine(api, engine, named.record, bundle.manifest.signature, options, device, name, log)


@cache
def _failure_log(api: Any) -> Any:
    """The logger of a library, which keeps its last messages about failures; they are shown only if something fails.

    There is one in a process: a library uses the first logger that it gets for everything that is opened until all of
    its objects are released.
    """

    class FailureLog(api.ILogger):  # type: ignore[misc]  # its type is known at run time only
        def __init__(self) -> None:
            api.ILogger.__init__(self)
            self.messages = deque[str](maxlen=3)

        def log(self, severity: Any, message: str) -> None:
            if severity in (api.ILogger.INTERNAL_ERROR, api.ILogger.ERROR):
                self.messages.append(message)

        def __str__(self) -> str:
            return "; ".join(self.messages) or "it gives no reason"

        @property
        def memory_ended(self) -> bool:
            """Whether a message is about missing memory."""
            return any("out of memory" in text.lower() or "OutOfMemory" in text for text in self.messages)

    return FailureLog()
