"""Work folder: the environments and converted models of a comparison, reused by later runs."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.bench.compare.pins import ENVIRONMENTS

_SAMPLES = 64  # blocks per weight file that are hashed
_BLOCK = 1 << 16
_RECORD = "spaceport-pins.json"


class Environments:
    """The virtual environments `environments/NAME` below one folder, and the logs beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def environment(self, name: str) -> Path:
        """Folder of a virtual environment."""
        return self.folder / "environments" / name

    def python(self, name: str) -> Path:
        """Python interpreter of a virtual environment."""
        return self.environment(name) / "bin" / "python"

    def installed(self, name: str) -> bool:
        """Whether the environment exists with the pinned versions."""
        record = self.environment(name) / _RECORD
        return record.is_file() and json.loads(record.read_text("utf-8")) == list(ENVIRONMENTS[name])

    def record_installed(self, name: str) -> None:
        """Record that an environment is complete."""
        (self.environment(name) / _RECORD).write_text(json.dumps(ENVIRONMENTS[name]) + "\n", "utf-8")

    @property
    def logs(self) -> Path:
        """Folder of the output of installations, conversions and workers."""
        return self.folder / "logs"


class WorkFolder(Environments):
    """Environments, and converted models in `models/CHECKPOINT-FINGERPRINT/NAME`."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        super().__init__(folder)
        if not (checkpoint / "config.json").is_file():
            raise InputFault(f"{checkpoint}: has no config.json: expected a Hugging Face checkpoint folder")
        self.checkpoint = checkpoint.absolute()

    @cached_property
    def models(self) -> Path:
        """Folder of the models converted from this checkpoint."""
        return self.folder / "models" / f"{self.checkpoint.name}-{fingerprint(self.checkpoint)[:12]}"

    def model(self, name: str) -> Path:
        """Folder of one converted model."""
        return self.models / name


def fingerprint(checkpoint: Path) -> str:
    """SHA-256 of the config and of samples of each weight file: fast, and different for every checkpoint."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for path in sorted(checkpoint.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
