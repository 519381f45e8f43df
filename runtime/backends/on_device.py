"""On a device: a scatter-lowered graph in an onnxruntime session, all that it reads and writes in memory of one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from spaceport.graphs.contract.dtypes import DTYPES
from spaceport.graphs.contract.signature import Signature, logit_rows, selection_width
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.on_onnxruntime import FAULTS
from spaceport.runtime.backends.staging import Block, CallShape, Limits, end_of, filled_up, ranges_of
from spaceport.runtime.engine import UNTIMED, Batch, Costs, EngineFault, Moves
from spaceport.runtime.selection import SelectedRows, selected_rows

_UINT8 = 2  # onnx.TensorProto.UINT8; numpy has no bfloat16, so types are named by their numbers

_LEAST = 1 << 14  # bytes of the smallest block
MOST_GRAPHS = 128  # each holds some megabytes of the device
_GRAPH_ROWS = 64  # wider calls take longer than their start does
_COMMON = 3  # a call that came so often comes again
PLAIN = -1  # the graph id of a call that is neither captured nor replayed


class Graphs:
    """Which calls onnxruntime keeps as CUDA graphs: those of few rows that come again; all others run plainly."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: Counter[tuple[int, CallShape]] = Counter()
        self._ids: dict[tuple[int, CallShape], int] = {}
        self._options: dict[int, ort.RunOptions] = {}

    def options(self, first: int, shape: CallShape) -> ort.RunOptions:
        """How a call of the requests from `first` on is to run."""
        number = self.number(first, shape)
        if number not in self._options:
            self._options[number] = ort.RunOptions()
            self._options[number].add_run_config_entry("gpu_graph_id", str(number))
        return self._options[number]

    def number(self, first: int, shape: CallShape) -> int:
        """The id of a call's graph; a graph holds the addresses of its requests' buffers, so it is theirs alone."""
        key = (first, shape)
        if (known := self._ids.get(key)) is not None:
            return known
        if len(self._ids) == self._most or shape.rows > _GRAPH_ROWS:
            return PLAIN
        self._seen[key] += 1
        if self._seen[key] <= _COMMON:
            return PLAIN
        self._ids[key] = len(self._ids)
        return self._ids[key]


class Staged(NamedTuple):
    """A block of the host and the one of the device that it is copied to."""

    block: Block
    memory: ort.OrtValue


