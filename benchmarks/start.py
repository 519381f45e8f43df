"""Start: how long a service takes from the start of its process to its first token."""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import click
import numpy as np

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.load_clients import (
    Address,
    Clock,
    HttpClients,
    LoadExchange,
    PlannedRequest,
    Target,
    Workload,
)
from spaceport.tools.bench.load_services import start_service, wait_for_answer
from spaceport.tools.bench.machine import (
    SPACEPORT_COMMAND,
    ProcessFailed,
    Resources,
    end_process,
    free_port,
    resources_of,
    this_machine,
)
from spaceport.tools.bench.report import Report, Table
from spaceport.tools.bench.rivals import files_of, read_files
from spaceport.tools.cli.options import PATH, json_option
from spaceport.tools.terminal.screen import size, stages

_POLL = 0.01  # seconds between two questions whether it is ready
PageCache = Literal["warm", "cold"]
_COLUMNS = (
    *("page cache", "step costs", "imports", "verify", "engine", "costs", "opening", "ready", "first token"),
    *("next", "total", "CPU", "MB"),
)


def drop_pages(folder: Path) -> None:
    """Remove all files below a folder from the page cache; raises if the system keeps a part of one."""
    for file in files_of(folder):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        if cached_share(file):
            raise OptionFault(
                f"{file}: stays in the page cache, so reading it from its disk cannot be measured: expected a file that no "
                "process has mapped, on a disk; leave cold out of --page-cache"
            )


def cached_share(file: Path) -> float:
    """The share of a file's pages that are in memory."""
    size = file.stat().st_size
    if not size:
        return 0.0
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)  # bit 0: in memory
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        library = ctypes.CDLL(None, use_errno=True)
        if library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore failed", str(file))
    return float(np.mean(pages & 1))


@dataclass(frozen=True)
class Start:
    """The seconds of a service's phases; those of several bundles are added up."""

    imports: float  # from the start of the process until it opens bundles: Python and its modules
    verify: float  # hashes of all files
    engine: float  # session of the graph
    step_costs: float  # reading or measuring the step costs
    opening: float  # from the first bundle's start until all are open, the three above included
    ready: float  # from the start of the process until /health/ready answers 200
    first_token: float  # from sending the first request to its first text
    next_token: float  # the same of the second request, for which everything has run before
    total: float  # from the start of the process to the first text
    cpu: float  # CPU seconds of the process until then, which other load on the machine hardly changes
    resident_bytes: int  # memory of the process then


@dataclass(frozen=True)
class _Answers:
    """What was seen of a service from outside."""

    ready: float  # time of day
    first: float  # seconds to the first text of the first request
    following: float  # the same of the second one
    used: Resources


def measured_start(bundles: Sequence[Path], flags: Sequence[str], prompt: str, state: Path, log: Path) -> Start:
    """Start a service with these bundles, send two requests to the first one, and end it.

    The service keeps its step costs in the folder `state`.
    """
    address = Address("127.0.0.1", free_port(), "")
    command = [*SPACEPORT_COMMAND, "serve", *map(str, bundles), "--log-format", "json", *flags]
    started = time.time()
    process = start_service(command, address.port, log, XDG_CACHE_HOME=str(state))
    try:
        answers = asyncio.run(_answers(process, address, prompt, log))
    finally:
        end_process(process)
    return _phases(entries_of(log), len(bundles), started, answers)


def entries_of(log: Path) -> list[dict[str, Any]]:
    """The entries of a log with one JSON object per line; other lines are left out."""
    found = []
    for line in log.read_text("utf-8").splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [entry for entry in found if isinstance(entry, dict)]


