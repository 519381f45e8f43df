"""ONNX Runtime on an NVIDIA GPU; fails without the CUDA provider, and notes nodes that run on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import MissingDependency, OptionFault
from spaceport.graphs.contract.signature import DTYPES, Signature, selection_width
from spaceport.runtime.backends.device_memory import Blocks, DeviceMemory, device_memory
from spaceport.runtime.backends.machine import gpu
from spaceport.runtime.backends.on_onnxruntime import (
    FAULTS,
    open_selection,
    open_session,
    session_options,
    unloadable,
)
from spaceport.runtime.backends.staging import CallShape, Staging
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import (
    GPU_COSTS,
    Batch,
    Engine,
    EngineFault,
    EngineOptions,
    Moves,
    SelectedRows,
    selected_rows,
    slots_in_order,
)

_PROVIDER = "CUDAExecutionProvider"
_WARNING, _ERROR = 2, 3  # severities of onnxruntime's messages; it prints warnings unless told otherwise
_RECORD = "session.record_ep_graph_assignment_info"

# Older versions: a replayed graph reads host buffers that calls of other shapes have reused (onnxruntime#32121).
_GRAPHS_SINCE = (1, 30)

# Operators that compute shapes; onnxruntime runs them on the CPU on purpose.
_ARITHMETIC = frozenset(
    {
        *("Shape", "Size", "Squeeze", "Unsqueeze", "Gather", "Concat", "Slice", "Cast", "Range", "Constant"),
        *("Add", "Sub", "Mul", "Div", "Max", "Min", "Where", "Equal", "Reshape", "ConstantOfShape"),
    }
)
_MOST_NAMED = 5  # nodes that a note names

_NO_GRAPHS = re.compile("cannot use the (graph capture|CUDA Graph) feature", re.IGNORECASE)
_NO_MEMORY = re.compile("out of memory|Failed to allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)

# onnx.TensorProto types; numpy has no bfloat16, so types are named by their numbers.
_UINT8, _FLOAT = 2, 1

_LEAST = 1 << 14  # bytes of the smallest block
MOST_GRAPHS = 128  # each takes some megabytes of GPU memory
_GRAPH_ROWS = 64  # for wider calls, launch overhead is negligible
_COMMON = 3  # calls of a shape before it is captured
PLAIN = -1  # graph id of a call that is neither captured nor replayed


class GraphChoice:
    """Decides which calls onnxruntime captures as CUDA graphs: frequent ones with few rows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: Counter[tuple[int, CallShape]] = Counter()
        self._captured: dict[tuple[int, CallShape], ort.RunOptions] = {}
        self._plain = _run_options(PLAIN)

    def options(self, first: int, shape: CallShape) -> ort.RunOptions:
        """Run options of a call; a graph contains buffer addresses, so it belongs to the requests from `first` on."""
        key = (first, shape)
        if key not in self._captured:
            if len(self._captured) == self._most or shape.rows > _GRAPH_ROWS:
                return self._plain
            self._seen[key] += 1
            if self._seen[key] <= _COMMON:
                return self._plain
            self._captured[key] = _run_options(len(self._captured))
        return self._captured[key]


def _run_options(graph: int) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options


class SavedRows(NamedTuple):
    """KV rows outside of an engine's buffers."""

    memory: ort.OrtValue
    blocks: Blocks  # the same memory
    slots: int


