"""Stand-in for TensorRT's API on machines without a GPU.

It records calls, refuses what TensorRT refuses, and runs the engine's graph with ONNX Runtime in the bound memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast
from weakref import ref

import numpy as np
import onnxruntime as ort
import torch

from spaceport.graphs.contract.manifest import MODEL_FILE, EngineRecord
from spaceport.graphs.contract.signature import logit_rows
from spaceport.runtime.backends.built_engines import NamedEngine
from spaceport.runtime.backends.on_tensorrt import Device, TensorRtEngine, deserialized
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.engine import Batch, EngineOptions

T = TypeVar("T")
SCRATCH = (1000, 5000)  # bytes of the two profiles

Kind = Enum("Kind", "FLOAT HALF BF16 INT64 BOOL")
_KINDS = {"float32": Kind.FLOAT, "int64": Kind.INT64, "bool": Kind.BOOL}
Mode = Enum("Mode", "INPUT OUTPUT")
Location = Enum("Location", "DEVICE HOST")
Strategy = Enum("Strategy", "STATIC USER_MANAGED")
Specialization = Enum("Specialization", "LAZY EAGER NONE")


class Logger:
    """TensorRT's logger: derived classes receive messages."""

    INTERNAL_ERROR, ERROR, WARNING = 0, 1, 2

    def log(self, severity: int, message: str) -> None:
        raise NotImplementedError


@dataclass
class Plan:
    """The graph of an engine, and how the engine differs from what it should be."""

    bundle: Bundle
    record: EngineRecord
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)  # method -> tensor -> what it returns instead
    profiles: int = 2
    why_not: str | None = None  # message if it does not open
    switches: bool = True  # whether a context can switch to a profile
    compiles: bool = True  # whether kernels are compiled at run time, as TensorRT-RTX does
    fails: bool = False  # whether every step fails


class StandInDevice(Device):
    """A GPU whose memory is the host's; captured work is done when it is replayed."""

    stream = 77

    def __init__(self) -> None:
        self.memory: list[torch.Tensor] = []
        self.capturing: list[Callable[[], None]] | None = None
        self.captured = self.replayed = self.waited = self.given_back = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.memory.append(torch.zeros(tuple(shape), dtype=dtype))
        return self.memory[-1]

    def host(self, size: int) -> torch.Tensor:
        self.memory.append(torch.zeros(size, dtype=torch.uint8))
        return self.memory[-1]

    @contextmanager
    def working(self) -> Iterator[None]:
        yield

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.capturing = []
        work()
        recorded, self.capturing = self.capturing, None
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            for one in recorded:
                one()

        return replay

    def wait(self) -> None:
        self.waited += 1

    def release_cached(self) -> None:
        self.given_back += 1

    def do(self, work: Callable[[], None]) -> None:
        """Enqueue work on the stream."""
        if self.capturing is not None:
            self.capturing.append(work)
        else:
            work()

    def holds(self, address: int, size: int = 1, aligned: int = 1) -> bool:
        """Whether an address range is allocated memory; all memory is as aligned as a GPU's would be."""
        offsets = [(address - tensor.data_ptr(), tensor.nbytes) for tensor in self.memory]
        return any(0 <= offset <= length - size and not offset % aligned for offset, length in offsets)


