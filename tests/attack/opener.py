"""Opener: a process that opens bundles and files as a stranger sends them, so that a crash or a hang ends it alone."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_TESTS = str(Path(__file__).parents[1])
_MEMORY = 5 * 2**29  # bytes of address space
_PATIENCE = 120.0  # seconds of a case on a busy machine


class Opener:
    """Runs cases in a child process; starts another one after a crash or a hang."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, kind: str, path: Path) -> str:
        """The result of reading a file or folder: "tokens …", "read", "refused …", "untyped …", "signal …" or "hang"."""
        process = self._process = self._process or subprocess.Popen(
            [sys.executable, "-m", "attack.opener"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((_TESTS, *sys.path))},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, which reading shows
            process.stdin.write(json.dumps([kind, str(path)]) + "\n")
            process.stdin.flush()
        readable, _, _ = select.select([process.stdout], [], [], _PATIENCE)
        if readable and (line := process.stdout.readline()):
            return str(json.loads(line))
        code = self.close(kill=not readable)
        return f"signal or exit {code}" if readable else "hang"

    def close(self, kill: bool = True) -> int:
        """End the child process; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if kill:
            process.kill()
        with suppress(BrokenPipeError):
            process.communicate()
        return process.returncode


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


def _result(kind: str, path: str) -> str:
    from spaceport.runtime import SpaceportError

    try:
        return _KINDS[kind](Path(path))
    except SpaceportError as error:
        return f"refused {type(error).__name__}"
    except BaseException as error:  # noqa: BLE001  (what the campaign looks for)
        return f"untyped {type(error).__name__}: {str(error)[:200]}"


def main() -> None:
    """Read what standard input names, and print a result for each."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print there
        for line in sys.stdin:
            print(json.dumps(_result(*json.loads(line))), file=results, flush=True)


if __name__ == "__main__":
    main()
