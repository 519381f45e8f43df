"""`spaceport export`: export a checkpoint to a bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from spaceport.exporter.atomic_folder import check_target, refuse_while_written
from spaceport.exporter.checkpoint_files import BASE_FILE, require_adapter_folder, require_checkpoint
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.signature import LOWERINGS
from spaceport.tools.adopt.given import (
    AdoptionRequest,
    Given,
    adapter_inside,
    names_heads,
    published_weights,
    read_given,
)
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
)
from spaceport.tools.terminal.screen import interruptible_stages, show_json, size

if TYPE_CHECKING:  # torch is imported only once the paths are valid
    from spaceport.exporter.choose_format import Machine
    from spaceport.exporter.export import ExportOptions, TokenFlags
    from spaceport.graphs.contract.manifest import Manifest
    from spaceport.graphs.phrases import Phrases

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


@dataclass(frozen=True)
class ExportDrafts:
    """What an exported bundle drafts with, by the options of the command."""

    checkpoint: Path
    adapter: Path | None  # as given
    request: AdoptionRequest
    fork: str | None = None
    child: str | None = None

    @property
    def published(self) -> bool:
        """Whether these are published weights, which are adopted for the export."""
        if self.adapter is None:
            return self.request.method is not None
        return not (self.adapter / BASE_FILE).exists() and published_weights(self.adapter) is not None

    @property
    def unused(self) -> list[Unused]:
        """The options that have no effect with these drafts."""
        own = self.adapter is not None and not self.published
        return [
            Unused(own, _NAMED, "with --adapter", "the adapter names its tokens"),
            Unused(own, ("method", "noise_seed"), "with an adapter folder", "the folder says how it drafts"),
            Unused(
                self.published,
                ("fork", "child"),
                "with published weights",
                "name both tokens in sar_config.json of CHECKPOINT",
            ),
            Unused(not self.published, ("noise_seed",), "without published weights", "add --adapter or --method uno"),
        ]

    def read(self) -> Given | None:
        """The files of published weights; None: the export needs no adoption. Raises for any other path."""
        if not self.published:
            if self.adapter is not None:
                require_adapter_folder(self.adapter)
            return None
        slots = self.request.max_mask_slots
        if slots is not None and slots < 1:
            raise OptionFault(f"--max-mask-slots is {slots}: expected at least 1")
        inside = adapter_inside(self.checkpoint) if self.adapter is None else published_weights(self.adapter)
        return read_given(self.checkpoint, inside, self.request)

    @property
    def hint(self) -> str | None:
        """What the export leaves out of CHECKPOINT, and how to use it."""
        if self.adapter is not None or self.published:
            return None
        inside = adapter_inside(self.checkpoint)
        if inside is not None:
            return f"{inside} is not used: add --adapter {inside} to draft with it"
        return "the checkpoint's heads are not used: add --method medusa" if names_heads(self.checkpoint) else None

    def adapter_folder(
        self, given: Given | None, bundle: Path, remote_code: bool, on_stage: Callable[[str], None]
    ) -> AbstractContextManager[Path | None]:
        """The adapter folder to export with, written for the export if the weights are published ones."""
        if given is None:
            return nullcontext(self.adapter)
        from spaceport.tools.adopt.adopt import adopted_for_export

        return adopted_for_export(given, bundle, remote_code, on_stage)

    def tokens(self, folder: Path | None) -> TokenFlags:
        """The special tokens to export with: those of an adopted adapter are in its folder."""
        from spaceport.exporter.checkpoint import TokenFlags

        if self.published:
            return TokenFlags(
                fork=self.fork, child=self.child, max_mask_slots=None if folder else self.request.max_mask_slots
            )
        return TokenFlags(self.request.mask_tokens, self.fork, self.child, self.request.max_mask_slots)


class Export(Sectioned):
    """The command with its options in groups."""

    headings: ClassVar = {
        "adapter": "Adapter, or published weights (see `spaceport adopt`)",
        "format": "Format",
        "lowering": "Graph",
        "mask": "Special tokens (default: those in the checkpoint's sar_config.json)",
        "overwrite": "Output",
    }
    usual: ClassVar = frozenset(
        (
            *("adapter", "phrases", "format", "machine", "lowering", "max_mask_slots"),
            *("overwrite", "trust_remote_code", "as_json"),
        )
    )


@click.command("export", cls=Export)
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
    "--opset",
    type=int,
    metavar="N",
    help="ONNX opset, 23 or 24; default: the lowest that supports the lowering.",
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
    request = AdoptionRequest(given["method"], given["mask"], given["max_mask_slots"], given["noise_seed"])
    drafts = ExportDrafts(checkpoint, given["adapter"], request, given["fork"], given["child"])
    format_named = Unused(given["format"] is not None, ("machine",), "with --format", "leave --format out")
    refuse_unused(context, [*drafts.unused, format_named])
    check_target(bundle, given["overwrite"])
    refuse_while_written(bundle)
    require_checkpoint(checkpoint)
    adopted = drafts.read()
    # torch is imported only once the paths are valid, and before transformers, which warns without it
    from spaceport.exporter.export import export

    options, reason, measured = _options(checkpoint, given)
    with interruptible_stages() as on_stage:
        for note in filter(None, (reason, drafts.hint)):
            on_stage(note)
        with drafts.adapter_folder(adopted, bundle, options.remote_code, on_stage) as folder:
            options = replace(options, tokens=drafts.tokens(folder), adapter=folder)
            if given["phrases"]:
                on_stage("counting phrases")
                options = replace(options, phrases=_phrases(checkpoint, options, given["phrases"]))
            write = _measured_export if measured else export
            manifest = write(checkpoint, bundle, options, given["overwrite"], on_stage)
    if given["as_json"]:
        show_json(manifest.as_dict())
        return
    total = sum(record.size for record in manifest.files.values())
    heads = f"{manifest.drafts.heads} draft heads" if manifest.drafts.heads else "no mask slots"
    drafts_with = f"up to {manifest.drafts.mask_slots} mask slots" if manifest.drafts.mask_slots else heads
    click.echo(f"{bundle}: {manifest.model_type}, {manifest.parameters:,} parameters, {size(total)}, {drafts_with}")


def _phrases(folder: Path, options: ExportOptions, files: Sequence[Path]) -> Phrases:
    from spaceport.exporter.checkpoint import open_checkpoint
    from spaceport.training.phrases import read_phrases_of

    checkpoint = open_checkpoint(folder, options.tokens, options.remote_code, options.adapter)
    return read_phrases_of(checkpoint, files)


def _measured_export(
    checkpoint: Path, bundle: Path, options: ExportOptions, overwrite: bool, on_stage: Callable[[str], None]
) -> Manifest:
    """Export as int4, and again as int8 if that differs too much from the checkpoint."""
    from spaceport.exporter.choose_format import LARGEST_DIVERGENCE
    from spaceport.exporter.export import export
    from spaceport.runtime.bundle import open_bundle
    from spaceport.verify.quantization import measure_bundle

    int4 = replace(options, format=FORMATS["int4"])
    manifest = export(checkpoint, bundle, int4, overwrite, on_stage)
    on_stage("measuring int4 on texts of the model")
    measured = measure_bundle(open_bundle(bundle), checkpoint, options.remote_code, options.adapter)
    on_stage(f"{measured}, {LARGEST_DIVERGENCE:g} at most")
    if measured.divergence <= LARGEST_DIVERGENCE:
        return manifest
    return export(checkpoint, bundle, replace(options, format=FORMATS["int8"]), True, on_stage)


def _options(checkpoint: Path, given: Mapping[str, Any]) -> tuple[ExportOptions, str, bool]:
    """The options of a graph and its weights, without what drafts add, why the format is this one, and whether a measurement
    decides between int4 and int8."""
    from spaceport.exporter.checkpoint_source import quiet_libraries
    from spaceport.exporter.choose_format import choose_format, may_be_measured
    from spaceport.exporter.export import ExportOptions

    quiet_libraries()
    for_tensorrt = given["lowering"] == "append" or given["attention"] == "operator"
    machine: Machine = given["machine"] or ("gpu" if for_tensorrt else "cpu")
    chosen, reason = choose_format(checkpoint, given["format"], machine, given["trust_remote_code"])
    options = ExportOptions(
        chosen, given["lowering"], given["attention"], given["opset"], remote_code=given["trust_remote_code"]
    )
    measured = given["format"] is None and may_be_measured(checkpoint, chosen, options.remote_code)
    if measured:
        reason = "format int4, or int8 if int4 differs too much from float32"
    return options, reason, measured
