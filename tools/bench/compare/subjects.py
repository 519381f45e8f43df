"""Subjects: the runtimes under test, each with one weight format, its model files and its Python interpreter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.bench.compare.work_folder import WorkFolder

ADAPTERS = Path(__file__).parent / "adapters"
SPACEPORT = "spaceport"


@dataclass(frozen=True)
class Peer:
    """Another runtime with one weight format."""

    name: str  # name in --peers and in the tables
    environment: str  # key in pins.ENVIRONMENTS
    adapter: str  # file below adapters/
    models: tuple[str, ...]  # folders of converted models; empty: the checkpoint itself, or --gguf
    settings: str  # settings, for the tables
    options: dict[str, Any] = field(default_factory=dict)  # further options of the adapter


PEERS = (
    Peer(
        "onnxruntime-genai int4",
        "onnxruntime-genai",
        "on_genai.py",
        ("genai-int4-pruned", "genai-int4"),
        "builder's int4, accuracy level 4; prune_lm_head except for steps of several rows",
    ),
    Peer(
        "openvino-genai int8",
        "openvino-genai",
        "on_openvino.py",
        ("openvino-int8",),
        "optimum-cli --weight-format int8",
    ),
    Peer(
        "openvino-genai int4",
        "openvino-genai",
        "on_openvino.py",
        ("openvino-int4",),
        "optimum-cli --weight-format int4",
    ),
    Peer(
        "ctranslate2 int8",
        "ctranslate2",
        "on_ctranslate2.py",
        ("ctranslate2-int8",),
        "converter's int8, whole prompt in one call",
        {"compute_type": "int8"},
    ),
    Peer("transformers float32", "transformers", "on_transformers.py", (), "sdpa attention, DynamicCache"),
    Peer("llama.cpp", "llama.cpp", "on_llama_cpp.py", (), "the file of --gguf, logits of all rows"),
)


@dataclass(frozen=True)
class Subject:
    """One row of the tables: a runtime with a model, ready to start."""

    name: str
    python: Path  # Python interpreter of its environment
    adapter: Path
    model: Path
    settings: str
    options: dict[str, Any] = field(default_factory=dict)
    is_bundle: bool = False


@dataclass(frozen=True)
class Skipped:
    """A subject that is not measured."""

    name: str
    reason: str  # why, and what to do about it


def bundle_subjects(bundles: Sequence[Path]) -> list[Subject]:
    """One subject per bundle, named after its weight format."""
    subjects: list[Subject] = []
    for path in bundles:
        manifest = open_bundle(path).manifest
        weights = manifest.signature.dtype if manifest.weights == "same" else manifest.weights
        name = f"{SPACEPORT} {weights}"
        if any(subject.name == name for subject in subjects):
            name = f"{name} ({path.name})"
        if any(subject.name == name for subject in subjects):
            raise OptionFault(f"--bundle {path}: given twice, or with the same name and weights as another: rename one")
        settings = f"{path.name}, plain decoding"
        subjects.append(
            Subject(name, Path(sys.executable), ADAPTERS / "on_spaceport.py", path, settings, is_bundle=True)
        )
    return subjects


def chosen(names: str, peers: Sequence[Peer] = PEERS) -> tuple[Peer, ...]:
    """The peers in a list such as `openvino-genai int8,ctranslate2`; a runtime's name selects all its formats."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {peer.name for peer in peers} | {peer.environment for peer in peers}
    if unknown := [name for name in wanted if name not in known]:
        raise OptionFault(f"--peers names {unknown[0]!r}: expected any of {', '.join(sorted(known))}, with commas")
    return tuple(peer for peer in peers if peer.name in wanted or peer.environment in wanted)


def peer_subject(peer: Peer, work: WorkFolder, gguf: Path | None) -> Subject | Skipped:
    """The subject of a peer, or the reason why it cannot be measured."""
    reads_gguf = peer.environment == "llama.cpp"
    if reads_gguf and gguf is None:
        return Skipped(peer.name, "no GGUF file: add --gguf FILE of the same model")
    python = work.python(peer.environment)
    if not work.installed(peer.environment):
        return Skipped(peer.name, f"no environment with the versions of pins.py at {python.parent.parent}: add --setup")
    models = [work.model(name) for name in peer.models] or [gguf if reads_gguf and gguf else work.checkpoint]
    if missing := [model for model in models if not model.exists()]:
        return Skipped(peer.name, f"no converted model at {missing[0]}: add --setup")
    name = f"{peer.name} {models[0].stem.rpartition('.')[2]}" if reads_gguf else peer.name
    options = {**peer.options, **({"rows_model": str(models[1])} if len(models) > 1 else {})}
    return Subject(name, python, ADAPTERS / peer.adapter, models[0], peer.settings, options)
