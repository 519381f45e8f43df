"""Comparing: a whole comparison, from what was asked for to its summary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault, MissingPart
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.bench.compare.machine import this_machine
from spaceport.tools.bench.compare.measures import Workload, measures_of
from spaceport.tools.bench.compare.setup import BUNDLES, export_bundles, set_up
from spaceport.tools.bench.compare.subjects import Absent, Peer, Subject, bundle_subjects, peer_subject
from spaceport.tools.bench.compare.summary import Comparison, summarized
from spaceport.tools.bench.compare.turns import Plan, measure_all
from spaceport.tools.bench.compare.work_folder import WorkFolder

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
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


def compare(request: Request, say: Say) -> Comparison:
    """Every runtime that is there, measured; the others with their reasons."""
    if not sys.platform.startswith("linux"):
        raise MissingPart(f"bench compare reads CPU time and memory from /proc: expected Linux, this is {sys.platform}")
    if request.gguf is not None and not request.gguf.is_file():
        raise InputFault(f"--gguf {request.gguf}: no such file: expected a GGUF file")
    work = WorkFolder(request.work, request.checkpoint)
    failed = set_up(work, request.peers, say) if request.setup else []
    if request.setup and not request.bundles:
        failed += export_bundles(work, say)
    bundles = bundle_subjects(request.bundles or exported(work))
    check_lengths(bundles, request.workload)
    found = [
        peer_subject(peer, work, request.gguf) for peer in request.peers if peer.name not in {f.name for f in failed}
    ]
    subjects = [*bundles, *(one for one in found if isinstance(one, Subject))]
    measures = measures_of(request.workload)
    plan = Plan(request.workload, measures, request.rounds, request.threads, work.logs)
    session = measure_all(plan, subjects, say)
    return Comparison(
        request.checkpoint.name,
        this_machine(),
        request.threads,
        request.rounds,
        request.workload,
        measures,
        summarized(session.records, measures),
        (*failed, *(one for one in found if isinstance(one, Absent)), *session.absent),
        session.repeated,
    )


def exported(work: WorkFolder) -> list[Path]:
    """The bundles that a set-up has exported."""
    bundles = [path for name in BUNDLES if (path := work.model(f"spaceport-{name}")).is_dir()]
    if not bundles:
        raise InputFault(f"{work.models}: holds no bundle of {work.checkpoint.name}: give --bundle, or add --setup")
    return bundles


def check_lengths(bundles: Sequence[Subject], workload: Workload) -> None:
    """Refuse lengths that a bundle has no positions for."""
    for subject in bundles:
        positions = open_bundle(subject.model).manifest.max_positions
        if positions is not None and positions < workload.length:
            raise InputFault(
                f"{subject.model}: has {positions} positions, {workload.length} are needed: lower --prefill or --context"
            )
