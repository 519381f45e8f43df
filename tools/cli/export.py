"""`spaceport export`: a checkpoint folder becomes a bundle."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from spaceport.exporter.export import ExportOptions, TokenFlags, export
from spaceport.exporter.quiet import quiet_libraries
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import ACTIVATIONS, LOWERINGS, PRECISIONS, WEIGHTS
from spaceport.tools.cli.options import PATH, bundle_argument, json_option, overwrite_option, remote_code_option
from spaceport.tools.terminal.screen import show_json, size, stages
from spaceport.tools.verify.audit.prompts import read_prompts


@click.command("export")
@click.argument("checkpoint", type=PATH)
@bundle_argument
@click.option(
    "--lowering",
    type=click.Choice(LOWERINGS),
    default="scatter",
    show_default=True,
    help="How rows are written: scatter for ONNX Runtime, append for TensorRT.",
)
@click.option(
    "--dtype",
    type=click.Choice(PRECISIONS),
    default="float32",
    show_default=True,
    help="Type of weights and KV buffers.",
)
@click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    default="same",
    show_default=True,
    help="Weights of linear layers: as --dtype says, or rounded to few bits.",
)
@click.option(
    "--activations",
    type=click.Choice(ACTIVATIONS),
    help="Inputs of products with quantized weights: in float, or quantized per row; by default what suits the weights.",
)
@click.option(
    "--calibrate",
    type=PATH,
    metavar="PROMPTS",
    help="File of prompts, one on each line; the model's answers decide how --weights int8 scales the inputs of products. "
    "By default texts that the model writes by itself.",
)
@click.option(
    "--attention",
    type=click.Choice(("plain", "operator")),
    help="Attention as matrix products or as the ONNX operator; by default what suits the lowering.",
)
@click.option(
    "--mask-token",
    "mask",
    multiple=True,
    metavar="ID|TOKEN",
    help="Mask token; once for all mask slots, or once for each.",
)
@click.option("--fork-token", "fork", metavar="ID|TOKEN", help="Token that forks a thread.")
@click.option("--child-token", "child", metavar="ID|TOKEN", help="Token that a forked thread begins with.")
@click.option(
    "--max-mask-slots",
    type=int,
    metavar="K",
    help="Most tokens that a step may draft; by default what the checkpoint was tuned for.",
)
@click.option(
    "--opset",
    type=int,
    metavar="N",
    help="ONNX opset, 23 or 24; by default the lowest that the lowering can be said in.",
)
@overwrite_option("bundle")
@remote_code_option
@json_option("the manifest")
def command(
    checkpoint: Path,
    bundle: Path,
    lowering: Any,
    dtype: Any,
    weights: Any,
    activations: Any,
    calibrate: Path | None,
    attention: Any,
    mask: tuple[str, ...],
    fork: str | None,
    child: str | None,
    max_mask_slots: int | None,
    opset: int | None,
    overwrite: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Write CHECKPOINT (a Hugging Face folder) as BUNDLE (a folder to be made).

    The special tokens come from the checkpoint's sar_config.json; a flag here goes before it. Without a mask token
    the bundle decodes plainly.
    """
    quiet_libraries()
    tokens = TokenFlags(mask, fork, child, max_mask_slots)
    if calibrate is not None and (weights != "int8" or activations == "float"):
        raise OptionFault(f"--calibrate is {calibrate}: expected --weights int8 with it, whose inputs are rounded")
    prompts = () if calibrate is None else tuple(one.prompt for one in read_prompts(calibrate))
    options = ExportOptions(lowering, dtype, weights, attention, opset, tokens, trust_remote_code, activations, prompts)
    with listening() as interrupts, stages() as stage:
        manifest = export(checkpoint, bundle, options, overwrite, lambda name: _begin(name, stage, interrupts))
    if as_json:
        show_json(manifest.as_dict())
        return
    total = sum(record.size for record in manifest.files.values())
    drafts = (
        f"up to {manifest.max_mask_slots} mask slots" if manifest.max_mask_slots else "no mask token: plain decoding"
    )
    click.echo(f"{bundle}: {manifest.family}, {manifest.parameters:,} parameters, {size(total)}, {drafts}")


@contextmanager
def listening() -> Iterator[list[int]]:
    """Let a polite kill end an export as Ctrl-C does, with nothing left behind; the interrupts that came so far."""
    interrupts: list[int] = []

    def heard(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    kept = {kind: signal.signal(kind, heard) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    except Exception as error:
        if interrupts:  # torch makes errors of its own of some
            raise KeyboardInterrupt from error
        raise
    finally:
        for kind, handler in kept.items():
            signal.signal(kind, handler)


def _begin(name: str, stage: Callable[[str], None], interrupts: list[int]) -> None:
    """Begin a stage, unless an interrupt was lost: Python drops one that comes while a weak reference is cleared."""
    if interrupts:
        raise KeyboardInterrupt
    stage(name)