class DeviceEngine(Engine):
    """A scatter-lowered graph in an onnxruntime session whose inputs and outputs are in the memory of one device.

    Everything is bound by its address, and no address that was ever bound is given up before the engine is closed: captured
    graphs hold them.
    """

    costs = GPU_COSTS
    parks = True

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: Signature,
        options: EngineOptions,
        kind: Literal["cuda", "cpu"],
        device: str,
        memory: DeviceMemory,
        graphs: bool = False,
        notes: tuple[str, ...] = (),
        selection: ort.InferenceSession | None = None,  # session of the bundle's graph for token selection
    ) -> None:
        self.selects = selection is not None
        self.signature = signature
        self.capacity = self.rows = options.capacity
        self.requests = options.requests
        self.device = device
        self.notes = notes
        self._session: ort.InferenceSession | None = session
        self._kind = kind
        self._staging = Staging(signature, self.capacity, self.rows)
        # one block of 2 * layers x requests x Hkv x S x D; zeroed, since 0 * NaN is NaN
        size = signature.kv_bytes(options.requests, options.capacity)
        self._kv: ort.OrtValue | None = self._allocated(size)
        self._device = memory
        self._request_bytes = size // (2 * signature.layers * self.requests)  # of one KV buffer
        self._head_bytes = self._request_bytes // signature.kv_heads
        memory.zero([(self._address(0, 0), size)])
        self._rows_in: dict[int, NDArray[np.uint8]] = {}  # host memory of inputs, by size in bytes
        self._memory: dict[tuple[str, int], ort.OrtValue] = {}  # device memory by use and size in bytes
        self._graphs = GraphChoice(MOST_GRAPHS if graphs else 0)
        # onnxruntime stores graphs for the OS thread that captured them. This thread captures all, since the worker thread
        # ends when it is idle and graphs would be captured again
        self._thread = ThreadPoolExecutor(1, "spaceport-graphs") if graphs else None
        self._binding = session.io_binding()
        self._selection = selection
        self._shape: CallShape | None = None  # shape of the call whose buffers are bound
        self._range: tuple[int, int] | None = None  # range of requests whose buffers are bound

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self._compute(batch)
        return self._copied()[:, : batch.lines(self.signature)]

    def select(self, batch: Batch) -> list[SelectedRows]:
        """The best tokens of the needed rows of each request; only these are copied to the host."""
        assert self._selection is not None
        dims = self._compute(batch).logits(self.signature)
        packed = (*dims[:2], selection_width(self.signature.vocab_size))
        binding = self._selection.io_binding()
        with self._faults():
            binding.bind_input("logits", self._kind, 0, _FLOAT, dims, self._floats("logits", dims))
            binding.bind_output("selection", self._kind, 0, _FLOAT, packed, self._floats("selection", packed))
            self._selection.run_with_iobinding(binding)
            best: NDArray[np.float32] = binding.get_outputs()[0].numpy()
        return selected_rows(best, self._copied, batch.lines(self.signature))

    def _compute(self, batch: Batch) -> CallShape:
        """Run a call, which leaves its logits in device memory; returns its padded shape."""
        if self._session is None:
            raise EngineFault(f"onnxruntime on {self.device}: the engine is closed")
        shape = self._staging.padded(batch)
        size = _power(self._staging.bytes(shape))  # sizes are powers of two, since a whole block is copied
        with self._faults():
            if size not in self._rows_in:
                self._rows_in[size] = np.zeros(size, np.uint8)
            self._staging.write(batch, shape, self._rows_in[size])
            rows = self._device_memory("rows", size)
            rows.update_inplace(self._rows_in[size])
            self._bind(batch.first, shape, rows.data_ptr())
            self._start(self._session, self._graphs.options(batch.first, shape))
        return shape

    def _copied(self) -> NDArray[np.float32]:
        """The logits of the last call, without padding rows, copied to the host."""
        with self._faults():
            logits: NDArray[np.float32] = self._binding.get_outputs_as_ortvaluevector()[0].numpy()
        return logits

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Raise onnxruntime's errors and the driver's as faults of this engine."""
        try:
            yield
        except FAULTS as error:
            raise EngineFault(f"onnxruntime on {self.device} ({self.signature.dtype}) failed: {error}") from error

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        if any(sources.size for sources, _ in moves):
            raise EngineFault(
                f"onnxruntime on {self.device}: a scatter-lowered graph writes rows anywhere, nothing moves"
            )

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        """Copy KV slots on the device, each run of consecutive slots at once."""
        first = slots_in_order(slots) if source == target else 0
        moved, row = slots[first:], self._row_bytes
        if not moved.size:
            return
        starts = np.flatnonzero(np.diff(moved, prepend=moved[0] - 2) != 1)  # of the runs
        runs = list(zip(starts.tolist(), np.diff(starts, append=moved.size).tolist(), strict=True))
        saved, packed = None, self._blocks(target, first)
        if source == target:  # all slots are read before any is written
            saved = self._allocated(2 * self.signature.layers * self.signature.kv_heads * moved.size * row)
            packed = Blocks(int(saved.data_ptr()), moved.size * row, self.signature.kv_heads)
        for start, count in runs:
            into = packed._replace(address=packed.address + start * row)
            self._copy([(self._blocks(source, int(moved[start])), into)], count)
        if saved is not None:
            self._copy([(packed, self._blocks(target, first))], moved.size)

    def saved(self, request: int, slots: int) -> SavedRows:
        """A copy of the lowest KV slots of a request, in device memory if they fit there, else in the host's."""
        block = slots * self._row_bytes
        size = 2 * self.signature.layers * self.signature.kv_heads * block
        try:
            with self._faults():
                memory, device = self._allocated(size), True
        except EngineFault as error:
            if not _NO_MEMORY.search(str(error)):
                raise
            memory, device = ort.OrtValue.ortvalue_from_numpy(np.empty(size, np.uint8)), False
        rows = SavedRows(memory, Blocks(int(memory.data_ptr()), block, self.signature.kv_heads, device), slots)
        self._copy([(self._blocks(request), rows.blocks)], slots)
        return rows

    def restore(self, request: int, rows: SavedRows) -> None:
        self._copy([(rows.blocks, self._blocks(request))], rows.slots)

    def clear(self, request: int) -> None:
        starts = [self._address(buffer, request) for buffer in range(2 * self.signature.layers)]
        self._device.zero([(start, self._request_bytes) for start in starts])

    def copy_bandwidth(self, size: int = 1 << 30, rounds: int = 5) -> float:
        """Bytes per second that copies on the device read and write."""
        both = [self._allocated(size) for _ in range(2)]
        source, target = (int(memory.data_ptr()) for memory in both)
        seconds = []
        for _ in range(rounds):
            started = perf_counter()
            self._device.copy_bytes(source, target, size)
            seconds.append(perf_counter() - started)
        return 2 * size / min(seconds)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        # CUDA graphs contain addresses: release them before the memory
        self._session = self._binding = self._selection = None
        self._rows_in.clear()
        self._memory.clear()
        if self._kv is not None:
            self._device.close()
        self._kv = None

    def _address(self, buffer: int, request: int) -> int:
        """The address of a request's part of a KV buffer."""
        if self._kv is None:
            raise EngineFault(f"onnxruntime on {self.device}: the engine is closed")
        return int(self._kv.data_ptr()) + (buffer * self.requests + request) * self._request_bytes

    @property
    def _row_bytes(self) -> int:
        """Bytes of a KV slot of one head in one buffer."""
        return self._head_bytes // self.capacity

    def _blocks(self, request: int, slot: int = 0) -> Blocks:
        """The KV slots of a request from this one on: a plane for each buffer, a block for each head."""
        address = self._address(0, request) + slot * self._row_bytes
        return Blocks(address, self._head_bytes, self.requests * self.signature.kv_heads)

    def _copy(self, copies: list[tuple[Blocks, Blocks]], slots: int) -> None:
        """Copy as many KV slots of all heads and buffers."""
        signature = self.signature
        with self._faults():
            self._device.copy(copies, slots * self._row_bytes, signature.kv_heads, 2 * signature.layers)

    def _allocated(self, size: int) -> ort.OrtValue:
        """New device memory, whose content is undefined."""
        return ort.OrtValue.ortvalue_from_shape_and_type((size,), _UINT8, self._kind, 0)

    def _start(self, session: ort.InferenceSession, options: ort.RunOptions) -> None:
        """Run a session with the bound buffers."""
        if self._thread is None:
            session.run_with_iobinding(self._binding, options)
        else:
            self._thread.submit(session.run_with_iobinding, self._binding, options).result()

    def _floats(self, use: str, shape: tuple[int, ...]) -> int:
        """The address of device memory for numbers of this shape."""
        return int(self._device_memory(use, _power(4 * math.prod(shape))).data_ptr())

    def _device_memory(self, use: str, size: int) -> ort.OrtValue:
        if (use, size) not in self._memory:
            self._memory[use, size] = self._allocated(size)
        return self._memory[use, size]

    def _bind(self, first: int, shape: CallShape, rows: int) -> None:
        """Bind the inputs and outputs of a call that are not bound yet."""
        signature, kind = self.signature, self._kind
        if self._shape != shape:
            ranges = self._staging.ranges(shape)
            for tensor in signature.rows:
                offset, dims = ranges[tensor.name]
                self._binding.bind_input(tensor.name, kind, 0, DTYPES[tensor.dtype].onnx, dims, rows + offset)
            logits = shape.logits(signature)
            self._binding.bind_output("logits", kind, 0, _FLOAT, logits, self._floats("logits", logits))
            self._shape = shape
        if self._range != (first, shape.requests):
            dims = (shape.requests, signature.kv_heads, self.capacity, signature.head_dim)
            dtype = DTYPES[signature.kv_dtype].onnx
            for index, (past, present) in enumerate(zip(signature.past, signature.present, strict=True)):
                self._binding.bind_input(past.name, kind, 0, dtype, dims, self._address(index, first))
                self._binding.bind_output(present.name, kind, 0, dtype, dims, self._address(index, first))
            self._range = (first, shape.requests)


