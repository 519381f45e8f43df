"""`spaceport inspect`: what a bundle holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from spaceport.graphs.contract.draft_methods import CORRECTION_FILE, LOOKUP, UNKNOWN, DraftMethod
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import (
    ACCURACY_FILE,
    ENGINES_FOLDER,
    MODEL_FILE,
    EngineRecord,
    Manifest,
    record_of,
)
from spaceport.graphs.contract.phrases import PHRASES
from spaceport.runtime.backends import BACKENDS, why_not
from spaceport.runtime.backends.built_engines import built_here
from spaceport.runtime.backends.graph_file import operators
from spaceport.runtime.backends.machine import gpu, no_gpu
from spaceport.runtime.backends.measurements import known_exactness
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.engine import EngineOptions, capacity_for, seq_len, slots_for
from spaceport.runtime.limits import DEFAULT_LIMITS
from spaceport.tools.cli.options import (
    allow_links_option,
    bundle_argument,
    json_option,
    max_seq_len_option,
    max_slots_option,
)
from spaceport.tools.terminal.screen import show_json, show_table, size

_CPU, _CUDA = "onnxruntime", "onnxruntime-cuda"
# Operators of exported graphs that onnxruntime 1.31 has CUDA kernels for, in the types of a bundle for GPUs.
CUDA_OPERATORS = frozenset(
    {
        *("Add", "And", "Attention", "Cast", "Concat", "Cos", "Div", "Equal", "Erf", "Exp", "Expand", "Floor"),
        *("Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "Greater", "Identity", "LayerNormalization"),
        *("Less", "Log", "MatMul", "Max", "Min", "Mul", "Neg", "Not", "Pow", "RMSNormalization", "Range"),
        *("Reciprocal", "ReduceMax", "ReduceMean", "ReduceSum", "Relu", "Reshape", "RotaryEmbedding"),
        *("ScatterND", "Shape", "Sigmoid", "Sin", "Slice", "Softmax", "Split", "Sqrt", "Squeeze", "Sub"),
        *("Tanh", "Tile", "TopK", "Transpose", "Unsqueeze", "Where"),
    }
)
_UNKNOWN = "not measured yet: that happens when a runtime first opens the bundle"


@click.command("inspect")
@bundle_argument
@click.option(
    "--requests",
    default=1,
    show_default=True,
    metavar="N",
    help="Concurrent requests, for the memory estimate, as --max-seq-len and --max-slots.",
)
@max_seq_len_option
@max_slots_option
@click.option(
    "--backend",
    type=click.Choice(tuple(BACKENDS)),
    default=_CPU,
    show_default=True,
    metavar="NAME",
    help=f"Backend whose use of the bundle is shown: {', '.join(BACKENDS)}.",
)
@allow_links_option
@json_option("everything")
def command(
    bundle: Path,
    requests: int,
    max_seq_len: int | None,
    max_slots: int | None,
    backend: str,
    allow_links: bool,
    as_json: bool,
) -> None:
    """Verify the files of BUNDLE and show its model, graph, token ids, files, engines, memory use and check results."""
    if requests < 1:
        raise OptionFault(f"--requests is {requests}: expected at least 1")
    opened = open_bundle(bundle, allow_links=allow_links)
    length = seq_len(opened.manifest, max_seq_len, max_slots, requests)
    most = slots_for(length, max_slots)
    slots = capacity_for(opened.manifest, most)
    kv = opened.manifest.signature.kv_bytes(requests, slots)
    memory = {"requests": requests, "max_seq_len": length, "max_slots": most, "slots": slots}
    memory |= {"weights": opened.manifest.graph_bytes, "kv": kv}  # bytes
    options = EngineOptions(slots, requests, threads=0)
    device = "cpu" if not BACKENDS[backend].gpu or no_gpu() else f"cuda:0 ({gpu().name})"
    exactness = known_exactness(opened, backend, device, options)
    use = use_of(opened, backend, options)
    if as_json:
        show_json(
            {
                **opened.manifest.as_dict(),
                "contract": contract(opened.manifest),
                "memory": memory,
                "limits": DEFAULT_LIMITS.as_dict(),
                "accuracy": accuracy(opened),
                "engine_states": states(opened),
                "backend": {"name": backend, **use},
                "exactness": exactness and asdict(exactness) | {"allows_drafts": exactness.allows_drafts},
            }
        )
        return
    used = {f"{backend}, {what}": value for what, value in use.items()}
    rows = {**facts(opened.manifest), **used, "drafted text here": exactness or _UNKNOWN}
    show_table("", ("property", "value"), [*rows.items()])
    show(opened, memory)


def show(bundle: Bundle, memory: Mapping[str, int]) -> None:
    """Print the graph, the files, the engines, the memory use, the limits and the result of the last check."""
    manifest, requests, length = bundle.manifest, memory["requests"], memory["max_seq_len"]
    signature = manifest.signature
    names = {signature.past[0].name: "past_key_values.*", signature.present[0].name: "present.*"}  # of all layers
    tensors = [*signature.rows, signature.past[0], *signature.outputs[:2]]
    shapes = [(names.get(t.name, t.name), t.dtype, f"[{', '.join(map(str, t.shape))}]") for t in tensors]
    show_table("\nGraph", ("tensor", "type", "shape"), shapes)
    files = [(name, size(record.size), record.sha256) for name, record in manifest.files.items()]
    show_table("\nFiles", ("file", "size", "sha256"), files)
    if manifest.engines:
        columns = ("engine", "size", "slots", "requests", "decode rows", "prefill rows", "attention", "built with")
        show_table("\nEngines", (*columns, "state"), engines(bundle))
    threads = f", {memory['max_slots']} slots with all threads" if memory["max_slots"] > length else ""
    label = f"\nMemory for {requests} request{'s' if requests > 1 else ''} of {length} tokens{threads}"
    show_table(label, ("item", "size"), [("weights", size(memory["weights"])), ("KV cache", size(memory["kv"]))])
    limits = [(name, "max_seq_len" if most is None else f"{most:,}") for name, most in DEFAULT_LIMITS.as_dict().items()]
    show_table("\nLimits of requests (defaults)", ("limit", "maximum"), limits)
    click.echo(f"\nAccuracy: {verdict(manifest, accuracy(bundle))}")


def use_of(bundle: Bundle, backend: str, options: EngineOptions) -> dict[str, str]:
    """Whether a backend can run a bundle here, and what is known of its use on CUDA before it is opened."""
    use = {"here": why_not(bundle, backend, options) or "can run it"}
    if backend == _CUDA:
        unknown = sorted(operators(bundle.read(MODEL_FILE)) - CUDA_OPERATORS)
        use["on the CPU"] = ", ".join(unknown) or "computations of shapes only"
        use["CUDA graphs"] = f"off, as {unknown[0]} may run on the CPU" if unknown else "from onnxruntime 1.30 on"
    return use


def facts(manifest: Manifest) -> dict[str, object]:
    """Properties of the model by name."""
    signature, tokens, drafts = manifest.signature, manifest.tokens, manifest.drafts
    correction = ", with draft correction" if CORRECTION_FILE in manifest.files else ""
    partly = (
        "; native operators compute products only" if manifest.number_format.native and not signature.has_scales else ""
    )
    acceptance = {}
    for measured in drafts.acceptance:
        heat = f"temperature {measured.temperature:g}" if measured.temperature else "greedy"
        acceptance[f"acceptance, {heat}"] = measured
    return {
        "family": manifest.model_type,
        "parameters": f"{manifest.parameters:,}",
        "layers": f"{signature.layers} x {signature.kv_heads} KV heads of {signature.head_dim}",
        "vocabulary": f"{signature.vocab_size}",
        "max context length": f"{manifest.max_positions}",
        "sliding window": "none" if signature.window is None else f"{signature.window}",
        "format": f"{manifest.format} ({manifest.number_format.purpose}{partly})",
        "lowering": f"{signature.lowering}, {manifest.attention} attention, opset {manifest.opset}",
        "mask slots": f"{drafts.mask_slots}{correction}" if drafts.mask_slots else "none",
        "draft heads": drafts.heads or "none",
        "drafts by": _drafts(drafts),
        **acceptance,
        "mask tokens": ", ".join(map(str, tokens.mask)) or "none",
        "fork and child token": f"{tokens.fork}, {tokens.child}" if tokens.fork is not None else "none",
        "end tokens": ", ".join(map(str, tokens.end)) or "none",
        "exported with": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
    }


def _drafts(drafts: DraftMethod) -> str:
    """What predicts draft tokens, and the method and published weights as far as they are named."""
    predictors = (
        *("mask slots" if drafts.mask_slots else "", "draft heads" if drafts.heads else "", "prompt lookup"),
        "phrases" if PHRASES in drafts.mechanisms else "",
    )
    method = drafts.name if drafts.name not in (UNKNOWN, LOOKUP) else None
    return ", ".join(filter(None, (" and ".join(filter(None, predictors)), method, drafts.adapter)))


def contract(manifest: Manifest) -> dict[str, Any]:
    """Every input and output of the graph."""
    return {
        kind: [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in tensors]
        for kind, tensors in (("inputs", manifest.signature.inputs), ("outputs", manifest.signature.outputs))
    }


def engines(bundle: Bundle) -> list[tuple[object, ...]]:
    """A table row for each engine."""
    rows: list[tuple[object, ...]] = []
    for (name, state), record in zip(states(bundle).items(), bundle.manifest.engines.values(), strict=True):
        layers = f"{record.decomposed} layer{'s' if record.decomposed > 1 else ''} decomposed"
        limits = (record.capacity, record.requests, record.step_rows, record.prefill_rows)
        attention, library = layers if record.decomposed else "fused", f"{record.backend} {record.version}"
        rows.append((name, size(record.size), *limits, attention, library, state))
    return rows


def states(bundle: Bundle) -> dict[str, str]:
    """The state of each engine: built here, built elsewhere, missing, changed or of another graph."""
    return {name: _state(bundle, name, record) for name, record in bundle.manifest.engines.items()}


def _state(bundle: Bundle, name: str, record: EngineRecord) -> str:
    file = bundle.path / ENGINES_FOLDER / name
    if not file.is_file():
        return "missing"
    with file.open("rb") as stream:
        if record_of(stream) != record.file:
            return "changed"
    if record.graph != bundle.manifest.graph:
        return "of another graph"
    return "built here" if built_here(record.sha256) else "built elsewhere"


def accuracy(bundle: Bundle) -> dict[str, Any] | None:
    """The report of the last check; nothing if it was of another graph or other weights."""
    file = bundle.path / ACCURACY_FILE
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError):  # ValueError: not UTF-8, not JSON
        return {"passed": False, "fault": f"{ACCURACY_FILE} is not valid JSON"}
    return found if isinstance(found, dict) and found.get("graph") == list(bundle.manifest.graph) else None


def verdict(manifest: Manifest, found: Mapping[str, Any] | None) -> str:
    """The result of a check, with the engines that it did not compare."""
    if found is None:
        return "not checked yet (spaceport check)"
    if found.get("passed") is not True:
        return "FAILED"
    compared = found.get("backends")
    checked = compared if isinstance(compared, list) else []
    flavours = sorted({record.backend for record in manifest.engines.values() if record.backend not in checked})
    passed = "passed with a part of the cases (spaceport check: all)" if found.get("quick") else "passed"
    if str(found.get("reference", "")).startswith("standard operators"):
        passed += "; not compared with its checkpoint"
    return f"{passed}; {' and '.join(flavours)} engines were not compared" if flavours else passed
