"""ONNX Runtime on the CPU; KV buffers are bound once as inputs and outputs."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, zip_longest
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.formats import FORMATS, Format, Weights
from spaceport.graphs.contract.manifest import MODEL_FILE, SELECTION_FILE
from spaceport.graphs.contract.signature import DTYPES, Signature, Tensor, selection_width
from spaceport.kernels.native_library import DOMAIN, library_path, register
from spaceport.runtime.backends.graph_file import (
    ExternalTensor,
    external_files,
    external_tensors,
    imported_version,
)
from spaceport.runtime.backends.machine import engine_threads
from spaceport.runtime.bundle import Bundle, BundleError
from spaceport.runtime.engine import CPU_COSTS, Batch, Engine, EngineFault, EngineOptions, Moves, slots_in_order
from spaceport.runtime.memory import KvMemory, copied_file, return_freed_memory
from spaceport.runtime.opened_files import OpenedFiles

# onnxruntime's exceptions have no common base class; broken files also raise Python's own.
FAULTS: tuple[type[Exception], ...] = (
    *(
        kind
        for kind in vars(onnxruntime_pybind11_state).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ),
    RuntimeError,
    UnicodeDecodeError,
)

_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
# Let weights that are stored smaller be multiplied in the type of the graph, as on TensorRT.
_UNPACKED: dict[Weights, tuple[str, str]] = {
    "int4": ("session.qdq_matmulnbits_accuracy_level", "1"),
    "int8": ("session.disable_quant_qdq", "1"),
    "float8": ("session.disable_quant_qdq", "1"),
}
# numpy's types by number of onnx.TensorProto.DataType: those of native graphs.
_NUMPY_OF = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64, 9: np.bool_}
NOT_COMPILED = (
    "native operators were not compiled when Spaceport was installed: standard operators compute the same, much slower; "
    "install a C++ compiler (g++ or clang, or pip install ziglang), then install Spaceport again"
)
# Bytes of a bundle up to which standard operators unpack native weights once, when it is opened, instead of in each step:
# this takes 40 times as much memory meanwhile (17 GB for 0.4 GB were seen).
MOST_FOLDED = 64_000_000
_MOST_CALLS = 1024  # shapes of calls whose OrtValues are kept, 2.4 kB each


class _Call(NamedTuple):
    """Memory of calls of one shape, which need not be bound again while the shape stays."""

    arrays: dict[str, NDArray[Any]]  # the rows, and the logits
    values: dict[str, ort.OrtValue]  # the same memory as onnxruntime takes it


class OnnxRuntimeEngine(Engine):
    """A graph in an onnxruntime session on the CPU."""

    device = "cpu"
    costs = CPU_COSTS
    parks = True

    def __init__(self, session: ort.InferenceSession, signature: Signature, capacity: int, requests: int) -> None:
        self.signature = signature
        self.capacity = capacity
        self.requests = requests
        self.rows = capacity
        # One block of keys and values, so that one statement moves slots in all layers, and one of their scales.
        # Zeroed, since 0 * NaN is NaN. Axes: buffers, requests, heads, slots, numbers.
        shape = (2 * signature.layers, requests, signature.kv_heads, capacity, signature.head_dim)
        self._memory = KvMemory(shape, np.dtype(signature.kv_dtype))
        self._kv = [self._memory.array]
        if signature.has_scales:
            scales = (signature.layers, requests, 2 * signature.kv_heads, capacity, 1)
            self._kv.append(KvMemory(scales, np.float32).array)
        self._session: ort.InferenceSession | None = session
        self._binding = session.io_binding()
        self._bound: tuple[int, int] | None = None  # range of requests whose buffers are bound
        self._call: _Call | None = None  # whose memory is bound
        self._calls: dict[tuple[int, ...], _Call] = {}  # by shape
        self._flat: dict[str, NDArray[Any]] = {}  # memory of the largest calls so far, of which other calls use a part

    def run(self, batch: Batch) -> NDArray[np.float32]:
        if self._session is None:
            raise EngineFault("onnxruntime: the engine is closed")
        self._memory.use_huge_pages(batch.first, batch.requests, batch.attention_mask.shape[-1])
        self._bind_buffers(batch.first, batch.requests)
        call = self._bound_call(batch)
        for tensor in self.signature.rows:
            call.arrays[tensor.name][...] = getattr(batch, tensor.name)
        try:
            self._session.run_with_iobinding(self._binding)
        except FAULTS as error:
            raise EngineFault(
                f"onnxruntime ({self.signature.dtype}, {self.signature.lowering}) failed in a step: {error}"
            ) from error
        return call.arrays["logits"]

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        for request, (sources, targets) in enumerate(moves, first):
            for buffers in self._kv if sources.size else ():
                buffers[:, request, :, targets] = buffers[:, request, :, sources]

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        same = slots_in_order(slots)  # a slice is copied faster than slots one by one
        for buffer in chain(*self._kv):  # one by one: numpy copies all layers twice, since they might overlap
            rest = buffer[source][:, slots[same:]]
            if source != target:
                buffer[target, :, :same] = buffer[source, :, :same]
            buffer[target, :, same : slots.size] = rest

    def saved(self, request: int, slots: int) -> list[NDArray[Any]]:
        return [buffers[:, request, :, :slots].copy() for buffers in self._kv]

    def restore(self, request: int, rows: Sequence[NDArray[Any]]) -> None:
        for buffers, part in zip(self._kv, rows, strict=True):
            buffers[:, request, :, : part.shape[2]] = part

    def clear(self, request: int) -> None:
        for buffers in self._kv:
            buffers[:, request] = 0

    def close(self) -> None:
        self._session = None

    def _bind_buffers(self, first: int, count: int) -> None:
        if self._bound == (first, count):
            return
        values, *scales = (buffers[:, first : first + count] for buffers in self._kv)
        views = [
            view
            for layer in range(self.signature.layers)
            for view in (values[2 * layer], values[2 * layer + 1], *(each[layer, ..., 0] for each in scales))
        ]
        for view, past, present in zip(views, self.signature.past, self.signature.present, strict=True):
            address, dtype = view.ctypes.data, view.dtype.type
            self._binding.bind_input(past.name, "cpu", 0, dtype, view.shape, address)
            self._binding.bind_output(present.name, "cpu", 0, dtype, view.shape, address)
        self._bound = (first, count)

    def _bound_call(self, batch: Batch) -> _Call:
        """The memory for a call, bound; OrtValues are kept, since making one for each call takes longer than copying."""
        shape = (*batch.input_ids.shape, batch.attention_mask.shape[-1], batch.logit_rows.shape[1])
        call = self._calls.get(shape) or self._new_call(shape)
        if call is not self._call:
            for name, value in call.values.items():
                if name == "logits":
                    self._binding.bind_ortvalue_output(name, value)
                else:
                    self._binding.bind_ortvalue_input(name, value)
            self._call = call
        return call

    def _new_call(self, shape: tuple[int, ...]) -> _Call:
        """Memory for calls of a shape (B, T, A, R), shared with calls of other shapes."""
        sizes = dict(zip("BTAR", shape, strict=True)) | {"L": shape[-1] * self.signature.lines}
        arrays: dict[str, NDArray[Any]] = {}
        for tensor in (*self.signature.rows, self.signature.outputs[0]):
            dims = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
            if tensor.name not in self._flat or self._flat[tensor.name].size < prod(dims):
                self._flat[tensor.name] = np.empty(prod(dims), np.dtype(tensor.dtype))
                self._calls.clear()  # they use the memory that this replaces
            arrays[tensor.name] = self._flat[tensor.name][: prod(dims)].reshape(dims)
        if len(self._calls) == _MOST_CALLS:
            self._calls.clear()
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
        call = self._calls[shape] = _Call(arrays, values)
        return call


def open_engine(bundle: Bundle, options: EngineOptions) -> OnnxRuntimeEngine:
    """The bundle's graph in a session, with native operators if it has them and they are compiled."""
    library = library_path()
    engine = open_with_library(bundle, options, library)
    if bundle.manifest.native and library is None:
        engine.notes = (NOT_COMPILED,)
    return engine


