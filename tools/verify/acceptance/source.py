"""Model source: the checkpoint or bundle whose acceptance is measured, opened as a runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE, TEMPLATE_FILE
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.engine import seq_len
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.chat_template import open_template
from spaceport.tools.tune.conversation_encoder import ConversationEncoder, conversation_encoder_with
from spaceport.tools.tune.conversations import Turn


@dataclass(frozen=True)
class SourceOptions:
    """How models are opened."""

    backend: str = "auto"  # of bundles
    max_seq_len: int | None = None
    threads: int = 0
    remote_code: bool = False
    adapter: Path | None = None
    require_signature: Path | None = None


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint or bundle, checked as far as possible without its weights."""

    path: Path
    draft_tokens: int  # maximum draft tokens from mask slots or heads; 0: neither
    max_seq_len: int | None  # of its runtime; None: known once it is open
    open: Callable[[], AbstractContextManager[Runtime]]

    def require_drafts(self) -> None:
        """Raise for a model without mask slots and heads."""
        if not self.draft_tokens:
            raise InputFault(
                f"{self.path}: has no mask token and no heads, so there are no draft tokens to measure: expected a checkpoint "
                "tuned with mask slots (`spaceport tune`), a base model with --adapter, or a bundle exported from one"
            )


def find_source(folder: Path, options: SourceOptions) -> ModelSource:
    """The bundle or checkpoint in a folder: a bundle runs on a backend, a checkpoint in PyTorch."""
    return _checkpoint(folder, options) if is_checkpoint(folder) else _bundle(folder, options)


@contextmanager
def open_source(folder: Path, options: SourceOptions) -> Iterator[Runtime]:
    """A runtime over the bundle or checkpoint in a folder, which must have mask slots or heads."""
    source = find_source(folder, options)
    source.require_drafts()
    with source.open() as runtime:
        yield runtime


def _bundle(folder: Path, options: SourceOptions) -> ModelSource:
    if not (folder / MANIFEST_FILE).exists():
        raise InputFault(
            f"{folder}: expected a checkpoint (a folder with config.json) or a bundle (a folder with {MANIFEST_FILE})"
        )
    if options.adapter is not None:
        raise OptionFault(
            f"--adapter {options.adapter} with the bundle {folder}: expected a checkpoint with it; leave it out, or export its "
            "base model with `spaceport export --adapter`"
        )
    manifest = read_manifest(folder, require_signature=options.require_signature)

    def opened() -> Runtime:
        return Runtime.open(
            folder,
            backend=options.backend,
            max_seq_len=options.max_seq_len,
            threads=options.threads,
            require_signature=options.require_signature,
        )

    return ModelSource(folder, manifest.drafts.max_tokens, seq_len(manifest, options.max_seq_len), opened)


def _checkpoint(folder: Path, options: SourceOptions) -> ModelSource:
    if options.require_signature is not None:
        raise OptionFault(f"--require-signature: {folder} is a checkpoint, expected a bundle with it: leave it out")
    if options.backend != "auto":
        raise OptionFault(
            f"--backend {options.backend} runs bundles, {folder} is a checkpoint and runs in PyTorch: leave --backend out, "
            "or export the checkpoint first"
        )
    # Imported for checkpoints only: bundles are measured where PyTorch is not installed.
    from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
    from spaceport.exporter.checkpoint_source import quiet_libraries
    from spaceport.tools.reference import checkpoint_runtime

    quiet_libraries()
    checkpoint = open_checkpoint(folder, TokenFlags(), options.remote_code, options.adapter)

    def opened() -> AbstractContextManager[Runtime]:
        return checkpoint_runtime(checkpoint, options.max_seq_len, options.threads)

    return ModelSource(folder, checkpoint.drafts.max_tokens, None, opened)


def require_storage(folder: Path, options: SourceOptions) -> Path:
    """The folder whose sar_config.json stores acceptance rates; raises for a bundle and for a GGUF file."""
    if options.adapter is not None:
        return options.adapter
    if not is_checkpoint(folder):
        raise OptionFault(
            f"--save with the bundle {folder}: expected a checkpoint, since the digests and the signature of a bundle "
            "forbid changes; measure its checkpoint or adapter with --save, and export it again"
        )
    if not folder.is_dir():
        raise OptionFault(
            f"--save with the file {folder}: expected a checkpoint folder, or --adapter with an adapter folder that stores "
            "the rates"
        )
    return folder


def is_checkpoint(folder: Path) -> bool:
    """Whether a path is a checkpoint folder or GGUF file, not a bundle."""
    if folder.suffix.lower() == ".gguf":
        return not folder.is_dir()
    return (folder / "config.json").exists() and not (folder / MANIFEST_FILE).exists()


def conversation_encoder_for(runtime: Runtime) -> ConversationEncoder:
    """The tokenization of conversations for a runtime's model, the same as in training."""
    bundle = runtime.bundle

    def rendered(turns: Sequence[Turn], ask: bool) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        return open_template(bundle).render(messages, ask)

    has_template = TEMPLATE_FILE in bundle.manifest.files
    return conversation_encoder_with(runtime.tokenizer, rendered if has_template else None, bundle.manifest.tokens)
