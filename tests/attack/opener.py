"""Opener: a process that opens bundles and generates a few tokens, so that a crash or a hang ends it alone."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_TESTS = str(Path(__file__).parents[1])
_MEMORY = 5 * 2**29  # bytes of address space
_PATIENCE = 120.0  # seconds of a case on a busy machine


class Opener:
    """Runs cases in a child process; starts another one after a crash or a hang."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def open(self, folder: Path) -> str:
        """The result of opening a bundle: "tokens …", "refused …", "untyped …", "signal …" or "hang"."""
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
            process.stdin.write(json.dumps(str(folder)) + "\n")
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


def _result(folder: str) -> str:
    from spaceport.runtime import Decoding, Runtime, SpaceportError

    try:
        with Runtime.open(folder, threads=1, max_seq_len=64, step_costs="standard") as runtime:
            decoding = Decoding(max_tokens=8, fork=False, timeout=20)
            tokens = runtime.generate("import json\n", decoding).tokens
            if (runtime.bundle.path / "chat_template.jinja").exists():
                tokens += runtime.generate([{"role": "user", "content": "move( a )"}], decoding).tokens
            return f"tokens {runtime.bundle.manifest.files['model.onnx.data'].sha256[:12]} {list(tokens)}"
    except SpaceportError as error:
        return f"refused {type(error).__name__}"
    except BaseException as error:  # noqa: BLE001  (what the campaign looks for)
        return f"untyped {type(error).__name__}: {str(error)[:200]}"


def main() -> None:
    """Open the bundles that standard input names, and print a result for each."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print there
        for line in sys.stdin:
            print(json.dumps(_result(json.loads(line))), file=results, flush=True)


if __name__ == "__main__":
    main()