def open_with_library(bundle: Bundle, options: EngineOptions, library: Path | None) -> OnnxRuntimeEngine:
    """The bundle's graph in a session; without the library, a native graph runs its functions of standard operators."""
    settings = options_for(bundle, engine_threads(options.threads), library)
    try:
        session = open_session(bundle, settings, ["CPUExecutionProvider"])
    except FAULTS as error:
        raise unloadable(bundle, error) from error
    return OnnxRuntimeEngine(session, bundle.manifest.signature, options.capacity, options.requests)


def session_options(threads: int, number_format: Format = FORMATS["float32"]) -> ort.SessionOptions:
    """Session options for shapes that change from step to step, without onnxruntime's own log output."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.enable_mem_pattern = False
    if not number_format.native and number_format.weights in _UNPACKED:
        options.add_session_config_entry(*_UNPACKED[number_format.weights])
    return options


def options_for(bundle: Bundle, threads: int, library: Path | None) -> ort.SessionOptions:
    """Session options for a bundle's graph, with native operators if it has them and their library is given."""
    number_format = bundle.manifest.number_format
    options = session_options(threads, number_format)
    if number_format.native and library is not None:
        try:
            needed = imported_version(bundle.read(MODEL_FILE), DOMAIN)
        except ValueError as error:
            raise unloadable(bundle, error) from error
        try:
            register(options, library, needed)
        except ValueError as error:  # of a library that is too old, or that a variable configures wrongly
            raise BundleError(f"{bundle.path}: {error}") from error
    elif number_format.native and bundle.manifest.graph_bytes > MOST_FOLDED:
        options.add_session_config_entry("optimization.disable_specified_optimizers", "ConstantFolding")
    return options


