"""Exporting: what decides the format and the drafts of a bundle, and the function that exports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spaceport.exporter.atomic_folder import check_target, refuse_while_written
from spaceport.exporter.checkpoint_files import BASE_FILE, ModelFiles, require_adapter_folder, require_checkpoint
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.signature import Lowering
from spaceport.tools.adopt.plan import (
    AdoptionRequest,
    Given,
    adapter_inside,
    names_heads,
    published_weights,
    read_given,
)

if TYPE_CHECKING:  # torch is imported only once the paths are valid
    from spaceport.exporter.choose_format import Machine
    from spaceport.exporter.export import ExportOptions, TokenFlags
    from spaceport.graphs.contract.manifest import Manifest
    from spaceport.graphs.decoder import AttentionImplementation
    from spaceport.graphs.mechanism import Phrases


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

    def read(self, files: ModelFiles) -> Given | None:
        """The files of published weights; None: the export needs no adoption. Raises for any other path."""
        if not self.published:
            if self.adapter is not None:
                require_adapter_folder(self.adapter)
            return None
        slots = self.request.max_mask_slots
        if slots is not None and slots < 1:
            raise OptionFault(f"--max-mask-slots is {slots}: expected at least 1")
        inside = adapter_inside(self.checkpoint) if self.adapter is None else published_weights(self.adapter)
        return read_given(files, inside, self.request)

    def hint(self, files: ModelFiles) -> str | None:
        """What the export leaves out of CHECKPOINT, and how to use it."""
        if self.adapter is not None or self.published:
            return None
        inside = adapter_inside(self.checkpoint)
        if inside is not None:
            return f"{inside} is not used: add --adapter {inside} to draft with it"
        return "the checkpoint's heads are not used: add --method medusa" if names_heads(files) else None

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


def export(
    checkpoint: Path | str,
    bundle: Path | str,
    *,
    format: str | None = None,
    machine: Machine | None = None,
    adapter: Path | str | None = None,
    phrases: Sequence[Path | str] = (),
    method: str | None = None,
    noise_seed: int | None = None,
    lowering: Lowering | None = None,
    attention: AttentionImplementation | None = None,
    mask: Sequence[str] = (),
    fork: str | None = None,
    child: str | None = None,
    max_mask_slots: int | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    on_stage: Callable[[str], None] = lambda name: None,
) -> Manifest:
    """Export a checkpoint, a Hugging Face folder or GGUF file, to a new folder; returns its manifest.

    - `format`: How numbers are stored and computed, a name of `spaceport export --format`; None: by the machine, the model
      and its size.
    - `machine`: "cpu" or "gpu", for the default format.
    - `adapter`: An adapter folder, or published weights that draft.
    - `phrases`: Files of own answers of the model, whose phrases are drafted.
    - `method`, `noise_seed`: Of published weights, where their files do not say it.
    - `lowering`, `attention`: Of the graph; None: those of the format.
    - `mask`, `fork`, `child`, `max_mask_slots`: Special tokens by id or text, and how many mask slots a step has at most;
      by default those of the checkpoint.
    - `overwrite`: Whether to replace a bundle that is there; it stays until the new one is complete.
    - `trust_remote_code`: Whether to run Python code of the checkpoint.
    - `on_stage`: Called with the name of each stage.
    """
    checkpoint, bundle = Path(checkpoint), Path(bundle)
    drafts = ExportDrafts(
        checkpoint,
        None if adapter is None else Path(adapter),
        AdoptionRequest(method, tuple(mask), max_mask_slots, noise_seed),
        fork,
        child,
    )
    check_target(bundle, overwrite)
    refuse_while_written(bundle)
    files = require_checkpoint(checkpoint)
    adopted = drafts.read(files)
    # torch is imported only once the paths are valid, and before transformers, which warns without it
    from spaceport.exporter.checkpoint_source import quiet_libraries
    from spaceport.exporter.choose_format import choose_format
    from spaceport.exporter.export import ExportOptions
    from spaceport.exporter.export import export as write_bundle

    quiet_libraries()
    for_tensorrt = lowering == "append" or attention == "operator"
    chosen = choose_format(files, format, machine or ("gpu" if for_tensorrt else "cpu"), trust_remote_code)
    options = ExportOptions(chosen.format, lowering, attention, remote_code=trust_remote_code)
    measured = "format int4, or int8 if int4 differs too much from float32"
    for note in filter(None, (measured if chosen.measurable else chosen.reason, drafts.hint(files))):
        on_stage(note)
    with drafts.adapter_folder(adopted, bundle, trust_remote_code, on_stage) as folder:
        options = replace(options, tokens=drafts.tokens(folder), adapter=folder)
        if phrases:
            on_stage("counting phrases")
            options = replace(options, phrases=_phrases(files, options, [Path(file) for file in phrases]))
        write = _measured_export if chosen.measurable else write_bundle
        return write(files, bundle, options, overwrite, on_stage)


def _phrases(files: ModelFiles, options: ExportOptions, answers: Sequence[Path]) -> Phrases:
    from spaceport.exporter.checkpoint import open_checkpoint
    from spaceport.training.phrases import read_phrases_of

    checkpoint = open_checkpoint(files, options.tokens, options.remote_code, options.adapter)
    return read_phrases_of(checkpoint, answers)


def _measured_export(
    files: ModelFiles, bundle: Path, options: ExportOptions, overwrite: bool, on_stage: Callable[[str], None]
) -> Manifest:
    """Export as int4, and again as int8 if that differs too much from the checkpoint."""
    from spaceport.exporter.choose_format import LARGEST_DIVERGENCE
    from spaceport.exporter.export import export
    from spaceport.runtime.bundle import open_bundle
    from spaceport.verify.quantization import measure_bundle

    int4 = replace(options, format=FORMATS["int4"])
    manifest = export(files, bundle, int4, overwrite, on_stage)
    on_stage("measuring int4 on texts of the model")
    measured = measure_bundle(open_bundle(bundle), files, options.remote_code, options.adapter)
    on_stage(f"{measured}, {LARGEST_DIVERGENCE:g} at most")
    if measured.divergence <= LARGEST_DIVERGENCE:
        return manifest
    return export(files, bundle, replace(options, format=FORMATS["int8"]), True, on_stage)
