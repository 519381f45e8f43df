"""`spaceport inspect`: what a bundle holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import ACCURACY_FILE, ENGINES_FOLDER, EngineRecord, Manifest, record_of
from spaceport.runtime.backends import trust
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.scheduling.capacity import capacity_for, seq_len, slots_for
from spaceport.tools.cli.options import bundle_argument, json_option
from spaceport.tools.terminal.screen import show_json, show_table, size


@click.command("inspect")
@bundle_argument
@click.option("--requests", default=1, show_default=True, help="Requests to tell the memory for.")
@click.option(
    "--max-seq-len", type=int, help="Longest text to tell the memory for; by default what `generate` makes room for."
)
@click.option(
    "--max-slots",
    type=int,
    help="Most tokens of a prompt and all its threads to tell the memory for; by default those of the longest text.",
)
@json_option("it")
def command(bundle: Path, requests: int, max_seq_len: int | None, max_slots: int | None, as_json: bool) -> None:
    """Show the model, the graph's contract, token ids, files, engines and memory of BUNDLE, after checking every file."""
    if requests < 1:
        raise OptionFault(f"--requests is {requests}: expected at least 1")
    opened = open_bundle(bundle)
    length = seq_len(opened.manifest, max_seq_len)
    memory = memory_of(opened.manifest, requests, length, slots_for(length, max_slots))
    if as_json:
        show_json(
            {
                **opened.manifest.as_dict(),
                "contract": contract(opened.manifest),
                "memory": memory,
                "accuracy": accuracy(opened),
                "engine_states": states(opened),
            }
        )
        return
    manifest = opened.manifest
    show_table("", ("what", "value"), list(facts(manifest).items()))
    show_table(
        "\nGraph",
        ("tensor", "type", "shape"),
        [(row["name"], row["dtype"], row["shape"]) for row in short_contract(manifest)],
    )
    rows = [(name, size(record.size), record.sha256) for name, record in manifest.files.items()]
    show_table("\nFiles", ("file", "size", "sha256"), rows)
    if manifest.engines:
        columns = ("engine", "size", "slots", "requests", "rows", "attention", "built with", "state")
        show_table("\nEngines", columns, engines(opened))
    threads = f", {memory['max_slots']} with all threads" if memory["max_slots"] > length else ""
    label = f"\nMemory for {requests} request{'s' if requests > 1 else ''} of {length} tokens{threads}"
    show_table(label, ("what", "bytes"), [("weights", size(memory["weights"])), ("KV buffers", size(memory["kv"]))])
    click.echo(f"\nAccuracy: {verdict(manifest, accuracy(opened))}")


def facts(manifest: Manifest) -> dict[str, object]:
    """The model in a few lines."""
    signature, tokens = manifest.signature, manifest.tokens
    return {
        "family": manifest.family,
        "parameters": f"{manifest.parameters:,}",
        "layers": f"{signature.layers} x {signature.kv_heads} KV heads of {signature.head_dim}",
        "vocabulary": f"{signature.vocab_size}",
        "positions": f"{manifest.max_positions}",
        "window": "none" if signature.window is None else f"{signature.window}",
        "precision": precision(manifest),
        "lowering": f"{signature.lowering}, {manifest.attention} attention, opset {manifest.opset}",
        "mask slots": f"{manifest.max_mask_slots}" if manifest.max_mask_slots else "none: plain decoding",
        "mask tokens": ", ".join(map(str, tokens.mask)) or "none",
        "fork and child token": f"{tokens.fork}, {tokens.child}" if tokens.fork is not None else "none",
        "end tokens": ", ".join(map(str, tokens.end)) or "none",
        "written with": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
    }


def precision(manifest: Manifest) -> str:
    """The types of a bundle's activations and weights."""
    quantized = "" if manifest.weights == "same" else f", weights {manifest.weights}"
    if manifest.activations != "float":
        quantized += f", activations {manifest.activations}"
    return (
        manifest.signature.dtype
        + quantized
        + ("" if manifest.embeddings == "same" else f", embeddings {manifest.embeddings}")
    )


def contract(manifest: Manifest) -> dict[str, Any]:
    """Every input and output of the graph."""
    return {
        kind: [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in tensors]
        for kind, tensors in (("inputs", manifest.signature.inputs), ("outputs", manifest.signature.outputs))
    }


def short_contract(manifest: Manifest) -> list[dict[str, str]]:
    """Inputs and outputs with the buffers of all layers in one line."""
    signature = manifest.signature
    chosen = [*signature.rows, signature.past[0], *signature.outputs[:2]]
    names = {signature.past[0].name: "past_key_values.*", signature.present[0].name: "present.*"}
    return [
        {"name": names.get(t.name, t.name), "dtype": t.dtype, "shape": f"[{', '.join(map(str, t.shape))}]"}
        for t in chosen
    ]


def engines(bundle: Bundle) -> list[tuple[object, ...]]:
    """The engines that were built, with the most rows of steps and of prompts."""
    found = states(bundle)
    return [
        (
            name,
            size(record.size),
            record.capacity,
            record.requests,
            f"{record.step_rows}, {record.prompt_rows}",
            f"{record.decomposed} layer{'s' if record.decomposed > 1 else ''} as products"
            if record.decomposed
            else "fused",
            f"{record.flavour} {record.version}",
            found[name],
        )
        for name, record in bundle.manifest.engines.items()
    ]


def states(bundle: Bundle) -> dict[str, str]:
    """Of each engine, whether it is there, whole and from this machine."""
    return {name: _state(bundle, name, record) for name, record in bundle.manifest.engines.items()}


def _state(bundle: Bundle, name: str, record: EngineRecord) -> str:
    file = bundle.path / ENGINES_FOLDER / name
    if not file.is_file():
        return "gone"
    with file.open("rb") as stream:
        if record_of(stream) != record.file:
            return "changed"
    if record.graph != bundle.manifest.graph:
        return "of another graph"
    return "built here" if trust.built_here(record.sha256) else "built elsewhere"


def memory_of(manifest: Manifest, requests: int, length: int, max_slots: int) -> dict[str, int]:
    """Bytes that weights and KV buffers take."""
    slots = capacity_for(manifest, max_slots)
    kv = manifest.signature.kv_bytes(requests, slots)
    return {
        "requests": requests,
        "max_seq_len": length,
        "max_slots": max_slots,
        "slots": slots,
        "weights": manifest.graph_bytes,
        "kv": kv,
    }


def accuracy(bundle: Bundle) -> dict[str, Any] | None:
    """What the last check of this very graph and its weights found."""
    file = bundle.path / ACCURACY_FILE
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError):  # ValueError: not UTF-8, not JSON
        return {"passed": False, "fault": f"{ACCURACY_FILE} is not JSON that can be read"}
    return found if isinstance(found, dict) and found.get("graph") == list(bundle.manifest.graph) else None


def verdict(manifest: Manifest, found: Mapping[str, Any] | None) -> str:
    """What a check found in a word, and the kinds of engines that were not compared in it."""
    if found is None:
        return "not checked yet (spaceport check)"
    if found.get("passed") is not True:
        return "FAILED"
    compared = found.get("backends")
    told = compared if isinstance(compared, list) else []
    flavours = sorted({record.flavour for record in manifest.engines.values() if record.flavour not in told})
    return f"passed, but for {' and '.join(flavours)} engines, which were not compared" if flavours else "passed"
