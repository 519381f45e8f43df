"""Path checks: wrong paths are refused at once, before torch and other large packages are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spaceport.exporter.checkpoint_files import require_checkpoint
from spaceport.exporter.sar_config import CheckpointError
from spaceport.tools.cli.exit_codes import INPUT
from support.paths import TINY
from support.small_bundle import fill

# argv: commands in JSON. Runs each one, prints its exit code, and last which large packages were imported.
PROGRAM = """
import json, sys
from spaceport.tools.cli import run
for command in json.loads(sys.argv[1]):
    print(run(command))
    print(file=sys.stderr)
print(*(name for name in ("torch", "transformers", "accelerate", "onnxscript", "polygraphy") if name in sys.modules))
"""
MISTAKES = {
    "export missing new": "missing: no such folder: expected a checkpoint",
    "export missing.gguf new": "missing.gguf: no such file: expected a GGUF file or a checkpoint folder",
    "export no-weights new": "no weights in it: expected *.safetensors",
    "export tiny bundle": "a bundle exists there: replace it with --overwrite",
    "export tiny files --overwrite": "contains files but no bundle: choose another name",
    "export tiny missing/new": "missing: no such folder: create it first",
    "export tiny new --adapter files": "no base.json in it: expected an adapter folder",
    "tune missing new data.jsonl": "missing: no such folder: expected a checkpoint",
    "tune tiny files data.jsonl": "contains files but no checkpoint: choose another name",
    "tune tiny missing/new data.jsonl": "missing: no such folder: create it first",
    "check missing": "missing: no such folder: expected a bundle",
    "check bundle missing": "missing: no such folder: expected a checkpoint",
    "check bundle tiny --adapter files": "no base.json in it: expected an adapter folder",
    "build missing": "missing: no such folder: expected a bundle",
}
# Not even root can create a folder there.
UNWRITABLE = {"export tiny /proc/self/new": "/proc/self: no permission to write in it: choose another folder"}


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    """Wrong and right paths by name."""
    for name in ("bundle", "files", "no-weights"):
        (tmp_path / name).mkdir()
    fill(tmp_path / "bundle")
    (tmp_path / "files" / "notes").write_text("kept")
    (tmp_path / "no-weights" / "config.json").write_text("{}")
    named = {name: str(tmp_path / name) for name in ("bundle", "files", "no-weights", "new", "missing", "missing/new")}
    return {**named, "missing.gguf": str(tmp_path / "missing.gguf"), "tiny": str(TINY)}


def test_wrong_paths_are_refused_without_importing_torch(paths: dict[str, str]) -> None:
    mistakes = MISTAKES | (UNWRITABLE if sys.platform == "linux" else {})
    commands = json.dumps([[paths.get(part, part) for part in command.split()] for command in mistakes])
    done = subprocess.run([sys.executable, "-c", PROGRAM, commands], capture_output=True, text=True, check=True)
    *codes, imported = done.stdout.split("\n")[:-1]
    assert (len(codes), imported) == (len(mistakes), "")
    for (command, message), code, error in zip(mistakes.items(), codes, done.stderr.split("\n\n"), strict=False):
        assert message in error
        if not command.startswith("build"):  # without a TensorRT library, that is what it says
            assert int(code) == INPUT


@pytest.mark.parametrize("content", ["[]", "{", '{"num_hidden_layers": 1000000000}'])
def test_a_configuration_is_checked_before_transformers_reads_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: .*: expected|not valid JSON"):
        require_checkpoint(tmp_path)
