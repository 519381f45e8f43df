"""`spaceport export`: export a checkpoint to a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from spaceport.exporter.atomic_folder import check_target
from spaceport.exporter.checkpoint_files import require_checkpoint
from spaceport.exporter.interrupts import interrupts_handled
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import ACTIVATIONS, KV_CACHES, LOWERINGS, PRECISIONS, WEIGHTS
from spaceport.tools.adopt.given import AdoptionRequest
from spaceport.tools.cli.dry_run import DRY_RUN_ONLY, dry_run_options, run_memory, show_report
from spaceport.tools.cli.export_drafts import ExportDrafts, export_adapter_options
from spaceport.tools.cli.options import (
    PATH,
    Renamed,
    Sectioned,
    Unused,
    bundle_argument,
    json_option,
    overwrite_option,
    refuse_unused,
    remote_code_option,
)
from spaceport.tools.terminal.screen import show_json, size, stages
from spaceport.tools.verify.audit.prompts import read_prompts

if TYPE_CHECKING:  # torch is imported only once the paths are valid
    from spaceport.exporter.export import ExportOptions


class Export(Sectioned):
    """The command with its options in groups."""

    headings: ClassVar = {
        "adapter": "Adapter, or published weights (see `spaceport adopt`)",
        "lowering": "Graph",
        "weights": "Quantization",
        "mask": "Special tokens (default: those in the checkpoint's sar_config.json)",
        "dry_run": "Dry run",
        "overwrite": "Output",
    }


@click.command("export", cls=Export)
@click.argument("checkpoint", type=PATH)
@bundle_argument
@export_adapter_options
@click.option(
    "--lowering",
    type=click.Choice(LOWERINGS),
    default="scatter",
    show_default=True,
    help="How the graph updates the KV cache: scatter (ONNX Runtime) or append (TensorRT).",
)
@click.option(
    "--dtype",
    type=click.Choice(PRECISIONS),
    default="float32",
    show_default=True,
    help="Data type of weights, activations and KV cache.",
)
@click.option(
    "--attention",
    type=click.Choice(("plain", "operator")),
    help="Attention as MatMul and Softmax (plain) or as the ONNX Attention operator; default: depends on --lowering.",
)
@click.option(
    "--opset",
    type=int,
    metavar="N",
    help="ONNX opset, 23 or 24; default: the lowest that supports the lowering.",
)
@click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    default="same",
    show_default=True,
    help="Data type of the weights of linear layers: the same as --dtype, or quantized. int8 is fast with drafts on CPUs "
    "with AMX or VNNI, int4 without drafts on all CPUs (its drafts are exact on x86); float8 is for GPUs.",
)
@click.option(
    "--activations",
    type=click.Choice(ACTIVATIONS),
    help="Inputs of layers with quantized weights: float, or quantized per row; default: depends on --weights.",
)
@click.option(
    "--kv-cache",
    type=click.Choice(KV_CACHES),
    help="Data type of keys and values: the same as --dtype, or int8, whose sums are exact in any order of the KV slots; "
    "default: int8 for --weights int8 where the model allows it.",
)
@click.option(
    "--calibration-data",
    "calibrate",
    cls=Renamed,
    former=["--calibrate"],
    type=PATH,
    metavar="PROMPTS",
    help="Prompt file, one prompt per line: int8 and int4 weights are rounded for texts that the model samples after them; "
    "default: a few questions if the model chats, otherwise no prompts.",
)
@click.option(
    "--mask-token",
    "mask",
    multiple=True,
    metavar="ID|TOKEN",
    help="Mask token of SPACE drafts: once for all mask slots, or once per mask slot.",
)
@click.option("--fork-token", "fork", metavar="ID|TOKEN", help="Token that starts a child thread.")
@click.option("--child-token", "child", metavar="ID|TOKEN", help="First token of every child thread.")
@click.option(
    "--max-mask-slots",
    type=int,
    metavar="K",
    help="Maximum number of mask slots per step; default: the number that the checkpoint was tuned with.",
)
@dry_run_options
@overwrite_option("bundle")
@remote_code_option
@json_option("the manifest, or the report of a dry run")
@click.pass_context
def command(
    context: click.Context,
    checkpoint: Path,
    bundle: Path,
    adapter: Path | None,
    method: str | None,
    noise_seed: int | None,
    lowering: Any,
    dtype: Any,
    weights: Any,
    activations: Any,
    kv_cache: Any,
    calibrate: Path | None,
    attention: Any,
    mask: tuple[str, ...],
    fork: str | None,
    child: str | None,
    max_mask_slots: int | None,
    opset: int | None,
    dry_run: bool,
    gpu_memory: int | None,
    max_seq_len: int | None,
    max_requests: int,
    overwrite: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Export CHECKPOINT, a Hugging Face folder or GGUF file, to the new folder BUNDLE.

    The bundle has an ONNX graph, weights, tokenizer and manifest.

    Without a mask token the bundle drafts with prompt lookup only. Published weights that draft are used as `spaceport
    adopt` uses them: those in --adapter, or with --method those in CHECKPOINT.
    """
    drafts = ExportDrafts(checkpoint, adapter, AdoptionRequest(method, mask, max_mask_slots, noise_seed), fork, child)
    refuse_unused(context, [*drafts.unused, *_unused(drafts, dry_run)])
    chosen = (lowering, dtype, weights, attention, opset, trust_remote_code, activations, kv_cache)
    if dry_run:
        _dry_run(drafts, bundle, chosen, (max_seq_len, max_requests), gpu_memory, as_json)
        return
    if calibrate is not None and not (weights == "int4" or (weights == "int8" and activations != "float")):
        raise OptionFault(
            "--calibration-data is for weights that are rounded by GPTQ: expected --weights int4 with it, or --weights int8 "
            "without --activations float"
        )
    prompts = () if calibrate is None else tuple(one.prompt for one in read_prompts(calibrate))
    check_target(bundle, overwrite)
    require_checkpoint(checkpoint)
    given = drafts.read()
    # torch is imported only once the paths are valid
    from spaceport.exporter.checkpoint_source import quiet_libraries
    from spaceport.exporter.export import export

    quiet_libraries()
    with interruptible() as interrupts, stages() as stage:

        def on_stage(name: str) -> None:
            _begin(name, stage, interrupts)

        if drafts.hint is not None:
            on_stage(drafts.hint)
        with drafts.adapter_folder(given, bundle, trust_remote_code, on_stage) as folder:
            options = replace(_options(chosen), tokens=drafts.tokens(folder), calibrate=prompts, adapter=folder)
            manifest = export(checkpoint, bundle, options, overwrite, on_stage)
    if as_json:
        show_json(manifest.as_dict())
        return
    total = sum(record.size for record in manifest.files.values())
    heads = f"{manifest.drafts.heads} draft heads" if manifest.drafts.heads else "no mask slots"
    drafts_with = f"up to {manifest.drafts.mask_slots} mask slots" if manifest.drafts.mask_slots else heads
    click.echo(f"{bundle}: {manifest.model_type}, {manifest.parameters:,} parameters, {size(total)}, {drafts_with}")


