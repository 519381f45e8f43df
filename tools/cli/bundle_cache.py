"""Bundle cache: a checkpoint that a command runs is exported once for this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spaceport import __version__
from spaceport.exporter.atomic_folder import locked, publish, temporary_folder
from spaceport.exporter.checkpoint_files import hub_advice, is_gguf, require_checkpoint
from spaceport.graphs.contract.faults import InputFault, MissingDependency
from spaceport.graphs.contract.installation import install_command
from spaceport.graphs.contract.manifest import MANIFEST_FILE, record_of
from spaceport.runtime.backends.private_files import cache_folder, problem_of, read_private, replace_private
from spaceport.tools.terminal.screen import interruptible_stages

if TYPE_CHECKING:  # torch is imported only for an export
    from spaceport.exporter.export import ExportOptions

_EXPECTED = "expected a bundle, a checkpoint folder (config.json, weights, tokenizer) or a GGUF file"
_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "tokenizers", "safetensors")
_TEMPLATES = "additional_chat_templates"  # the only folder in a checkpoint that an export reads
_DIGESTS = "digests.json"  # of large files, by path, each with what shows that the file is still the same
_DIGEST_END = re.compile(r"-[0-9a-f]{16}$")  # of the name of a cached bundle
_LARGE = 1 << 20  # bytes; smaller files are read each time
_SETTLED = 2.0  # seconds since the last change of a file after which a later change has another time stamp


def bundles_folder() -> Path:
    """The folder of the exported bundles; deleting it is safe."""
    return cache_folder().with_name("bundles")


def bundle_at(path: Path) -> Path:
    """The bundle at a path, or the one that a checkpoint there is exported to, now or by an earlier command.

    Raises if the path has neither. A cached bundle is used again while the checkpoint's files, the versions of the
    packages are the same."""
    if path.is_dir() and os.path.lexists(path / MANIFEST_FILE):
        return path
    _refuse_other(path)
    require_checkpoint(path)
    folder = bundles_folder()
    if (problem := problem_of(folder)) is not None:
        raise InputFault(f"{problem}; exported bundles would be stored there (XDG_CACHE_HOME names another place)")
    cached = CachedBundle.of(path, folder, remembers=True)
    if not cached.exists:
        cached.export()
    click.echo(f"note: {path} runs as the bundle {cached.path}", err=True)
    return cached.path


@dataclass(frozen=True)
class CachedBundle:
    """The bundle of a checkpoint in a folder of bundles, where its name has a digest of everything that it is made from."""

    path: Path
    checkpoint: Path
    options: ExportOptions | None  # None: the default format for CPUs
    made_from: Mapping[str, object]
    store: Path | None  # file with the digests of large files

    @classmethod
    def of(
        cls, checkpoint: Path, folder: Path, options: ExportOptions | None = None, remembers: bool = False
    ) -> CachedBundle:
        """The bundle, exported or not; digests of large files are remembered in the folder, if it is private."""
        store = folder / _DIGESTS if remembers else None
        made_from = _made_from(checkpoint, options, store)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if remembers else 0o777)
        digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
        return cls(folder / f"{model_name(checkpoint)}-{digest[:16]}", checkpoint, options, made_from, store)

    @property
    def exists(self) -> bool:
        """Whether the bundle is there, complete."""
        return (self.path / MANIFEST_FILE).exists()

    def export(self) -> None:
        """Export the checkpoint, or wait for another process that does."""
        with interruptible_stages() as on_stage:
            lock = self.path.with_name(f".{self.path.name}.lock")
            lock.touch(mode=0o600)
            with locked(lock, lambda: on_stage(f"waiting for another process, which exports {self.checkpoint}")):
                if not self.exists:
                    self._export(on_stage)

    def _export(self, on_stage: Callable[[str], None]) -> None:
        on_stage(f"exporting {self.checkpoint}, once, to {self.path}")
        from spaceport.exporter.checkpoint import quiet_libraries
        from spaceport.exporter.export import ExportOptions, choose_format, export

        quiet_libraries()
        model, options = require_checkpoint(self.checkpoint), self.options
        if options is None:
            chosen, reason, _ = choose_format(model, None, "cpu")
            on_stage(reason)
            options = ExportOptions(chosen)
        with temporary_folder(self.path) as folder:
            export(model, folder / "bundle", options, on_stage=on_stage)
            if _made_from(self.checkpoint, self.options, self.store) != self.made_from:
                raise InputFault(f"{self.checkpoint}: was changed while it was exported: run the command again")
            publish(folder / "bundle", self.path)


def model_name(path: Path) -> str:
    """The name of the model in a bundle, which may be a cached one, a checkpoint folder or a GGUF file."""
    resolved = path.resolve()
    name = resolved.stem if is_gguf(resolved) else resolved.name
    return _DIGEST_END.sub("", name).removesuffix(".bundle") or name


def cached_bundles() -> list[Path]:
    """The exported bundles."""
    return sorted(file.parent for file in bundles_folder().glob(f"*/{MANIFEST_FILE}"))


def _refuse_other(path: Path) -> None:
    """Raise for a path with neither a bundle nor a checkpoint."""
    if not path.exists():
        raise InputFault(f"{path}: no such file or folder: {_EXPECTED}{hub_advice(path)}")
    if path.is_dir() and not (path / "config.json").exists():
        raise InputFault(f"{path}: no {MANIFEST_FILE} and no config.json in it: {_EXPECTED}")
    if not path.is_dir() and not (is_gguf(path) and path.is_file()):
        raise InputFault(f"{path}: is a file: {_EXPECTED}")


def _made_from(path: Path, options: ExportOptions | None, store: Path | None) -> dict[str, object]:
    """Everything that the bundle of a checkpoint depends on."""
    packages = (*_PACKAGES, "gguf") if is_gguf(path) else _PACKAGES
    made_from: dict[str, object] = {
        "versions": {"spaceport": __version__, **{package: _version(package, path) for package in packages}},
        "name": path.resolve().name,
        "files": _digests(path, store),
    }
    if options is not None:
        made_from["options"] = repr(replace(options, adapter=None))
        made_from["adapter"] = {} if options.adapter is None else _digests(options.adapter, store)
    return made_from


def _version(package: str, path: Path) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise MissingDependency(
            f"{path} is a checkpoint, and its export needs the package {package}, which is not installed: "
            f"{install_command('gguf' if is_gguf(path) else 'export')}, or export it elsewhere and copy the bundle"
        ) from error


def _digests(path: Path, store: Path | None) -> dict[str, str]:
    """The SHA-256 of each file that an export reads; those of large files that have not changed are in the store."""
    known = _remembered(store)
    files = [path] if path.is_file() else sorted([*path.iterdir(), *(path / _TEMPLATES).glob("*")])
    digests, measured = {}, dict[str, list[object]]()
    for file in files:
        if not file.is_file():
            continue
        identity, settled = _identity(file)
        entry = known.get(str(file.resolve()), [])
        if entry[:-1] == identity:
            digest = str(entry[-1])
        else:
            with file.open("rb") as stream:
                digest = record_of(stream).sha256
            if settled and _identity(file)[0] == identity:
                measured[str(file.resolve())] = [*identity, digest]
        digests[str(file.relative_to(path))] = digest
    if measured and store is not None:
        replace_private(store, json.dumps({**_remembered(store), **measured}).encode())
    return digests


def _remembered(store: Path | None) -> Mapping[str, list[object]]:
    try:
        known = json.loads(b"{}" if store is None else read_private(store) or b"{}")
    except ValueError:  # written by another version, or damaged
        return {}
    return known if isinstance(known, dict) else {}


def _identity(file: Path) -> tuple[list[object], bool]:
    """What changes with a large file, and whether another change would change it again."""
    status = file.stat()
    settled = time.time() - max(status.st_mtime, status.st_ctime) > _SETTLED and status.st_size >= _LARGE
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns], settled