def _power(size: int) -> int:
    return max(_LEAST, 1 << (size - 1).bit_length())


def open_engine(bundle: Bundle, options: EngineOptions) -> DeviceEngine:
    """The bundle's graph on the first GPU."""
    missing = preload()
    ort.set_default_logger_severity(_ERROR)  # a session's own severity leaves out a warning for each ScatterND
    try:
        session, notes = open_on_gpu(bundle, options.graphs)
        if _PROVIDER not in session.get_providers():  # happens in spite of enable_fallback=0
            raise MissingDependency(without_cuda(missing))
        name = f"cuda:0 ({gpu().name})"
        graphs = options.graphs and not notes
        selection = open_selection(bundle, [_PROVIDER, "CPUExecutionProvider"])
        signature, memory = bundle.manifest.signature, device_memory()
        return DeviceEngine(session, signature, options, "cuda", name, memory, graphs, notes, selection)
    except FAULTS as error:
        if _NO_MEMORY.search(str(error)):
            raise OptionFault(out_of_memory(bundle, options)) from error
        if isinstance(error, MissingDependency | EngineFault):
            raise
        raise unloadable(bundle, error) from error
    finally:
        ort.set_default_logger_severity(_WARNING)


def preload() -> tuple[str, ...]:
    """Load the CUDA libraries that are installed as packages; returns the missing ones.

    onnxruntime looks for packages only beside itself: those elsewhere on the path, as of torch, are loaded here."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # it prints to standard output
        ort.preload_dlls()
    return tuple(name for name in re.findall(r"Failed to load ([^\s/]+):", printed.getvalue()) if not _loads(name))


def _loads(name: str) -> bool:
    """Whether a library of NVIDIA's packages or of torch is loaded now."""
    for folder in _library_folders():
        for file in sorted(folder.glob(name)):
            with contextlib.suppress(OSError):  # it needs another one, or is broken: the next may load
                ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
                return True
    return False


