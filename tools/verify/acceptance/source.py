"""Model source: the checkpoint or bundle whose acceptance is measured, opened as a runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE, TEMPLATE_FILE
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.chat import render
from spaceport.tools.tune.conversation_encoder import ConversationEncoder, conversation_encoder_with
from spaceport.tools.tune.conversations import Turn


@contextmanager
def open_source(
    folder: Path,
    backend: str,
    max_seq_len: int | None,
    threads: int,
    remote_code: bool,
    adapter: Path | None = None,
    require_signature: Path | None = None,
) -> Iterator[Runtime]:
    """A runtime over a bundle on a backend, or over a checkpoint in PyTorch; either must have mask slots."""
    if not is_checkpoint(folder):
        if not (folder / MANIFEST_FILE).exists():
            raise InputFault(
                f"{folder}: expected a checkpoint (a folder with config.json) or a bundle (a folder with {MANIFEST_FILE})"
            )
        if adapter is not None:
            raise OptionFault(
                f"--adapter {adapter} with the bundle {folder}: expected a checkpoint with it; leave it out, or export its "
                "base model with `spaceport export --adapter`"
            )
        _require_masks(folder, read_manifest(folder, require_signature=require_signature).max_draft_tokens)
        with Runtime.open(
            folder, backend=backend, max_seq_len=max_seq_len, threads=threads, require_signature=require_signature
        ) as runtime:
            yield runtime
        return
    if require_signature is not None:
        raise OptionFault(f"--require-signature: {folder} is a checkpoint, expected a bundle with it: leave it out")
    if backend != "auto":
        raise OptionFault(
            f"--backend {backend} runs bundles, {folder} is a checkpoint and runs in PyTorch: leave --backend out, "
            "or export the checkpoint first"
        )
    # Imported for checkpoints only: bundles are measured where PyTorch is not installed.
    from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
    from spaceport.exporter.quiet import quiet_libraries
    from spaceport.tools.reference import checkpoint_runtime

    quiet_libraries()
    checkpoint = open_checkpoint(folder, TokenFlags(), remote_code, adapter)
    _require_masks(folder, checkpoint.max_mask_slots or (0 if checkpoint.heads is None else checkpoint.heads.count))
    with checkpoint_runtime(checkpoint, max_seq_len, threads) as runtime:
        yield runtime


def is_checkpoint(folder: Path) -> bool:
    """Whether a path is a checkpoint folder or GGUF file, not a bundle."""
    if folder.suffix.lower() == ".gguf":
        return not folder.is_dir()
    return (folder / "config.json").exists() and not (folder / MANIFEST_FILE).exists()


def conversation_encoder_for(runtime: Runtime) -> ConversationEncoder:
    """The tokenization of conversations for a runtime's model, the same as in training."""
    bundle = runtime.bundle

    def rendered(turns: Sequence[Turn], ask: bool) -> str:
        return render(bundle, [{"role": turn.role, "content": turn.content} for turn in turns], ask)

    has_template = TEMPLATE_FILE in bundle.manifest.files
    return conversation_encoder_with(runtime.tokenizer, rendered if has_template else None, bundle.manifest.tokens)


def _require_masks(folder: Path, mask_slots: int) -> None:
    if not mask_slots:
        raise InputFault(
            f"{folder}: has no mask token and no heads, so there are no draft tokens to measure: expected a checkpoint tuned with mask "
            "slots (`spaceport tune`), a base model with --adapter, or a bundle exported from one"
        )