def open_session(bundle: Bundle, options: ort.SessionOptions, providers: Sequence[Any]) -> ort.InferenceSession:
    """A session of the bundle's graph, checked against the manifest; raises onnxruntime's own errors."""
    graph, signature = bundle.read(MODEL_FILE), bundle.manifest.signature
    session = session_of(bundle, graph, options, providers)
    _check_tensors(session, bundle.path / MODEL_FILE, signature.inputs, signature.outputs)
    return session


def session_of(
    bundle: Bundle, graph: bytes, options: ort.SessionOptions, providers: Sequence[Any]
) -> ort.InferenceSession:
    """A session of a graph with the weights of the bundle's own, read from the files that were verified.

    Raises if one of them was changed or replaced meanwhile.
    """
    files, names = bundle.files, _weight_files(bundle, graph)
    assert files is not None, "engines run bundles whose files were verified"
    values = dict[str, ort.OrtValue]()
    with ExitStack() as mapped:
        if bundle.copies_weights and bundle.manifest.native:
            values |= _copied(bundle, files, graph)
            options.add_external_initializers(list(values), list(values.values()))  # instead of opening the file
            for name, value in values.items():
                options.add_initializer(name, value)  # without another copy
        if bundle.copies_weights and not bundle.manifest.native:  # types that numpy lacks; most are packed, and freed
            maps = [mapped.enter_context(_mapped(files, name)) for name in names]
            options.add_external_initializers_from_files_in_memory(names, maps, [len(content) for content in maps])
        else:  # without it, weights that are not copied, as in attributes, would be read from the current folder
            options.add_session_config_entry(_WEIGHTS_FOLDER, files.location)
        session = ort.InferenceSession(graph, options, providers=providers, enable_fallback=0)
    weakref.finalize(session, values.clear).atexit = False  # it uses their memory without holding it
    if bundle.copies_weights:
        return_freed_memory()  # the copies of weights that a session freed after packing
    for name in names:
        files.require_same(name)
    return session


def _weight_files(bundle: Bundle, graph: bytes) -> list[str]:
    """The files from which a graph loads its weights; raises if the manifest does not list one of them."""
    try:
        named = sorted(external_files(graph))
    except ValueError as error:
        raise unloadable(bundle, error) from error
    for name in named:
        if name not in bundle.manifest.files:
            raise BundleError(
                f"{bundle.path / MODEL_FILE}: loads weights from {name!r}, which the manifest does not list: export it again"
            )
    return named