def _phases(entries: Sequence[Mapping[str, Any]], bundles: int, started: float, answers: _Answers) -> Start:
    begun = next(entry for entry in entries if entry["message"].startswith("opening "))
    opened = [entry for entry in entries if "engine_seconds" in entry]
    if len(opened) != bundles:
        raise ProcessFailed(f"the log of the service has {len(opened)} opened bundles: expected {bundles}")
    return Start(
        imports=_moment(begun) - started,
        verify=sum(entry["verify_seconds"] for entry in opened),
        engine=sum(entry["engine_seconds"] for entry in opened),
        step_costs=sum(entry["step_costs_seconds"] for entry in opened),
        opening=max(_moment(entry) for entry in opened) - _moment(begun),
        ready=answers.ready - started,
        first_token=answers.first,
        next_token=answers.following,
        total=answers.ready - started + answers.first,
        cpu=answers.used.cpu_seconds,
        resident_bytes=answers.used.resident_bytes,
    )


def _moment(entry: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(entry["time"]).timestamp()


async def _answers(process: subprocess.Popen[str], address: Address, prompt: str, log: Path) -> _Answers:
    """When a service was ready, its first two answers, and what it had used after the first one."""
    await wait_for_answer(address, "/health/ready", process, log, _POLL)
    ready = time.time()
    (model, *_) = (await wait_for_answer(address, "/v1/models", process, log, _POLL))["data"]
    first = await _first_text(address, model, prompt, 1)
    used = resources_of(process.pid)
    return _Answers(ready, first, await _first_text(address, model, prompt, 2), used)


async def _first_text(address: Address, model: Mapping[str, Any], prompt: str, number: int) -> float:
    """The seconds to the first event with text; no request reuses what another one has computed."""
    target = Target(address, model["id"], fields={"cache_salt": str(number)})
    message: Prompt = [{"role": "user", "content": prompt}] if model["has_chat_template"] else prompt
    exchange = LoadExchange(number, 0, "read", streamed=True)
    clients = HttpClients(target, Workload(requests=1, max_tokens=8), [message], clock := Clock())
    exchange.started = clock()
    await clients.send(0, PlannedRequest(number, 0, "read", streamed=True, events=0, gap=0.0), exchange)
    await clients.close()
    if exchange.error is not None:
        raise ProcessFailed(f"a request got status {exchange.status}: {exchange.error}")
    if exchange.first_token_seconds is None:
        raise ProcessFailed(f"the answer to {prompt!r} has no text: expected some; name another --prompt")
    return exchange.first_token_seconds


PHASES = tuple(field.name for field in fields(Start))


@dataclass(frozen=True)
class Condition:
    """What a service finds when it starts."""

    page_cache: PageCache  # whether the bundles' files are in memory
    step_costs: bool  # whether the step costs of this machine are stored


@dataclass(frozen=True)
class Starts:
    """All starts under one condition."""

    condition: Condition
    rounds: tuple[Start, ...]

    @property
    def medians(self) -> Start:
        """The median of each phase; phases of different rounds do not add up exactly."""
        return Start(*(median(getattr(one, name) for one in self.rounds) for name in PHASES))


def benchmark_start(
    bundles: Sequence[Path],
    flags: Sequence[str],
    prompt: str,
    page_caches: Sequence[PageCache],
    rounds: int,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """The starts of a service under each condition; conditions alternate, so that other load affects all of them."""
    weight_bytes = sum(read_manifest(bundle, allow_links=True).graph_bytes for bundle in bundles)
    if rounds < 1:
        raise OptionFault(f"rounds is {rounds}: expected at least 1")
    conditions = [Condition(cache, stored) for cache in page_caches for stored in (True, False)]
    found: dict[Condition, list[Start]] = {condition: [] for condition in conditions}
    with tempfile.TemporaryDirectory(prefix="spaceport-start-") as folder:
        stored, log = Path(folder) / "state", Path(folder) / "service.log"
        on_progress("warm-up")
        measured_start(bundles, flags, prompt, stored, log)
        for number in range(rounds):
            for condition in conditions:
                on_progress(f"round {number + 1} of {rounds}: page cache {condition.page_cache}, {_costs(condition)}")
                _prepare(bundles, condition.page_cache)
                with tempfile.TemporaryDirectory(dir=folder) as empty:
                    state = stored if condition.step_costs else Path(empty)
                    found[condition].append(measured_start(bundles, flags, prompt, state, log))
    starts = [Starts(condition, tuple(rounds)) for condition, rounds in found.items()]
    return _start_report(bundles, weight_bytes, prompt, starts)


def _start_report(bundles: Sequence[Path], weight_bytes: int, prompt: str, starts: Sequence[Starts]) -> Report:
    """The medians as a table, and all starts as data."""
    machine = this_machine()
    names = [str(bundle) for bundle in bundles]
    rows = [
        (
            one.condition.page_cache,
            "stored" if one.condition.step_costs else "measured",
            *(f"{getattr(one.medians, name):.3f}" for name in PHASES[:-1]),
            round(one.medians.resident_bytes / 1e6),
        )
        for one in starts
    ]
    setting = (
        f"{', '.join(names)} ({size(weight_bytes)}), {machine.cpu}, {machine.cores} cores; "
        f"seconds, medians of {len(starts[0].rounds)}"
    )
    data = {
        "bundles": names,
        "weight_bytes": weight_bytes,
        "machine": asdict(machine),
        "prompt": prompt,
        "starts": [{**asdict(one), "medians": asdict(one.medians)} for one in starts],
    }
    return Report((setting,), (Table("", _COLUMNS, rows),), (), data)


def _prepare(bundles: Sequence[Path], cache: PageCache) -> None:
    for bundle in bundles:
        if cache == "cold":
            drop_pages(bundle)
        else:
            read_files(bundle)


def _costs(condition: Condition) -> str:
    return "stored step costs" if condition.step_costs else "no step costs"


@click.command("start")
@click.argument("bundles", nargs=-1, required=True, type=PATH, metavar="BUNDLE…")
@click.option(
    "--page-cache",
    default="warm,cold",
    show_default=True,
    metavar="warm,cold",
    help="Whether the bundle's files are in memory when the service starts; cold = they are read from their disk.",
)
@click.option("--prompt", default="Name three colours.", show_default=True, metavar="TEXT", help="Text of a request.")
@click.option("--rounds", default=5, show_default=True, metavar="N", help="Starts under each condition.")
@click.option("--threads", default=0, metavar="N", help="CPU threads; 0 = one per core (default).")
@click.option("--max-requests", default=8, show_default=True, metavar="N", help="Requests that decode at a time.")
@click.option("--max-seq-len", type=int, metavar="N", help="Maximum context length in tokens.")
@click.option("--copy-weights", is_flag=True, help="Copy the weights into memory.")
@json_option("the report")
def command(
    bundles: tuple[Path, ...],
    page_cache: str,
    prompt: str,
    rounds: int,
    threads: int,
    max_requests: int,
    max_seq_len: int | None,
    copy_weights: bool,
    as_json: bool,
) -> None:
    """Start `spaceport serve` with each BUNDLE several times and report the medians of its phases in seconds.

    Each start is measured with and without stored step costs, which do not touch those of this user.
    """
    flags = ["--threads", str(threads), "--max-requests", str(max_requests)]
    flags += ["--copy-weights"] if copy_weights else []
    flags += [] if max_seq_len is None else ["--max-seq-len", str(max_seq_len)]
    caches = page_caches_of(page_cache)
    with stages() as on_progress:
        report = benchmark_start(bundles, flags, prompt, caches, rounds, on_progress)
    report.show(as_json)


def page_caches_of(given: str) -> Sequence[PageCache]:
    """The states of the page cache in a text such as `warm,cold`."""
    known = {name: name for name in get_args(PageCache)}
    names = given.split(",")
    if not all(name in known for name in names):
        raise OptionFault(f"--page-cache is {given!r}: expected warm, cold or warm,cold")
    return [known[name] for name in dict.fromkeys(names)]
