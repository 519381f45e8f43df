"""`spaceport build`: build TensorRT engines into a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from spaceport.exporter.tensorrt.append_graph import refuse_scatter
from spaceport.exporter.tensorrt.engines import BuildResult, build_engine, host_memory
from spaceport.exporter.tensorrt.to_tensorrt import BuildOptions, Library, Shapes, open_library, target_of
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.manifest import FLAVOURS, MODEL_FILE, EngineRecord, Manifest
from spaceport.graphs.contract.signature import logit_rows
from spaceport.runtime.backends.built_engines import built_here, record_built_engine
from spaceport.runtime.backends.machine import NoGpu, gpu
from spaceport.runtime.bundle import Bundle, open_bundle, read_manifest
from spaceport.runtime.engine import capacity_for, seq_len, slots_for
from spaceport.tools.cli.options import (
    Sectioned,
    bundle_argument,
    json_option,
    max_seq_len_option,
    max_slots_option,
    options,
    sections,
)
from spaceport.tools.terminal.screen import show_json, size, stages

_SHAPES = options(
    click.option(
        "--max-requests",
        default=4,
        show_default=True,
        metavar="N",
        help="Maximum number of requests per engine call (batch size).",
    ),
    max_seq_len_option,
    max_slots_option,
    click.option(
        "--max-step-rows", default=64, show_default=True, metavar="N", help="Maximum rows per request in a decode step."
    ),
    click.option(
        "--prefill-rows",
        "prompt_rows",
        default=512,
        show_default=True,
        metavar="N",
        help="Maximum rows of a prefill chunk, at least 128.",
    ),
)


_FORMATS = tuple(name for name, each in FORMATS.items() if "tensorrt" in each.backends)
_LEAST = {"float8": 89, "bfloat16": 80}  # data type -> lowest SM version that supports it


@sections({"max_requests": "Shapes", "format": "Builder", "rebuild": "Output"})
@click.command("build", cls=Sectioned)
@bundle_argument
@click.option(
    "--backend",
    "flavour",
    type=click.Choice(FLAVOURS),
    help="Library to build with; default: the one that is installed.",
)
@click.option(
    "--target",
    "asked",
    multiple=True,
    default=("current",),
    show_default=True,
    metavar="SM[,SM...]",
    help="GPU architectures such as sm80,sm89; current = the GPU of this machine; repeatable.",
)
@_SHAPES
@click.option("--format", type=click.Choice(_FORMATS), help="Fail if the bundle has another format.")
@click.option("--workspace", type=click.IntRange(min=1), metavar="MB", help="Maximum workspace memory of a kernel.")
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Timing cache to load and update (tensorrt only).",
)
@click.option("--rebuild", is_flag=True, help="Build engines again that exist already.")
@json_option("the engines")
def command(bundle: Path, rebuild: bool, as_json: bool, **given: Any) -> None:
    """Build TensorRT engines from the graph of BUNDLE and store them in the bundle.

    Export the bundle with --lowering append, in the --format that the engine shall compute in.
    """
    library = open_library(given["flavour"])
    manifest = read_manifest(bundle)
    _refuse_format(bundle, manifest, given["format"])
    refuse_scatter(bundle, manifest.signature)
    targets = _targets(library, given["asked"], given["timing_cache"])
    _refuse_targets(manifest, targets)
    slots = slots_for(seq_len(manifest, given["max_seq_len"], given["max_slots"]), given["max_slots"])
    capacity = capacity_for(manifest, slots)
    shapes = Shapes(capacity, given["max_requests"], given["max_step_rows"], given["prompt_rows"])
    scratch = None if given["workspace"] is None else given["workspace"] << 20
    opened, outcomes = open_bundle(bundle), []  # last, because it hashes the weights
    for name in targets:
        build_options = BuildOptions(name, shapes, scratch, manifest.drafts.mask_slots, given["timing_cache"])
        outcomes.append(_build(opened, library, build_options, rebuild))
        _report(bundle, outcomes[-1], as_json)
    if as_json:
        engines = [
            {"name": outcome.name, **asdict(outcome.record), "built": outcome.built}
            | {"activation": outcome.activation, "decomposed_why": outcome.decomposed or None}
            for outcome in outcomes
        ]
        show_json({"bundle": str(bundle), "engines": engines})


def _build(opened: Bundle, library: Library, build_options: BuildOptions, rebuild: bool) -> BuildResult:
    """The engine of a target; its progress is shown from the start of the build and after each quarter of it."""
    bundle, manifest = opened.path, opened.manifest
    memory, shown = _memory(manifest, build_options.shapes), 0
    with stages() as stage:

        def on_progress(done: float, phase: str) -> None:
            nonlocal shown
            if int(4 * done) > shown:
                shown = int(4 * done)
                stage(f"{done:.0%} built: {phase}")

        return build_engine(
            bundle,
            manifest,
            library,
            build_options,
            lambda record: not rebuild and _reusable(record),
            lambda: stage(f"building with {library.name} for {build_options.target}: {memory}"),
            on_progress,
            partial(_require_unchanged, opened),
        )


def _require_unchanged(bundle: Bundle) -> None:
    """Raise if the files of the graph are no longer those that were verified."""
    if bundle.files is not None:
        for name in bundle.manifest.files:
            if name.startswith(MODEL_FILE):
                bundle.files.require_same(name)


def _report(bundle: Path, outcome: BuildResult, as_json: bool) -> None:
    """Record that this machine built an engine, and print it."""
    record = outcome.record
    recorded = record_built_engine(record.sha256)
    if record.decomposed:
        layers = f"{record.decomposed} layer{'s' if record.decomposed > 1 else ''}"
        why = f"attention of {layers} is decomposed into MatMul and Softmax: {outcome.decomposed}"
        click.echo(why, err=as_json)
    activation = "" if outcome.activation is None else f", {size(outcome.activation)} of activation memory"
    state = "" if outcome.built else ", exists already"
    described = f"{record.backend} {record.version}, {size(record.size)}{activation}{state}"
    click.echo(f"{bundle / 'engines' / outcome.name}: {described}", err=as_json)
    if not recorded:
        click.echo("could not record that this machine built the engine: run it with --trust-engines", err=True)


def _targets(library: Library, asked: Sequence[str], timing_cache: Path | None) -> Sequence[str]:
    """The targets of --target, without duplicates; raise for one that cannot be built on this machine."""
    try:
        here, why_none = gpu().target, ""
    except NoGpu as error:
        here, why_none = None, str(error)
    if timing_cache is not None and library.flavour != "tensorrt":
        raise OptionFault(
            f"--timing-cache has no effect with {library.flavour}, which does not time kernels: leave it out"
        )
    names = [name.strip().lower() for name in ",".join(asked).split(",")]
    if "" in names:
        raise OptionFault(f"--target is {','.join(asked)!r}: expected names separated by commas, such as sm80,sm89")
    return list(dict.fromkeys(target_of(library, name, here, why_none) for name in names))


def _reusable(record: EngineRecord) -> bool:
    """Whether an existing engine with the same options can be used instead of a new one."""
    if built_here(record.sha256):
        return True
    click.echo("the existing engine was not built on this machine: building it again", err=True)
    return False


def _refuse_targets(manifest: Manifest, targets: Sequence[str]) -> None:
    """Raise for a GPU that does not support a data type of the graph, before minutes of building."""
    for kind in (manifest.weights, manifest.signature.dtype):
        least = _LEAST.get(kind)
        for name in targets:
            if least is not None and int(name.removeprefix("sm")) < least:
                raise OptionFault(
                    f"--target is {name}: {kind} needs sm{least} or newer; expected such a target, or a bundle that was "
                    f"exported in another format than {manifest.format} (--format)"
                )


def _refuse_format(bundle: Path, manifest: Manifest, expected: str | None) -> None:
    """Raise if TensorRT does not run the bundle's format, or if it is another than the expected one."""
    if manifest.format not in _FORMATS:
        raise InputFault(
            f"{bundle}: its format is {manifest.format}, which TensorRT does not run: export the checkpoint with --format "
            "float16, or one that begins with float16 or bfloat16"
        )
    if expected not in (None, manifest.format):
        raise OptionFault(
            f"--format is {expected}, the bundle's is {manifest.format}: an engine computes in the format of its graph; export "
            f"the checkpoint again with --format {expected}"
        )


def _memory(manifest: Manifest, shapes: Shapes) -> str:
    """The memory that running and building the engine take, as far as it is known before the build."""
    signature = manifest.signature
    kv = signature.kv_bytes(shapes.requests, shapes.capacity)
    rows = logit_rows(shapes.prompt_rows, signature.row_logits)
    logits = shapes.requests * rows * signature.row_logits * 4  # float32
    requests = f"{shapes.requests} request{'s' if shapes.requests > 1 else ''}"
    return (
        f"{size(manifest.graph_bytes)} of weights, {size(kv)} of KV cache for {requests} of "
        f"{shapes.capacity} slots, up to {size(logits)} of logits; the build takes about {size(host_memory(manifest))} of host memory"
    )
