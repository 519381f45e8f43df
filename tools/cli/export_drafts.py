"""Export drafts: the options by which an exported bundle drafts with an adapter folder, or with published weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spaceport.exporter.checkpoint_files import BASE_FILE, require_adapter_folder
from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.adopt.given import (
    AdoptionRequest,
    Given,
    adapter_inside,
    forecast_file,
    names_heads,
    published_weights,
    read_given,
)
from spaceport.tools.cli.adopt import method_option, noise_seed_option
from spaceport.tools.cli.options import PATH, Unused, options

if TYPE_CHECKING:  # torch is imported only once the paths are valid
    from collections.abc import Callable

    from spaceport.exporter.export import TokenFlags
    from spaceport.exporter.mechanisms import DraftAdditions

export_adapter_options = options(
    click.option(
        "--adapter",
        type=PATH,
        metavar="PATH",
        help="Draft with this adapter folder, or with published weights: a folder of peft, heads of Medusa, or a file of SSD.",
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
        if (prefix := forecast_file(self.checkpoint)) is not None:
            return f"{prefix} is not used: add --method ssd to draft with it"
        return "the checkpoint's heads are not used: add --method medusa" if names_heads(self.checkpoint) else None

    def adapter_folder(
        self, given: Given | None, bundle: Path, remote_code: bool, on_stage: Callable[[str], None]
    ) -> AbstractContextManager[Path | None]:
        """The adapter folder to export with, written for the export if the weights are published ones."""
        if given is None:
            return nullcontext(self.adapter)
        from spaceport.tools.adopt.adopt import adopted_for_export

        return adopted_for_export(given, bundle, remote_code, on_stage)

    def counted(self, remote_code: bool) -> tuple[DraftAdditions | None, dict[str, Any] | None]:
        """What the drafts add to the base model, and what was found of published weights; no weights are loaded."""
        given = self.read()
        if given is not None:
            from spaceport.tools.adopt.adopt import additions_of, plan_adoption

            plan = plan_adoption(given, remote_code)
            return additions_of(plan), plan.as_dict()
        if self.adapter is None:
            return None, None
        from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
        from spaceport.exporter.dry_run import added_by

        return added_by(open_checkpoint(self.checkpoint, TokenFlags(), remote_code, self.adapter)), None

    def tokens(self, folder: Path | None) -> TokenFlags:
        """The special tokens to export with: those of an adopted adapter are in its folder."""
        from spaceport.exporter.checkpoint import TokenFlags

        if self.published:
            return TokenFlags(
                fork=self.fork, child=self.child, max_mask_slots=None if folder else self.request.max_mask_slots
            )
        return TokenFlags(self.request.mask_tokens, self.fork, self.child, self.request.max_mask_slots)
