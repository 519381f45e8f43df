"""`spaceport build`: a bundle's graph becomes a TensorRT engine in the bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from spaceport.exporter.tensorrt.append_graph import refuse_scatter
from spaceport.exporter.tensorrt.build import BuildResult, build_engine, host_memory
from spaceport.exporter.tensorrt.profiles import Shapes
from spaceport.exporter.tensorrt.to_tensorrt import BuildOptions, Library, open_library, target_of
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import FLAVOURS, EngineRecord, Manifest
from spaceport.graphs.contract.signature import PRECISIONS, logit_rows
from spaceport.runtime.backends import trust
from spaceport.runtime.backends.device import NoGpu, gpu
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.runtime.scheduling.capacity import capacity_for, seq_len, slots_for
from spaceport.tools.cli.options import bundle_argument, json_option, options
from spaceport.tools.terminal.build_screen import building
from spaceport.tools.terminal.screen import show_json, size

_SHAPES = options(
    click.option("--max-requests", default=4, show_default=True, metavar="N", help="Most requests in a call."),
    click.option(
        "--max-seq-len",
        type=int,
        metavar="N",
        help="Longest prompt and text; by default what `generate` makes room for.",
    ),
    click.option(
        "--max-slots",
        type=int,
        metavar="N",
        help="Most tokens of a prompt and all its threads; by default those of the longest text.",
    ),
    click.option(
        "--max-step-rows", default=64, show_default=True, metavar="N", help="Most rows of a request in a fast step."
    ),
    click.option(
        "--prompt-rows", default=512, show_default=True, metavar="N", help="Most rows of a prompt in a call (from 128)."
    ),
)


_LEAST = {"float8": 89, "bfloat16": 80}  # the first GPUs that have a type


@click.command("build")
@bundle_argument
@click.option("--flavour", type=click.Choice(FLAVOURS), help="What to build with; by default what is installed.")
@click.option(
    "--target",
    "asked",
    multiple=True,
    default=("current",),
    show_default=True,
    metavar="SM[,SM...]",
    help="GPUs to build for, such as sm80,sm89; current is this machine's. May be said again.",
)
@_SHAPES
@click.option("--dtype", type=click.Choice(PRECISIONS), help="Refuse a bundle of any other type.")
@click.option("--workspace", type=click.IntRange(min=1), metavar="MB", help="Most memory that a kernel may scratch in.")
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Timings of kernels to read and add to (tensorrt only).",
)
@click.option("--refittable", is_flag=True, help="Let weights be exchanged later; needs a GPU to build.")
@click.option("--rebuild", is_flag=True, help="Build also what is there already.")
@json_option("the engines")
def command(
    bundle: Path,
    flavour: Any,
    asked: tuple[str, ...],
    max_requests: int,
    max_seq_len: int | None,
    max_slots: int | None,
    max_step_rows: int,
    prompt_rows: int,
    dtype: str | None,
    workspace: int | None,
    timing_cache: Path | None,
    refittable: bool,
    rebuild: bool,
    as_json: bool,
) -> None:
    """Build BUNDLE's graph for a GPU and keep the engine in the bundle.

    The bundle has to be exported with --lowering append, and with the --dtype that the engine is to reckon in.
    """
    library = open_library(flavour)
    manifest = read_manifest(bundle)
    refuse_scatter(bundle, manifest.signature)
    _refuse_dtype(manifest, dtype)
    _refuse_integers(bundle, manifest)
    targets = _targets(library, asked, refittable, timing_cache)
    _refuse_targets(manifest, targets)
    capacity = capacity_for(manifest, slots_for(seq_len(manifest, max_seq_len), max_slots))
    shapes = Shapes(capacity, max_requests, max_step_rows, prompt_rows)
    manifest = open_bundle(bundle).manifest  # all else is known to fit: now the pass over the weights
    scratch = None if workspace is None else workspace << 20
    memory, outcomes = _memory(manifest, shapes), []
    for name in targets:
        recipe = BuildOptions(name, shapes, scratch, refittable, manifest.max_mask_slots, timing_cache)
        with building(f"{library.name} for {name}", memory) as progress:
            outcome = build_engine(
                bundle,
                manifest,
                library,
                recipe,
                lambda record: not rebuild and _from_here(record),
                progress.begin,
                progress.hear,
            )
        noted = trust.remember(outcome.record.sha256)
        outcomes.append(outcome)
        click.echo(_told(bundle, outcome), err=as_json)
        if not noted:
            click.echo("it could not be noted that this machine built it: run it with --trust-engines", err=True)
    if as_json:
        show_json({"bundle": str(bundle), "engines": [_as_dict(outcome) for outcome in outcomes]})


def _targets(library: Library, asked: Sequence[str], refittable: bool, timing_cache: Path | None) -> Sequence[str]:
    """The targets to build for, each once; raise for what this machine cannot build."""
    try:
        here, why_none = gpu().target, ""
    except NoGpu as error:
        here, why_none = None, str(error)
    if refittable and here is None:
        raise OptionFault(f"--refittable: {why_none}, and {library.flavour} needs one for it; leave it out")
    if timing_cache is not None and library.flavour != "tensorrt":
        raise OptionFault(f"--timing-cache with {library.flavour}: it times nothing when it builds; leave it out")
    names = [name.strip().lower() for name in ",".join(asked).split(",")]
    if "" in names:
        raise OptionFault(
            f"--target is {','.join(asked)!r}: expected names with commas between them, such as sm80,sm89"
        )
    return list(dict.fromkeys(target_of(library, name, here, why_none) for name in names))


def _from_here(record: EngineRecord) -> bool:
    """Whether an engine that is there already may stand for the one that is asked for."""
    if trust.built_here(record.sha256):
        return True
    click.echo("the bundle's engine of this kind was not built on this machine: it is built again", err=True)
    return False


def _refuse_targets(manifest: Manifest, targets: Sequence[str]) -> None:
    """Raise for a GPU that lacks a type of the graph: the builder would find out only after a while."""
    for kind, least, option in (
        (manifest.weights, _LEAST.get(manifest.weights), f"--weights {manifest.weights}"),
        (manifest.signature.dtype, _LEAST.get(manifest.signature.dtype), f"--dtype {manifest.signature.dtype}"),
    ):
        for name in targets:
            if least is not None and int(name.removeprefix("sm")) < least:
                raise OptionFault(
                    f"--target is {name}: GPUs have {kind} from sm{least} on; expected such a target, or a bundle that was "
                    f"exported without {option}"
                )


def _refuse_integers(bundle: Path, manifest: Manifest) -> None:
    if manifest.integer_matmuls:
        raise InputFault(
            f"{bundle}: its products are of 8-bit integers, which TensorRT does not have in this form: export the checkpoint "
            "with --weights float8 or int4, or as it is"
        )


def _refuse_dtype(manifest: Manifest, dtype: str | None) -> None:
    if dtype not in (None, manifest.signature.dtype):
        raise OptionFault(
            f"--dtype is {dtype}, the bundle's graph is {manifest.signature.dtype}: an engine reckons as its graph does; "
            f"export the checkpoint again with --dtype {dtype}"
        )


def _memory(manifest: Manifest, shapes: Shapes) -> str:
    """What running the engine will take, as far as it is known before."""
    signature = manifest.signature
    kv = signature.kv_bytes(shapes.requests, shapes.capacity)
    rows = logit_rows(shapes.prompt_rows, signature.vocab_size)
    logits = shapes.requests * rows * signature.vocab_size * 4  # float32
    requests = f"{shapes.requests} request{'s' if shapes.requests > 1 else ''}"
    return (
        f"{size(manifest.graph_bytes)} of weights, {size(kv)} of KV buffers for {requests} of "
        f"{shapes.capacity} slots, up to {size(logits)} of logits; building takes about {size(host_memory(manifest))} of memory here"
    )


def _told(bundle: Path, outcome: BuildResult) -> str:
    record = outcome.record
    lines = []
    if record.decomposed:
        layers = f"{record.decomposed} layer{'s' if record.decomposed > 1 else ''}"
        lines.append(f"attention of {layers} runs as matrix products: {outcome.decomposed}")
    activation = "" if outcome.activation is None else f", {size(outcome.activation)} to run in"
    state = "" if outcome.built else ", was there already"
    lines.append(
        f"{bundle / 'engines' / outcome.name}: {record.flavour} {record.version}, {size(record.size)}{activation}{state}"
    )
    return "\n".join(lines)


def _as_dict(outcome: BuildResult) -> dict[str, Any]:
    told = {"built": outcome.built, "activation": outcome.activation, "decomposed_why": outcome.decomposed or None}
    return {"name": outcome.name, **asdict(outcome.record), **told}
