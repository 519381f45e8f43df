"""Opener: a process that opens bundles and files as a stranger sends them, so that a crash or a hang ends it alone."""

from __future__ import annotations

import hashlib
import os
import resource
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from pathlib import Path

_MEMORY = 5 * 2**29  # bytes of address space
_PATIENCE = 120.0  # seconds of a case on a busy machine


class Opener:
    """Runs cases in a child process; starts another one after a crash or a hang."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _limit)

    def run(self, kind: str, path: Path) -> str:
        """The result of reading a file or folder: "tokens …", "read", "refused …", "untyped …", "ended" or "hang"."""
        try:
            return self._pool.submit(_result, kind, path).result(_PATIENCE)
        except (BrokenProcessPool, futures.TimeoutError) as error:
            self.close()
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), _limit)
            return "ended" if isinstance(error, BrokenProcessPool) else "hang"

    def close(self) -> None:
        """End the child process."""
        for process in active_children():
            process.kill()
        self._pool.shutdown()


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print there


def _bundle(folder: Path) -> str:
    from spaceport.runtime import Decoding, Runtime

    with Runtime.open(folder, threads=1, max_seq_len=64, step_costs="standard") as runtime:
        decoding = Decoding(max_tokens=8, fork=False, timeout=20)
        tokens = runtime.generate("import json\n", decoding).tokens
        if (runtime.bundle.path / "chat_template.jinja").exists():
            tokens += runtime.generate([{"role": "user", "content": "move( a )"}], decoding).tokens
        return f"tokens {runtime.bundle.manifest.files['model.onnx.data'].sha256[:12]} {list(tokens)}"


def _tokenizer(file: Path) -> str:
    from spaceport.graphs.contract.manifest import FileRecord, Manifest, TokenIds
    from spaceport.graphs.contract.signature import Signature
    from spaceport.runtime.bundle import Bundle
    from spaceport.runtime.opened_files import OpenedFiles
    from spaceport.runtime.text.tokenizer import decode, encode, open_tokenizer

    files = OpenedFiles(file.parent)
    content = files.first_bytes(file.name, 2**30)
    files.verify(file.name, FileRecord(sha256=hashlib.sha256(content).hexdigest(), size=len(content)))
    manifest = Manifest(Signature(1, 1, 1, 1, "float32", "scatter"), TokenIds(), 0, 1, "llama", 1, 23, "plain")
    tokenizer = open_tokenizer(Bundle(file.parent, manifest, files))
    decode(tokenizer, encode(tokenizer, "import json, Text\n" * 100, special=True))
    return "read"


def _checkpoint(file: Path) -> str:
    from spaceport.exporter.checkpoint_files import require_checkpoint
    from spaceport.exporter.sar_config import read_sar_config

    require_checkpoint(file.parent)
    read_sar_config(file.parent)
    return "read"


def _configuration(file: Path) -> str:
    from spaceport.tools.cli.configuration import content_of, options_in
    from spaceport.tools.cli.serve import command

    options_in(command, content_of(file), str(file))
    return "read"


_KINDS: dict[str, Callable[[Path], str]] = {
    "bundle": _bundle,
    "tokenizer": _tokenizer,
    "checkpoint": _checkpoint,
    "configuration": _configuration,
}


def _result(kind: str, path: Path) -> str:
    from spaceport.runtime import SpaceportError

    try:
        return _KINDS[kind](path)
    except SpaceportError as error:
        return f"refused {type(error).__name__}"
    except BaseException as error:  # noqa: BLE001  (what the campaign looks for)
        return f"untyped {type(error).__name__}: {str(error)[:200]}"