class StandInContext:
    """One profile, its shapes and addresses."""

    def __init__(self, engine: StandInEngine, device: StandInDevice, config: RuntimeConfig | None) -> None:
        self.engine, self.device = engine, device
        self._config = None if config is None else ref(config)  # owned by the caller, not by the context
        self.profile = -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.bound: list[str] = []  # names in the order of the calls that bind them
        self.ran: list[dict[str, tuple[int, ...]]] = []
        # shapes and addresses of the last call on the stream
        self.settled: tuple[dict[str, tuple[int, ...]], dict[str, int]] | None = None
        self.scratch = 0

    @property
    def config(self) -> RuntimeConfig | None:
        assert self._config is None or self._config() is not None, "a context reads its config as long as it lives"
        return self._config() if self._config else None

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream == self.device.stream
        if not (self.engine.plan.switches and profile < self.engine.num_optimization_profiles):
            self.engine.logger.log(Logger.ERROR, f"setOptimizationProfileAsync: no profile {profile} today")
            raise RuntimeError("Error in set optimization profile async.")  # the bindings do not return false
        self.profile = profile
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        assert self.device.holds(address, size)
        self.scratch = size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        if not self.engine.takes(self.profile, name, shape):
            message = f"setInputShape: {name} {list(shape)} is not within profile {self.profile}"
            self.engine.logger.log(Logger.ERROR, message)
            return False
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert self.device.holds(address, aligned=256), f"{name} is bound to memory that is not aligned to 256 bytes"
        self.addresses[name] = address
        self.bound.append(name)
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == self.device.stream
        assert self.scratch >= SCRATCH[self.profile]
        if self.engine.plan.fails:
            self.engine.logger.log(Logger.ERROR, "enqueueV3: the GPU has caught fire")
            return False
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        for present, past in self.engine.pairs.items():
            assert addresses[past] == addresses[present], "a buffer is not written in place"
        if self.device.capturing is None:
            self.settled = (shapes, addresses)
        assert self.settled == (shapes, addresses), "what is done once for new shapes is captured"
        self.ran.append(shapes)
        if (config := self.config) is not None and config.cache is not None:
            config.cache.content = b"compiled" + b"%d" % len(self.ran)
        self.device.do(lambda: self.engine.compute(shapes, addresses))
        return True


class RuntimeCache:
    """Compiled kernels: here, the number of runs of a context."""

    def __init__(self) -> None:
        self.content = b""

    def deserialize(self, content: bytes) -> bool:
        if content.startswith(b"compiled"):
            self.content = content
        return bool(self.content)

    def serialize(self) -> bytes:
        return self.content


class RuntimeConfig:
    """Options of a TensorRT-RTX context."""

    strategy = Strategy.STATIC
    dynamic_shapes_kernel_specialization_strategy = Specialization.LAZY
    cache: RuntimeCache | None = None

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache()

    def set_runtime_cache(self, cache: RuntimeCache) -> bool:
        self.cache = cache
        return True

    def set_execution_context_allocation_strategy(self, strategy: Strategy) -> None:
        self.strategy = strategy


