"""Comparing: a comparison of runtimes, from its options to its summary."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault, MissingDependency
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.bench.compare.machine import this_machine
from spaceport.tools.bench.compare.metrics import Workload, metrics_of
from spaceport.tools.bench.compare.setup import BUNDLES, export_bundles, set_up
from spaceport.tools.bench.compare.subjects import Peer, Skipped, Subject, bundle_subjects, peer_subject
from spaceport.tools.bench.compare.summary import Comparison, summarized
from spaceport.tools.bench.compare.work_folder import WorkFolder
from spaceport.tools.bench.compare.worker_pool import RunOptions, measure_all

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class CompareOptions:
    """What is compared, and how."""

    checkpoint: Path
    work: Path
    bundles: tuple[Path, ...]  # empty: the bundles that the setup exported
    peers: tuple[Peer, ...]
    gguf: Path | None
    workload: Workload
    threads: int
    rounds: int
    setup: bool  # create missing environments and models first


def compare(options: CompareOptions, on_progress: OnProgress) -> Comparison:
    """The measurements of every installed runtime, and the reasons why the others were skipped."""
    if not sys.platform.startswith("linux"):
        raise MissingDependency(
            f"bench compare reads CPU time and memory from /proc: expected Linux, this is {sys.platform}"
        )
    if options.gguf is not None and not options.gguf.is_file():
        raise InputFault(f"--gguf {options.gguf}: no such file: expected a GGUF file")
    work = WorkFolder(options.work, options.checkpoint)
    failed = set_up(work, options.peers, on_progress) if options.setup else []
    if options.setup and not options.bundles:
        failed += export_bundles(work, on_progress)
    bundles = bundle_subjects(options.bundles or exported_bundles(work))
    check_bundles(bundles, options)
    peers = [
        peer_subject(peer, work, options.gguf) for peer in options.peers if peer.name not in {f.name for f in failed}
    ]
    subjects = [*bundles, *(peer for peer in peers if isinstance(peer, Subject))]
    metrics = metrics_of(options.workload)
    run_options = RunOptions(options.workload, metrics, options.rounds, options.threads, work.logs)
    pool = measure_all(run_options, subjects, on_progress)
    return Comparison(
        options.checkpoint.name,
        this_machine(),
        options.threads,
        options.rounds,
        options.workload,
        metrics,
        summarized(pool.records, metrics),
        (*failed, *(peer for peer in peers if isinstance(peer, Skipped)), *pool.skipped),
        pool.repeated,
    )


def exported_bundles(work: WorkFolder) -> list[Path]:
    """The bundles that the setup has exported."""
    bundles = [path for name in BUNDLES if (path := work.model(f"spaceport-{name}")).is_dir()]
    if not bundles:
        raise InputFault(f"{work.models}: has no bundle of {work.checkpoint.name}: give --bundle, or add --setup")
    return bundles


def check_bundles(bundles: Sequence[Subject], options: CompareOptions) -> None:
    """Raise for bundles of another checkpoint, and for lengths beyond a bundle's positions."""
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