def _copied(bundle: Bundle, files: OpenedFiles, graph: bytes) -> dict[str, ort.OrtValue]:
    """The weights of a native graph by their names, in memory of their own."""
    try:
        tensors = external_tensors(graph)
        contents = {name: copied_file(files.descriptor(name)) for name in {tensor.file for tensor in tensors}}
        return {
            tensor.name: ort.OrtValue.ortvalue_from_numpy(_array(tensor, contents[tensor.file])) for tensor in tensors
        }
    except MemoryError as error:
        raise OptionFault(
            f"{bundle.path}: {error} do not fit into memory: map them (--map-weights, copy_weights=False)"
        ) from error
    except (ValueError, EOFError) as error:
        for name in external_files(graph):
            files.require_same(name)
        raise unloadable(bundle, error) from error


def _array(tensor: ExternalTensor, content: NDArray[np.uint8]) -> NDArray[Any]:
    """An initializer as a part of its file; raises ValueError if it is not one."""
    if tensor.kind not in _NUMPY_OF:
        raise ValueError(f"{tensor.name} has the element type {tensor.kind}: expected {', '.join(map(str, _NUMPY_OF))}")
    dtype = np.dtype(_NUMPY_OF[tensor.kind])
    size, end = prod(tensor.shape) * dtype.itemsize, tensor.begin + tensor.bytes
    if tensor.bytes != size or not 0 <= tensor.begin <= end <= content.size:
        got = f"bytes {tensor.begin} to {end} of {content.size} in {tensor.file}"
        raise ValueError(f"{tensor.name} has {got}: expected {size} bytes for the shape {list(tensor.shape)}")
    return content[tensor.begin : end].view(dtype).reshape(tensor.shape)


@contextmanager
def _mapped(files: OpenedFiles, name: str) -> Iterator[memoryview]:
    """The content of a verified file in memory, read when it is accessed."""
    with mmap.mmap(files.descriptor(name), 0, prot=mmap.PROT_READ) as content, memoryview(content) as view:
        yield view


def open_selection(bundle: Bundle, providers: Sequence[Any]) -> ort.InferenceSession | None:
    """A session of the bundle's graph for token selection, if it has one.

    It is used on devices, where it saves copying logits; on a CPU it takes longer than numpy's argmax.
    """
    if SELECTION_FILE not in bundle.manifest.files:
        return None
    graph, size = bundle.read(SELECTION_FILE), bundle.manifest.signature.vocab_size
    session = ort.InferenceSession(graph, session_options(1), providers=providers, enable_fallback=0)
    logits = Tensor("logits", "float32", ("B", "R", size))
    selection = Tensor("selection", "float32", ("B", "R", selection_width(size)))
    _check_tensors(session, bundle.path / SELECTION_FILE, (logits,), (selection,))
    return session


def unloadable(bundle: Bundle, error: Exception) -> BundleError:
    """The error for a graph that onnxruntime cannot load."""
    return BundleError(
        f"onnxruntime {ort.__version__} does not load {bundle.path / MODEL_FILE}: {error}: export it again, or update "
        "onnxruntime"
    )


def _check_tensors(
    session: ort.InferenceSession, path: Path, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Raise if the inputs and outputs of a graph are not the expected ones."""
    for kind, values, tensors in (("input", session.get_inputs(), inputs), ("output", session.get_outputs(), outputs)):
        got = [_tensor(value.name, value.type, value.shape) for value in values]
        expected = [
            _tensor(tensor.name, f"tensor({DTYPES[tensor.dtype].onnxruntime})", tensor.shape) for tensor in tensors
        ]
        for ours, theirs in zip_longest(got, expected, fillvalue="nothing more"):
            if ours != theirs:
                raise BundleError(f"{path}: has the {kind} {ours}, the manifest says {theirs}: export it again")


def _tensor(name: str, kind: str, shape: Sequence[int | str]) -> str:
    return f"{name} {kind} [{', '.join(str(size) if isinstance(size, int) else '?' for size in shape)}]"
