"""Operations: export, build and tune as commands that write a target, and what a whole target holds."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from attack.opener import Opener
from spaceport.exporter.tensorrt.engines import find_engine
from spaceport.graphs.contract.atomic_file import is_partial
from spaceport.runtime import open_bundle
from support.killed import Commands

_LINES = 4  # texts to train on


@dataclass
class Operation(ABC):
    """A command that writes `folder/target`, with nothing else in the folder."""

    folder: Path
    checkpoint: Path
    commands: Commands
    opener: Opener

    def __post_init__(self) -> None:
        self.folder.mkdir()

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @staticmethod
    def available() -> bool:
        """Whether the packages that it needs are installed."""
        return True

    @abstractmethod
    def command(self, again: bool) -> list[str]:
        """Its arguments, or those of the run after a kill."""

    @abstractmethod
    def content(self) -> str:
        """What the target holds, or what is wrong with it; empty if it is absent."""

    def prepare(self, present: bool) -> None:
        """Keep the result of an earlier run, or remove it."""
        if not present:
            shutil.rmtree(self.target, ignore_errors=True)

    def leftovers(self) -> list[str]:
        """Files that a finished run must not leave."""
        return sorted(path.name for path in self.folder.rglob("*") if is_partial(path) or ".training" in path.name)


class Export(Operation):
    """An export that replaces a bundle."""

    def command(self, again: bool) -> list[str]:
        return ["export", str(self.checkpoint), str(self.target), "--overwrite"]

    def content(self) -> str:
        return self.opener.open(self.target) if self.target.exists() else ""


class Build(Operation):
    """A build of a TensorRT-RTX engine for another machine, which needs no GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        command = ["export", str(self.checkpoint), str(self._without_engine), "--lowering", "append"]
        if code := self.commands.run(command):
            raise RuntimeError(f"{command} ended with {code}")
        self.prepare(present=False)

    @property
    def _without_engine(self) -> Path:
        return self.folder.with_name("without-engine")

    @staticmethod
    def available() -> bool:
        return importlib.util.find_spec("tensorrt_rtx") is not None

    def command(self, again: bool) -> list[str]:
        options = {"--backend": "tensorrt-rtx", "--target": "sm89", "--max-seq-len": "64", "--max-requests": "1"}
        return ["build", str(self.target), *(part for item in options.items() for part in item), "--rebuild"]

    def content(self) -> str:
        """The output of the graph, which no build may change; engines in the manifest must be complete."""
        manifest = open_bundle(self.target).manifest
        broken = [name for name in manifest.engines if find_engine(self.target, manifest, name) is None]
        return f"incomplete engines {broken}" if broken else self.opener.open(self.target)

    def prepare(self, present: bool) -> None:
        """Keep the engine of an earlier run, or begin with a bundle that has none."""
        if not present:
            super().prepare(present)
            shutil.copytree(self._without_engine, self.target)

    def leftovers(self) -> list[str]:
        engines = {file.name for file in (self.target / "engines").iterdir()}
        return super().leftovers() + sorted(engines - set(open_bundle(self.target).manifest.engines))


class Tune(Operation):
    """A training of a few steps that saves its state in between."""

    def command(self, again: bool) -> list[str]:
        data = self.folder.with_name("data.jsonl")
        if not data.exists():
            texts = [{"text": f"import json\n\nanswer = {number}\n"} for number in range(_LINES)]
            data.write_text("".join(json.dumps(text) + "\n" for text in texts), "utf-8")
        states = self.target.with_name(self.target.name + ".training")
        resume = ["--resume"] if again and any(states.glob("step-*[0-9]")) else []
        options = ["--max-steps", "4", "--epochs", "4", "--save-every", "2", "--mask-slots", "2", "--overwrite"]
        return ["tune", str(self.checkpoint), str(self.target), str(data), *options, *resume]

    def content(self) -> str:
        """A digest of the files without measured times."""
        if not self.target.exists():
            return ""
        digest = hashlib.sha256()
        for file in sorted(self.target.iterdir()):
            digest.update(file.name.encode() + b"\0")
            if file.name not in ("metrics.jsonl", "README.md", "training.svg"):
                digest.update(file.read_bytes())
        return f"files {digest.hexdigest()[:12]}"