class DeviceEngine:
    """A graph in an onnxruntime session on a device.

    Everything is bound by its address, and no address that was ever bound is given up before the engine is closed: captured
    graphs hold them.
    """

    costs: Costs = UNTIMED

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: Signature,
        options: EngineOptions,
        kind: Literal["cuda", "cpu"],
        device: str,
        graphs: bool = False,
        notes: tuple[str, ...] = (),
        selection: ort.InferenceSession | None = None,  # of the bundle's graph that selects tokens
    ) -> None:
        self.selects = selection is not None
        self.signature = signature
        self.capacity = self.rows = options.capacity
        self.requests = options.requests
        self.device = device
        self.notes = notes
        self._session: ort.InferenceSession | None = session
        self._kind = kind
        self._limits = Limits(self.capacity, self.rows, logit_rows(self.rows, signature.vocab_size))
        # one block of 2 * layers x requests x Hkv x S x D; zeroed, since 0 * NaN is NaN
        kv = np.zeros(signature.kv_bytes(options.requests, options.capacity), np.uint8)
        self._kv = ort.OrtValue.ortvalue_from_numpy(kv, kind, 0)
        self._staged: dict[int, Staged] = {}  # by its bytes
        self._logits: dict[int, ort.OrtValue] = {}  # the same
        self._selected: dict[int, ort.OrtValue] = {}  # the same
        self._graphs = Graphs(MOST_GRAPHS if graphs else 0)
        # onnxruntime keeps graphs by the OS thread that captured them, and as long as the session: all are of this one,
        # since the runtime's worker ends when it has nothing to do, and those of another thread would be captured again
        self._thread = ThreadPoolExecutor(1, "spaceport-graphs") if graphs else None
        self._binding = session.io_binding()
        self._selection = selection
        self._shape: CallShape | None = None  # of the call that is bound
        self._range: tuple[int, int] | None = None  # of requests whose buffers are bound

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self._compute(batch)
        return self._copied()[:, : batch.logit_rows.shape[1]]

    def select(self, batch: Batch) -> list[SelectedRows]:
        """The best tokens of the wanted rows of each request; only these are copied to the host."""
        assert self._selection is not None
        shape = self._compute(batch)
        logits = (shape.requests, shape.wanted, self.signature.vocab_size)
        packed = (*logits[:2], selection_width(self.signature.vocab_size))
        kind, binding = DTYPES["float32"].onnx, self._selection.io_binding()
        try:
            binding.bind_input("logits", self._kind, 0, kind, logits, self._logits_memory(logits).data_ptr())
            memory = self._logits_memory(packed, selected=True)
            binding.bind_output("selection", self._kind, 0, kind, packed, memory.data_ptr())
            self._selection.run_with_iobinding(binding)
            found: NDArray[np.float32] = binding.get_outputs()[0].numpy()
        except FAULTS as error:
            raise self._fault(error) from error
        return selected_rows(found, self._copied, batch.logit_rows.shape[1])

    def _compute(self, batch: Batch) -> CallShape:
        """Run a call, whose logits then are in the device's memory; the sizes that it was filled up to."""
        if self._session is None:
            raise EngineFault(f"onnxruntime on {self.device}: the engine is closed")
        shape = filled_up(batch, self.signature, self._limits)
        try:
            staged = self._stage(end_of(self.signature, shape))
            staged.block.write(batch, shape, self.capacity)
            staged.memory.update_inplace(staged.block.memory)
            self._bind(batch.first, shape, staged.memory.data_ptr())
            self._start(self._session, self._graphs.options(batch.first, shape))
        except FAULTS as error:
            raise self._fault(error) from error
        return shape

    def _copied(self) -> NDArray[np.float32]:
        """The logits of the last call; they were bound first, so only they are copied, and only the rows of the call."""
        try:
            logits: NDArray[np.float32] = self._binding.get_outputs_as_ortvaluevector()[0].numpy()
        except FAULTS as error:
            raise self._fault(error) from error
        return logits

    def _fault(self, error: Exception) -> EngineFault:
        return EngineFault(f"onnxruntime on {self.device} ({self.signature.dtype}) failed in a step: {error}")

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        if any(sources.size for sources, _ in moves):
            raise EngineFault(
                f"onnxruntime on {self.device}: a scatter-lowered graph writes rows anywhere, nothing moves"
            )

    def clear(self, request: int) -> None:
        size = self._bytes_of_request
        zeros = np.zeros(size, np.uint8)
        for index in range(2 * self.signature.layers):
            at = self._kv.data_ptr() + (index * self.requests + request) * size
            self._view(at, size).update_inplace(zeros)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._session = self._binding = self._selection = (
            None  # the graphs that hold addresses go before the memory does
        )
        self._staged.clear()
        self._logits.clear()
        self._selected.clear()
        self._kv = None

    @property
    def _bytes_of_request(self) -> int:
        """Of one of its buffers."""
        signature = self.signature
        return signature.kv_heads * self.capacity * signature.head_dim * DTYPES[signature.dtype].bytes

    def _start(self, session: ort.InferenceSession, options: ort.RunOptions) -> None:
        """Do what is bound."""
        if self._thread is None:
            session.run_with_iobinding(self._binding, options)
        else:
            self._thread.submit(session.run_with_iobinding, self._binding, options).result()

    def _stage(self, size: int) -> Staged:
        """The block for a call of so many bytes; blocks are powers of two, since a copy takes all of one."""
        size = _power(size)
        if size not in self._staged:
            block = Block(np.zeros(size, np.uint8), self.signature)
            self._staged[size] = Staged(block, self._memory(size))
        return self._staged[size]

    def _logits_memory(self, shape: tuple[int, ...], selected: bool = False) -> ort.OrtValue:
        """The memory that logits of a shape are written to, or their selection."""
        size, kept = _power(DTYPES["float32"].bytes * int(np.prod(shape))), self._selected if selected else self._logits
        if size not in kept:
            kept[size] = self._memory(size)
        return kept[size]

    def _memory(self, size: int) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_shape_and_type((size,), _UINT8, self._kind, 0)

    def _view(self, address: int, size: int) -> ort.OrtValue:
        """Some bytes of the device as a value: onnxruntime makes none of an address but as what an output is bound to."""
        assert self._session is not None
        binding = self._session.io_binding()
        binding.bind_output("logits", self._kind, 0, _UINT8, (size,), address)
        return binding.get_outputs()[0]

    def _bind(self, first: int, shape: CallShape, rows: int) -> None:
        """Tell the session where all of a call is, as far as that is new."""
        if self._shape != shape:
            types = {tensor.name: DTYPES[tensor.dtype].onnx for tensor in self.signature.rows}
            for name, part in ranges_of(self.signature, shape).items():
                self._binding.bind_input(name, self._kind, 0, types[name], part.shape, rows + part.offset)
            logits = (shape.requests, shape.wanted, self.signature.vocab_size)
            memory = self._logits_memory(logits)
            self._binding.bind_output("logits", self._kind, 0, DTYPES["float32"].onnx, logits, memory.data_ptr())
            self._shape = shape
        if self._range != (first, shape.requests):
            self._bind_buffers(first, shape.requests)
            self._range = (first, shape.requests)

    def _bind_buffers(self, first: int, count: int) -> None:
        signature, size = self.signature, self._bytes_of_request
        dims = (count, signature.kv_heads, self.capacity, signature.head_dim)
        kind = DTYPES[signature.dtype].onnx
        for index, (past, present) in enumerate(zip(signature.past, signature.present, strict=True)):
            address = self._kv.data_ptr() + (index * self.requests + first) * size
            self._binding.bind_input(past.name, self._kind, 0, kind, dims, address)
            self._binding.bind_output(present.name, self._kind, 0, kind, dims, address)


def _power(size: int) -> int:
    return max(_LEAST, 1 << (size - 1).bit_length())