def _library_folders() -> Iterator[Path]:
    """The folders of installed packages that have CUDA libraries."""
    for package, pattern in (("nvidia", "*/lib"), ("torch", "lib")):
        spec = find_spec(package)
        for place in (spec and spec.submodule_search_locations) or ():
            yield from sorted(Path(place).glob(pattern))


def open_on_gpu(bundle: Bundle, graphs: bool) -> tuple[ort.InferenceSession, tuple[str, ...]]:
    """A session of the graph that can capture CUDA graphs; or one that cannot, and a note that says why."""
    notes: tuple[str, ...] = ()
    supported = tuple(int(part) for part in re.findall(r"\d+", ort.__version__)[:2]) >= _GRAPHS_SINCE
    if graphs and supported:
        try:
            return _session(bundle, True), ()  # fails if any node other than shape computations is not on the GPU
        except FAULTS as error:
            if not _NO_GRAPHS.search(str(error)):
                raise
        notes = ("no CUDA graphs: onnxruntime did not put the whole graph on the GPU",)
    elif graphs:
        notes = (f"no CUDA graphs: onnxruntime {ort.__version__} has faults in them, update it to 1.30",)
    session = _session(bundle, False)
    nodes = cpu_nodes(session)
    if graphs and supported and not nodes:
        nodes = cpu_nodes(session, frozenset())
    return session, (*notes, *nodes)


def cpu_nodes(session: ort.InferenceSession, expected: Collection[str] = _ARITHMETIC) -> tuple[str, ...]:
    """A note that names nodes that run on the CPU, except those of these operators."""
    nodes = [
        f"{node.op_type} {node.name}"
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == "CPUExecutionProvider"
        for node in part.get_nodes()
        if node.op_type not in expected
    ]
    if not nodes:
        return ()
    more = f" and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
    return (f"on the CPU, not on the GPU: {', '.join(nodes[:_MOST_NAMED])}{more}",)


def without_cuda(missing: Sequence[str]) -> str:
    """Error message if the CUDA provider does not start."""
    major = ort.cuda_version.partition(".")[0] or "13"
    cause = f"{', '.join(missing)} cannot be loaded" if missing else "the driver does not take it, look at nvidia-smi"
    return (
        f"onnxruntime {ort.__version__} does not start CUDA {major}: {cause}: pip install 'onnxruntime-gpu[cuda,cudnn]', or "
        f"install CUDA {major} and cuDNN and name their folders in LD_LIBRARY_PATH"
    )


def out_of_memory(bundle: Bundle, options: EngineOptions) -> str:
    """Error message if the bundle does not fit into GPU memory."""
    manifest = bundle.manifest
    buffers = manifest.signature.kv_bytes(options.requests, options.capacity) / 1e9
    weights = manifest.graph_bytes / 1e9
    return (
        f"{weights:.1f} GB of weights and {buffers:.1f} GB of KV buffers ({options.requests} requests of {options.capacity} "
        f"slots) do not fit into the {gpu().memory / 1e9:.1f} GB of the {gpu().name}: lower max_seq_len or "
        "max_requests"
    )


def _session(bundle: Bundle, graphs: bool) -> ort.InferenceSession:
    options = session_options(1)  # CPU threads, which only compute shapes
    options.add_session_config_entry(_RECORD, "1")
    provider: dict[str, Any] = {
        "device_id": 0,
        "enable_cuda_graph": int(graphs),
        "use_tf32": 0,  # TF32 has 10 of float32's 23 mantissa bits
        "arena_extend_strategy": "kSameAsRequested",  # the default allocates up to twice as much
    }
    return open_session(bundle, options, [(_PROVIDER, provider), "CPUExecutionProvider"])
