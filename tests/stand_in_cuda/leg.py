"""One process on the stand-in: what ONNX Runtime's CUDA provider does with bundles, as JSON on standard output."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from spaceport.graphs.contract.signature import selection_width
from spaceport.runtime.backends.on_cuda import DeviceEngine, cpu_nodes, open_engine
from spaceport.runtime.backends.on_onnxruntime import session_options
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.engine import EngineOptions
from spaceport.tools.bench.steps import chain_batch

_KINDS = ("HtoH", "HtoD", "DtoH", "DtoD", "default")  # of cudaMemcpyKind
_STEPS = 20
_CAPTURED_WITHIN = 6  # steps of a shape
_ROWS, _CONTEXT = 9, 64


class _Counts(ctypes.Structure):
    """struct counts of runtime.c."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("kernels", "products", "waits")),
        *((name, ctypes.c_long * len(_KINDS)) for name in ("copies", "bytes", "largest")),
    )

    def found(self) -> dict[str, Any]:
        copied = {name: dict(zip(_KINDS, getattr(self, name), strict=True)) for name in ("copies", "bytes", "largest")}
        return {"kernels": self.kernels, "products": self.products, "waits": self.waits, **copied}


class _Kernel(ctypes.Structure):
    """struct kernel of runtime.c."""

    _fields_ = (("function", ctypes.c_void_p), ("name", ctypes.c_char_p), ("launches", ctypes.c_long))


def _launched(library: ctypes.CDLL) -> dict[str, int]:
    """The launches of each kernel within captures, by its mangled name."""
    count = ctypes.c_long.in_dll(library, "stand_in_kernel_count").value
    kernels = ctypes.POINTER(_Kernel).in_dll(library, "stand_in_kernels")[:count]
    return {kernel.name.decode(): kernel.launches for kernel in kernels if kernel.launches}


def placed(graph: Path, folder: Path) -> dict[str, Any]:
    """Where a session puts the nodes of a graph, the note of the runtime about it, and the nodes that it adds to copy."""
    ort.set_default_logger_severity(3)  # else a warning for each ScatterND
    options = session_options(1)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.optimized_model_filepath = str(folder / "placed.onnx")
    session = ort.InferenceSession(graph, options, ["CUDAExecutionProvider", "CPUExecutionProvider"])
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name == "CPUExecutionProvider"]
    nodes = onnx.load(folder / "placed.onnx", load_external_data=False).graph.node
    return {
        "on the CPU": [node.op_type for part in parts for node in part.get_nodes()],
        "notes": cpu_nodes(session),
        "copies": sum(node.op_type.startswith("Memcpy") for node in nodes),
    }


def stepped(bundle: Bundle, library: ctypes.CDLL) -> dict[str, Any]:
    """What steps of one shape do when they are captured, and when they are replayed."""
    engine: DeviceEngine = open_engine(bundle, EngineOptions(512, 2))
    dice = np.random.default_rng(0)
    engine.select(chain_batch(engine, 64, _CONTEXT, dice))  # memory for the widest call
    library.stand_in_reset()
    counts = (_Counts * 2).in_dll(library, "stand_in_counts")
    number = {name: ctypes.c_long.in_dll(library, f"stand_in_{name}") for name in ("captures", "replays", "stale")}
    for _ in range(_CAPTURED_WITHIN):
        engine.select(chain_batch(engine, _ROWS, _CONTEXT, dice))
    captured = counts[1].found() | {"captures": number["captures"].value, "names": _launched(library)}
    places = [engine._address(buffer, 0) for buffer in range(2 * engine.signature.layers)]
    in_place = True
    for rows in (1, 4, 36, 64) * 5:  # other shapes between the capture and its replays
        engine.select(chain_batch(engine, rows, _CONTEXT, dice))
    library.stand_in_reset()
    for _ in range(_STEPS):
        engine.select(chain_batch(engine, _ROWS, _CONTEXT, dice))
        outputs = engine._binding.get_outputs_as_ortvaluevector()
        in_place &= [output.data_ptr() for output in outputs][1:] == places
    found = {
        "notes": engine.notes,
        "layers": engine.signature.layers,
        "input bytes": max(size for use, size in engine._memory if use == "rows"),
        "token bytes": _ROWS * 4 * selection_width(engine.signature.vocab_size),
        "captured": captured,
        "replayed": counts[0].found(),
        "steps": _STEPS,
        "replays": number["replays"].value,
        "stale": number["stale"].value,
        "in place": in_place,
    }
    engine.close()
    return found


def main(kind: str, folder: Path, paths: dict[str, str]) -> None:
    """Print what is found of graphs or bundles, by name."""
    if kind == "placed":
        found = {name: placed(Path(path), folder) for name, path in paths.items()}
    else:
        library = ctypes.CDLL("libcudart.so.13")
        found = {name: stepped(open_bundle(path), library) for name, path in paths.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), dict(argument.split("=", 1) for argument in sys.argv[3:]))
