"""Built engines: selects the engine of a bundle that runs on this machine, and reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import ENGINES_FOLDER, EngineRecord, Flavour
from spaceport.runtime.backends import trust
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.bundle import Bundle, BundleError
from spaceport.runtime.opened_files import AGAIN, OpenedFiles


class Named(NamedTuple):
    """An engine of a bundle."""

    name: str
    record: EngineRecord


class NoEngine(InputFault):
    """A bundle has no engine for this machine; the message says why, and how to build one."""


def engine_for(bundle: Bundle, flavour: Flavour, version: str | None, target: str, options: EngineOptions) -> Named:
    """The engine for this library and GPU with enough capacity; of several, the smallest.

    Without a version, engines of all versions count, so that the library need not be loaded to find out.
    """
    rules: tuple[tuple[Callable[[EngineRecord], bool], str], ...] = (
        (lambda record: record.backend == flavour, "backend"),
        (lambda record: record.graph == bundle.manifest.graph, "graph"),
        (lambda record: record.target == target, "target"),
        (lambda record: version is None or record.version == version, "version"),
        (lambda record: record.requests >= options.requests, "requests"),
        (lambda record: record.capacity >= options.capacity, "capacity"),
    )
    folder, recorded = bundle.path / ENGINES_FOLDER, sorted(bundle.manifest.engines.items())
    left = [Named(name, record) for name, record in recorded if (folder / name).is_file()]
    for fits, what in rules:
        fitting = [named for named in left if fits(named.record)]
        if not fitting:
            raise NoEngine(_lacking(bundle, what, left, flavour, version, target, options))
        left = fitting
    return min(left, key=lambda named: (named.record.capacity, named.record.requests, named.name))


def read_engine(bundle: Bundle, named: Named, trusted: bool) -> bytes:
    """The bytes of an engine, if they match the manifest and are trusted."""
    file, files = bundle.path / ENGINES_FOLDER / named.name, bundle.files or OpenedFiles(bundle.path)
    try:
        plan = files.read_recorded(f"{ENGINES_FOLDER}/{named.name}", named.record.file)
    except BundleError as error:
        raise BundleError(str(error).replace(AGAIN, "build it again with `spaceport build`")) from error
    if not trusted and not trust.built_here(named.record.sha256):
        raise BundleError(
            f"{file}: it was not built on this machine, and an engine is code that runs: build it here with `spaceport "
            "build`, or set trust_engines=True if you trust who built it"
        )
    return plan


def _lacking(
    bundle: Bundle,
    what: str,
    left: list[Named],
    flavour: Flavour,
    version: str | None,
    target: str,
    options: EngineOptions,
) -> str:
    """Why none of these engines fits; `what` is the first property that does not."""
    build = f"`spaceport build {_quoted(bundle.path)} --backend {flavour}`"
    got = ", ".join(sorted({str(getattr(named.record, what)) for named in left})) if what != "graph" else ""
    reasons = {
        "backend": f"it holds no {flavour} engine: build one with {build}",
        "graph": f"its {flavour} engines were built from another graph: build them again with {build}",
        "target": f"its {flavour} engines are for {got}, this GPU is {target}: build one with {build} --target current",
        "version": f"its engines were built with {flavour} {got}, {version} is installed: build one with {build}",
        "requests": f"its engines take {got} requests at most, max_requests is {options.requests}: lower it, "
        f"or build one with {build} --max-requests {options.requests}",
        "capacity": f"its engines have {got} slots, {options.capacity} are needed: lower max_seq_len, "
        f"or build one with {build} and a higher --max-seq-len",
    }
    return f"{bundle.path}: {reasons[what]}"


def _quoted(path: Path) -> str:
    text = str(path)
    return f"'{text}'" if " " in text else text
