"""Built engines: those of a bundle that run on this machine, whether they are trusted, and what they must have as inputs and outputs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import ENGINES_FOLDER, EngineRecord, Flavour
from spaceport.graphs.contract.signature import DTYPES, Signature
from spaceport.runtime.backends.private_files import append_private, read_private, state_folder
from spaceport.runtime.bundle import Bundle, BundleError
from spaceport.runtime.engine import EngineOptions
from spaceport.runtime.opened_files import AGAIN, OpenedFiles

_FILE = "built-engines"
_PROFILES = 2
# Why an engine does not fit, by property, in the order in which they are checked; `got`: the values that there are.
_REASONS = {
    "backend": "it holds no {flavour} engine: build one with {build}",
    "graph": "its {flavour} engines were built from another graph: build them again with {build}",
    "target": "its {flavour} engines are for {got}, this GPU is {target}: build one with {build} --target current",
    "version": "its engines were built with {flavour} {got}, {version} is installed: build one with {build}",
    "requests": "its engines take {got} requests at most, max_requests is {requests}: lower it, or build one with {build} "
    "--max-requests {requests}",
    "capacity": "its engines have {got} slots, {capacity} are needed: lower max_seq_len, or build one with {build} and a "
    "higher --max-seq-len",
}


class NamedEngine(NamedTuple):
    """An engine of a bundle."""

    name: str
    record: EngineRecord


def record_built_engine(sha256: str) -> bool:
    """Record that an engine was built here; returns whether that was possible."""
    if built_here(sha256):
        return True
    try:
        append_private(_file(), f"{sha256}\n".encode())
    except OSError:
        return False
    return True


def built_here(sha256: str) -> bool:
    """Whether an engine was built on this machine by this user."""
    content = read_private(_file())
    return content is not None and sha256 in content.decode("ascii", "replace").splitlines()


def _file() -> Path:
    return state_folder() / _FILE


def engine_for(
    bundle: Bundle, flavour: Flavour, version: str | None, target: str, options: EngineOptions
) -> NamedEngine:
    """The engine for this library and GPU with enough capacity; of several, the smallest.

    Without a version, engines of all versions count, so that the library need not be loaded to find out.
    """
    requests, capacity, path = options.requests, options.capacity, bundle.path
    fits: dict[str, Callable[[EngineRecord], bool]] = {
        "backend": lambda record: record.backend == flavour,
        "graph": lambda record: record.graph == bundle.manifest.graph,
        "target": lambda record: record.target == target,
        "version": lambda record: version is None or record.version == version,
        "requests": lambda record: record.requests >= requests,
        "capacity": lambda record: record.capacity >= capacity,
    }
    recorded = sorted(bundle.manifest.engines.items())
    left = [NamedEngine(name, record) for name, record in recorded if (path / ENGINES_FOLDER / name).is_file()]
    for what, reason in _REASONS.items():
        fitting = [named for named in left if fits[what](named.record)]
        if not fitting:
            reason = reason.format(
                got=", ".join(sorted({str(getattr(named.record, what)) for named in left})),
                build=f"`spaceport build {shlex.quote(str(path))} --backend {flavour}`",
                flavour=flavour,
                target=target,
                version=version,
                requests=requests,
                capacity=capacity,
            )
            raise InputFault(f"{path}: {reason}")
        left = fitting
    return min(left, key=lambda named: (named.record.capacity, named.record.requests, named.name))


def read_engine(bundle: Bundle, named: NamedEngine, trusted: bool) -> bytes:
    """The bytes of an engine, if they match the manifest and are trusted."""
    file, files = bundle.path / ENGINES_FOLDER / named.name, bundle.files or OpenedFiles(bundle.path)
    try:
        plan = files.read_recorded(f"{ENGINES_FOLDER}/{named.name}", named.record.file)
    except BundleError as error:
        raise BundleError(str(error).replace(AGAIN, "build it again with `spaceport build`")) from error
    if not trusted and not built_here(named.record.sha256):
        raise BundleError(
            f"{file}: it was not built on this machine, and an engine is code that runs: build it here with `spaceport "
            "build`, or set trust_engines=True if you trust who built it"
        )
    return plan


def check_contract(api: Any, engine: Any, signature: Signature, named: NamedEngine) -> None:
    """Raise if an engine differs from its record in the manifest, or does not update its KV buffers in place."""
    for fault in _faults(api, engine, signature, named.record.capacity):
        raise BundleError(f"engine {named.name}: {fault}: build it again with `spaceport build`")


def _faults(api: Any, engine: Any, signature: Signature, capacity: int) -> Iterator[str]:
    got = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    expected = {tensor.name for tensor in (*signature.inputs, *signature.outputs)}
    if got != expected:
        yield f"its tensors are not the contract's ({', '.join(sorted(got ^ expected)[:4])})"
    if engine.num_optimization_profiles != _PROFILES:
        yield f"it has {engine.num_optimization_profiles} profiles, {_PROFILES} are expected"
    for tensors, mode in ((signature.inputs, "INPUT"), (signature.outputs, "OUTPUT")):
        for tensor in tensors:
            name, shape = tensor.name, tuple(engine.get_tensor_shape(tensor.name))
            if engine.get_tensor_mode(name) != getattr(api.TensorIOMode, mode):
                yield f"{name} is no {mode.lower()}"
            if engine.get_tensor_location(name) != api.TensorLocation.DEVICE:
                yield f"{name} is read on the host"
            kind, dtype = engine.get_tensor_dtype(name), DTYPES[tensor.dtype].tensorrt
            if kind != getattr(api.DataType, dtype):
                yield f"{name} has the type {kind}, {dtype} is expected"
            sizes = tuple(capacity if size == "S" else -1 if isinstance(size, str) else size for size in tensor.shape)
            if shape != sizes:
                yield f"{name} has the shape {shape}, {sizes} is expected"
    for past, present in zip(signature.past, signature.present, strict=True):
        if (alias := engine.get_aliased_input_tensor(present.name)) != past.name:
            yield f"{present.name} is not written in place of {past.name} (but of {alias})"
