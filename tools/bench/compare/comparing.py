"""Comparing: a whole comparison, from what was asked for to its summary."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault, MissingDependency
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.bench.compare.machine import this_machine
from spaceport.tools.bench.compare.measures import Workload, measures_of
from spaceport.tools.bench.compare.setup import BUNDLES, export_bundles, set_up
from spaceport.tools.bench.compare.subjects import Absent, Peer, Subject, bundle_subjects, peer_subject
from spaceport.tools.bench.compare.summary import Comparison, summarized
from spaceport.tools.bench.compare.turns import RunOptions, measure_all
from spaceport.tools.bench.compare.work_folder import WorkFolder

Say = Callable[[str], None]


@dataclass(frozen=True)
class CompareOptions:
    """What is to be compared, and how."""

    checkpoint: Path
    work: Path
    bundles: tuple[Path, ...]  # none: those that the set-up exported
    peers: tuple[Peer, ...]
    gguf: Path | None
    workload: Workload
    threads: int
    rounds: int
    setup: bool  # whether missing environments and models are made first


def compare(options: CompareOptions, say: Say) -> Comparison:
    """Every runtime that is there, measured; the others with their reasons."""
    if not sys.platform.startswith("linux"):
        raise MissingDependency(
            f"bench compare reads CPU time and memory from /proc: expected Linux, this is {sys.platform}"
        )
    if options.gguf is not None and not options.gguf.is_file():
        raise InputFault(f"--gguf {options.gguf}: no such file: expected a GGUF file")
    work = WorkFolder(options.work, options.checkpoint)
    failed = set_up(work, options.peers, say) if options.setup else []
    if options.setup and not options.bundles:
        failed += export_bundles(work, say)
    bundles = bundle_subjects(options.bundles or exported(work))
    check_bundles(bundles, options)
    found = [
        peer_subject(peer, work, options.gguf) for peer in options.peers if peer.name not in {f.name for f in failed}
    ]
    subjects = [*bundles, *(one for one in found if isinstance(one, Subject))]
    measures = measures_of(options.workload)
    run_options = RunOptions(options.workload, measures, options.rounds, options.threads, work.logs)
    pool = measure_all(run_options, subjects, say)
    return Comparison(
        options.checkpoint.name,
        this_machine(),
        options.threads,
        options.rounds,
        options.workload,
        measures,
        summarized(pool.records, measures),
        (*failed, *(one for one in found if isinstance(one, Absent)), *pool.absent),
        pool.repeated,
    )


def exported(work: WorkFolder) -> list[Path]:
    """The bundles that a set-up has exported."""
    bundles = [path for name in BUNDLES if (path := work.model(f"spaceport-{name}")).is_dir()]
    if not bundles:
        raise InputFault(f"{work.models}: holds no bundle of {work.checkpoint.name}: give --bundle, or add --setup")
    return bundles


def check_bundles(bundles: Sequence[Subject], options: CompareOptions) -> None:
    """Refuse bundles of another checkpoint, and lengths that a bundle has no positions for."""
    layers = json.loads((options.checkpoint / "config.json").read_text("utf-8")).get("num_hidden_layers")
    length = options.workload.length
    for path in (subject.model for subject in bundles):
        manifest = open_bundle(path).manifest
        if layers not in (None, manifest.signature.layers):
            raise InputFault(
                f"{path}: has {manifest.signature.layers} layers, {options.checkpoint} has {layers}: expected a bundle of it"
            )
        if manifest.max_positions < length:
            raise InputFault(
                f"{path}: has {manifest.max_positions} positions, {length} are needed: lower --prefill or --context"
            )