def _unused(drafts: ExportDrafts, dry_run: bool) -> list[Unused]:
    """The options that have no effect in a dry run, or without one."""
    unread = ("calibrate", "fork", "child", "overwrite", *(() if drafts.published else ("mask", "max_mask_slots")))
    return [
        Unused(not dry_run, DRY_RUN_ONLY, "without --dry-run", "add --dry-run"),
        Unused(dry_run, unread, "with --dry-run", "it reads the base model's configuration"),
    ]


def _options(chosen: tuple[Any, ...]) -> ExportOptions:
    """The options of a graph and its weights, without what drafts add."""
    from spaceport.exporter.export import ExportOptions

    lowering, dtype, weights, attention, opset, remote_code, activations, kv_cache = chosen
    return ExportOptions(
        lowering,
        dtype,
        weights,
        attention,
        opset,
        remote_code=remote_code,
        requested_activations=activations,
        requested_kv_cache=kv_cache,
    )


def _dry_run(
    drafts: ExportDrafts,
    bundle: Path,
    chosen: tuple[Any, ...],
    limits: tuple[int | None, int],
    gpu_memory: int | None,
    as_json: bool,
) -> None:
    """Report what an export would write; the folder of the bundle must exist, since its free space is read."""
    if not bundle.absolute().parent.is_dir():
        raise OptionFault(f"{bundle.absolute().parent}: no such folder: create it first, or name another for BUNDLE")
    from spaceport.exporter.checkpoint_source import quiet_libraries
    from spaceport.exporter.dry_run import dry_run

    quiet_libraries()
    options = _options(chosen)
    additions, published = drafts.counted(options.remote_code)
    found = dry_run(drafts.checkpoint, options, additions)
    show_report(found, bundle, run_memory(found, *limits), gpu_memory, as_json, published)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Let SIGTERM end an export as Ctrl-C does, without leftover files; the signals received so far."""
    interrupts: list[int] = []

    def interrupt(number: int) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    try:
        with interrupts_handled(interrupt):
            yield interrupts
    except Exception as error:
        if interrupts:  # torch turns some interrupts into errors of its own
            raise KeyboardInterrupt from error
        raise


def _begin(name: str, stage: Callable[[str], None], interrupts: list[int]) -> None:
    """Start a stage, or raise an interrupt that was lost: Python drops one that arrives in a weak reference callback."""
    if interrupts:
        raise KeyboardInterrupt
    stage(name)
