"""ONNX Runtime on an NVIDIA GPU; fails without the CUDA provider, and notes nodes that run on the CPU."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Collection, Sequence
from typing import Any

import onnxruntime as ort

from spaceport.graphs.contract.faults import MissingDependency, OptionFault
from spaceport.runtime.backends.device import gpu
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.on_device import DeviceEngine
from spaceport.runtime.backends.on_onnxruntime import FAULTS, open_selection, open_session, session_options, unloadable
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import EngineFault

_PROVIDER = "CUDAExecutionProvider"
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


def open_engine(bundle: Bundle, options: EngineOptions) -> DeviceEngine:
    """The bundle's graph on the first GPU."""
    lacking = preload()
    try:
        session, notes = open_on_gpu(bundle, options.graphs)
        if _PROVIDER not in session.get_providers():  # happens in spite of enable_fallback=0
            raise MissingDependency(without_cuda(lacking))
        name = f"cuda:0 ({gpu().name})"
        graphs = options.graphs and not notes
        selection = open_selection(bundle, [_PROVIDER, "CPUExecutionProvider"])
        engine = DeviceEngine(session, bundle.manifest.signature, options, "cuda", name, graphs, notes, selection)
    except FAULTS as error:
        if _NO_MEMORY.search(str(error)):
            raise OptionFault(out_of_memory(bundle, options)) from error
        if isinstance(error, MissingDependency | EngineFault):
            raise
        raise unloadable(bundle, error) from error
    return engine


def preload() -> tuple[str, ...]:
    """Load the CUDA libraries that are installed as packages; returns the missing ones."""
    with contextlib.redirect_stdout(io.StringIO()) as said:  # it prints to standard output
        ort.preload_dlls()
    return tuple(re.findall(r"Failed to load (\S+):", said.getvalue()))


def open_on_gpu(bundle: Bundle, graphs: bool) -> tuple[ort.InferenceSession, tuple[str, ...]]:
    """A session of the graph that can capture CUDA graphs; or one that cannot, and a note that says why."""
    if not graphs:
        session = _session(bundle, False)
        return session, left_behind(session)
    if _version() < _GRAPHS_SINCE:
        session = _session(bundle, False)
        return session, (
            f"no CUDA graphs: onnxruntime {ort.__version__} has faults in them, update it to 1.30",
            *left_behind(session),
        )
    try:
        return _session(bundle, True), ()  # fails if any node other than shape computations is not on the GPU
    except FAULTS as error:
        if not _NO_GRAPHS.search(str(error)):
            raise
    session = _session(bundle, False)
    why = "no CUDA graphs: onnxruntime did not put the whole graph on the GPU"
    return session, (why, *(left_behind(session) or left_behind(session, frozenset())))


def left_behind(session: ort.InferenceSession, spared: Collection[str] = _ARITHMETIC) -> tuple[str, ...]:
    """A note that names nodes that run on the CPU, except those of these operators."""
    nodes = [
        f"{node.op_type} {node.name}"
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == "CPUExecutionProvider"
        for node in part.get_nodes()
        if node.op_type not in spared
    ]
    if not nodes:
        return ()
    more = f" and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
    return (f"on the CPU, not on the GPU: {', '.join(nodes[:_MOST_NAMED])}{more}",)


def without_cuda(lacking: Sequence[str]) -> str:
    """Error message if the CUDA provider does not start."""
    major = ort.cuda_version.partition(".")[0] or "13"
    cause = f"{', '.join(lacking)} cannot be loaded" if lacking else "the driver does not take it, look at nvidia-smi"
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
    manifest = bundle.manifest
    options = session_options(1, manifest.weights, manifest.activations)  # CPU threads, which only compute shapes
    options.add_session_config_entry(_RECORD, "1")
    provider: dict[str, Any] = {
        "device_id": 0,
        "enable_cuda_graph": int(graphs),
        "use_tf32": 0,  # TF32 has 10 of float32's 23 mantissa bits
        "arena_extend_strategy": "kSameAsRequested",  # the default allocates up to twice as much
    }
    return open_session(bundle, options, [(_PROVIDER, provider), "CPUExecutionProvider"])


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", ort.__version__)[:2])