class StandInEngine:
    """A deserialized engine."""

    def __init__(self, plan: Plan, logger: Any, device: StandInDevice) -> None:
        self.plan, self.logger, self.device = plan, logger, device
        signature = plan.bundle.manifest.signature
        self._tensors = {tensor.name: tensor for tensor in (*signature.inputs, *signature.outputs)}
        self._inputs = {tensor.name for tensor in signature.inputs}
        self.pairs = {b.name: a.name for a, b in zip(signature.past, signature.present, strict=True)}
        self.num_optimization_profiles = plan.profiles
        self._names = [*self._tensors, *plan.changes.get("more", {})]
        self.num_io_tensors = len(self._names)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(
            str(plan.bundle.path / MODEL_FILE), options, providers=["CPUExecutionProvider"]
        )

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> Mode:
        return self._changed("mode", name, Mode.INPUT if name in self._inputs else Mode.OUTPUT)

    def get_tensor_location(self, name: str) -> Location:
        return self._changed("location", name, Location.DEVICE)

    def get_tensor_dtype(self, name: str) -> Kind:
        return self._changed("dtype", name, _KINDS[self._tensors[name].dtype])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        capacity = self.plan.record.capacity
        sizes = self._tensors[name].shape
        shape = tuple(capacity if size == "S" else -1 if isinstance(size, str) else size for size in sizes)
        return self._changed("shape", name, shape)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._changed("alias", name, self.pairs.get(name))

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return SCRATCH[profile]

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, how: Strategy | RuntimeConfig) -> StandInContext | None:
        config = how if isinstance(how, RuntimeConfig) else None
        assert (config.strategy if config else how) is Strategy.USER_MANAGED
        return StandInContext(self, self.device, config)

    def takes(self, profile: int, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a shape is within a profile."""
        record, vocab_size = self.plan.record, self.plan.bundle.manifest.signature.vocab_size
        rows = (record.step_rows, record.prefill_rows)[profile]
        wanted = record.step_rows if profile == 0 else logit_rows(record.prefill_rows, vocab_size)
        most = {"B": record.requests, "T": rows, "R": wanted, "A": record.capacity}
        expected = [record.capacity if size == "S" else size for size in self._tensors[name].shape]
        return len(shape) == len(expected) and all(
            1 <= got <= most[size] if isinstance(size, str) else got == size
            for got, size in zip(shape, expected, strict=True)
        )

    def compute(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        """Run the graph in the bound memory."""
        binding = self._session.io_binding()
        sizes = {"B": shapes["input_ids"][0], "R": shapes["logit_rows"][1], "S": self.plan.record.capacity}
        for name, tensor in self._tensors.items():
            shape = shapes.get(name) or tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
            dtype = np.dtype(tensor.dtype)
            size = int(np.prod(shape)) * dtype.itemsize
            assert self.device.holds(addresses[name], size), f"{name} is bound to memory that is not the device's"
            bind = binding.bind_input if name in self._inputs else binding.bind_output
            bind(name, "cpu", 0, dtype.type, shape, addresses[name])
        self._session.run_with_iobinding(binding)

    def _changed(self, what: str, name: str, value: T) -> T:
        return cast(T, self.plan.changes.get(what, {}).get(name, value))


def api_of(plan: Plan, device: StandInDevice) -> Any:
    """The library with one engine; it uses the first logger for its whole life."""
    first: list[ref[Any]] = []

    class Runtime:
        def __init__(self, logger: Logger) -> None:
            first.append(ref(logger))
            self.logger = first[0]()
            assert self.logger is not None, "the logger that the library was given is gone"

        def deserialize_cuda_engine(self, serialized: bytes) -> StandInEngine | None:
            assert json.loads(serialized) == {"engine": plan.record.target}
            if plan.why_not is not None:
                self.logger.log(Logger.WARNING, "it is warm today")
                self.logger.log(Logger.ERROR, plan.why_not)
                return None
            return StandInEngine(plan, self.logger, device)

    api: Any = ModuleType("tensorrt")
    vars(api).update(
        __version__="9.9.9",
        ILogger=Logger,
        Runtime=Runtime,
        DataType=Kind,
        TensorIOMode=Mode,
        TensorLocation=Location,
        ExecutionContextAllocationStrategy=Strategy,
    )
    if plan.compiles:
        api.DynamicShapesKernelSpecializationStrategy = Specialization
    return api


def plan_of(path: Path) -> Plan:
    """The plan of a bundle's engine."""
    return Plan(open_bundle(path), EngineRecord("a" * 64, 1, (), "tensorrt-rtx", "9.9.9", "sm89", 1024, 1, 64, 512))


def opened(
    plan: Plan, device: StandInDevice | None = None, requests: int = 1, graphs: bool = True, api: Any = None
) -> TensorRtEngine:
    """The engine of a plan, opened as on a GPU, by a library that may have opened others."""
    device = device or StandInDevice()
    engine_options = EngineOptions(plan.record.capacity, requests, graphs=graphs)
    serialized = json.dumps({"engine": plan.record.target}).encode()
    named = NamedEngine("stand-in.engine", plan.record)
    return deserialized(api or api_of(plan, device), serialized, named, plan.bundle, engine_options, device, "stand-in")


def batch_of_rows(rows: int) -> Batch:
    """A call of one request, all of whose rows see one another."""
    ids = np.zeros((1, rows), np.int64)
    return Batch(0, ids, ids, np.arange(rows)[None], np.ones((1, 1, rows, 64), np.bool_), ids[:, :1])
