"""Exporting: what decides the format and the drafts of a bundle, and the function that exports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
    from spaceport.exporter.export import ExportOptions, Machine
    from spaceport.graphs.contract.manifest import Manifest
    from spaceport.graphs.decoder import AttentionImplementation


def uses_published_weights(adapter: Path | None, method: str | None) -> bool:
    """Whether an export drafts with published weights, which it adopts: those of `adapter`, or with a method CHECKPOINT's."""
    if adapter is None:
        return method is not None
    return not (adapter / BASE_FILE).exists() and published_weights(adapter) is not None


def _published(files: ModelFiles, adapter: Path | None, request: AdoptionRequest) -> Given:
    """The files of the published weights."""
    slots = request.max_mask_slots
    if slots is not None and slots < 1:
        raise OptionFault(f"--max-mask-slots is {slots}: expected at least 1")
    return read_given(files, adapter_inside(files.path) if adapter is None else published_weights(adapter), request)


def _left_out(files: ModelFiles) -> str | None:
    """What an export without options of drafts leaves out of CHECKPOINT, and how to use it."""
    if (inside := adapter_inside(files.path)) is not None:
        return f"{inside} is not used: add --adapter {inside} to draft with it"
    return "the checkpoint's heads are not used: add --method medusa" if names_heads(files) else None


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
    bundle, adapter = Path(bundle), None if adapter is None else Path(adapter)
    check_target(bundle, overwrite)
    refuse_while_written(bundle)
    files, given = require_checkpoint(Path(checkpoint)), None
    if uses_published_weights(adapter, method):
        given = _published(files, adapter, AdoptionRequest(method, tuple(mask), max_mask_slots, noise_seed))
    elif adapter is not None:
        require_adapter_folder(adapter)
    # torch is imported only once the paths are valid, and before transformers, which warns without it
    from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint, quiet_libraries
    from spaceport.exporter.export import ExportOptions, choose_format
    from spaceport.exporter.export import export as write_bundle

    quiet_libraries()
    for_tensorrt = lowering == "append" or attention == "operator"
    chosen = choose_format(files, format, machine or ("gpu" if for_tensorrt else "cpu"), trust_remote_code)
    smallest, reason = chosen.format, chosen.reason
    if chosen.measurable:
        smallest, reason = FORMATS["int4"], "format int4, or int8 if int4 differs too much from float32"
    options = ExportOptions(smallest, lowering, attention, remote_code=trust_remote_code)
    on_stage(reason)
    if given is None and adapter is None and (left_out := _left_out(files)) is not None:
        on_stage(left_out)
    used: AbstractContextManager[Path | None] = nullcontext(adapter)
    if given is not None:
        from spaceport.tools.adopt.adopt import adopted_for_export

        used = adopted_for_export(given, bundle, trust_remote_code, on_stage)
    with used as folder:
        tokens = TokenFlags(tuple(mask), fork, child, max_mask_slots)
        if given is not None:  # those of an adopted adapter are in its folder
            tokens = TokenFlags((), fork, child, None if folder else max_mask_slots)
        options = replace(options, tokens=tokens, adapter=folder)
        if phrases:
            on_stage("counting phrases")
            from spaceport.training.phrases import read_phrases_of

            opened = open_checkpoint(files, options.tokens, trust_remote_code, folder)
            options = replace(options, phrases=read_phrases_of(opened, [Path(file) for file in phrases]))
        manifest = write_bundle(files, bundle, options, overwrite, on_stage)
        if not chosen.measurable or _is_close(bundle, files, options, on_stage):
            return manifest
        return write_bundle(files, bundle, replace(options, format=FORMATS["int8"]), True, on_stage)


def _is_close(bundle: Path, files: ModelFiles, options: ExportOptions, on_stage: Callable[[str], None]) -> bool:
    """Whether a bundle hardly differs from its checkpoint."""
    from spaceport.exporter.export import LARGEST_DIVERGENCE
    from spaceport.runtime.bundle import open_bundle
    from spaceport.verify.quantization import measure_bundle

    on_stage(f"measuring {options.format.name} on texts of the model")
    measured = measure_bundle(open_bundle(bundle), files, options.remote_code, options.adapter)
    on_stage(f"{measured}, {LARGEST_DIVERGENCE:g} at most")
    return measured.divergence <= LARGEST_DIVERGENCE
