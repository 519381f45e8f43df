"""`spaceport export`: export a checkpoint to a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.signature import LOWERINGS
from spaceport.tools.cli.adopt import method_option, noise_seed_option
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    Unused,
    bundle_argument,
    json_option,
    options,
    overwrite_option,
    refuse_unused,
    remote_code_option,
    sections,
)
from spaceport.tools.exporting import export, uses_published_weights
from spaceport.tools.terminal.screen import interruptible_stages, show_json, size

export_adapter_options = options(
    click.option(
        "--adapter",
        type=PATH,
        metavar="PATH",
        help="Draft with this adapter folder, or with published weights: a folder of peft, or heads of Medusa.",
    ),
    method_option,
    noise_seed_option,
)
_NAMED = ("mask", "fork", "child")  # options of special tokens


def _unused(given: dict[str, Any]) -> list[Unused]:
    """The options that have no effect."""
    published = uses_published_weights(given["adapter"], given["method"])
    own = given["adapter"] is not None and not published
    tokens = "name both tokens in sar_config.json of CHECKPOINT"
    return [
        Unused(own, _NAMED, "with --adapter", "the adapter names its tokens"),
        Unused(own, ("method", "noise_seed"), "with an adapter folder", "the folder says how it drafts"),
        Unused(published, ("fork", "child"), "with published weights", tokens),
        Unused(not published, ("noise_seed",), "without published weights", "add --adapter or --method uno"),
        Unused(given["format"] is not None, ("machine",), "with --format", "leave --format out"),
    ]


@sections(
    {
        "adapter": "Adapter, or published weights (see `spaceport adopt`)",
        "format": "Format",
        "lowering": "Graph",
        "mask": "Special tokens (default: those in the checkpoint's sar_config.json)",
        "overwrite": "Output",
    },
    *("adapter", "phrases", "format", "machine", "lowering", "max_mask_slots"),
    *("overwrite", "trust_remote_code", "as_json"),
)
@click.command("export", cls=Sectioned)
@click.argument("checkpoint", type=PATH)
@bundle_argument
@export_adapter_options
@click.option(
    "--phrases",
    multiple=True,
    type=PATH,
    metavar="FILE",
    help="Answers of the model, as `spaceport distill` writes them: phrases that they repeat are drafted without a row of "
    "the model; repeatable.",
)
@click.option(
    "--format",
    type=click.Choice(tuple(FORMATS)),
    help="How numbers are stored and computed: stored, int4 and int8 for CPUs, float16 and bfloat16 for GPUs, and with "
    "-int8, -int4 or -float8 for TensorRT; default: by the machine, the model and its size.",
)
@click.option(
    "--for",
    "machine",
    type=click.Choice(("cpu", "gpu")),
    help="Machine that will run the bundle, for the default format; default: cpu, or gpu with --lowering append.",
)
@click.option(
    "--lowering",
    type=click.Choice(LOWERINGS),
    help="How the graph updates the KV cache: scatter (ONNX Runtime) or append (TensorRT); default: the format's.",
)
@click.option(
    "--attention",
    type=click.Choice(("plain", "operator")),
    help="Attention as MatMul and Softmax (plain) or as the ONNX Attention operator; default: depends on --lowering.",
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
@overwrite_option("bundle")
@remote_code_option
@json_option("the manifest")
@click.pass_context
def command(context: click.Context, /, checkpoint: Path, bundle: Path, **given: Any) -> None:
    """Export CHECKPOINT, a Hugging Face folder or GGUF file, to the new folder BUNDLE.

    The bundle has an ONNX graph, weights, tokenizer and manifest.

    Without a mask token the bundle drafts with prompt lookup only. Published weights that draft are used as `spaceport
    adopt` uses them: those in --adapter, or with --method those in CHECKPOINT.
    """
    refuse_unused(context, _unused(given))
    as_json = given.pop("as_json")
    with interruptible_stages() as on_stage:
        manifest = export(checkpoint, bundle, **given, on_stage=on_stage)
    if as_json:
        show_json(manifest.as_dict())
        return
    total = sum(record.size for record in manifest.files.values())
    heads = f"{manifest.drafts.heads} draft heads" if manifest.drafts.heads else "no mask slots"
    drafts_with = f"up to {manifest.drafts.mask_slots} mask slots" if manifest.drafts.mask_slots else heads
    click.echo(f"{bundle}: {manifest.model_type}, {manifest.parameters:,} parameters, {size(total)}, {drafts_with}")
