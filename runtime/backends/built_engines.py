"""Built engines: those of a bundle that run on this machine, whether they are trusted, and what they must have as inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from spaceport.graphs.contract.dtypes import DTYPES
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import ENGINES_FOLDER, EngineRecord, Flavour
from spaceport.graphs.contract.signature import Signature, Tensor
from spaceport.runtime.backends.private_files import append_private, read_private, state_folder
from spaceport.runtime.bundle import Bundle, BundleError
from spaceport.runtime.engine import EngineOptions
from spaceport.runtime.opened_files import AGAIN, OpenedFiles

_FILE = "built-engines"


def remember(sha256: str) -> bool:
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
    if not trusted and not built_here(named.record.sha256):
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


_PROFILES = 2


def check_contract(api: Any, engine: Any, signature: Signature, named: Named) -> None:
    """Raise if an engine differs from its record in the manifest, or does not update its KV buffers in place."""
    got = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    expected = {tensor.name for tensor in (*signature.inputs, *signature.outputs)}
    if got != expected:
        raise _broken(named, f"its tensors are not the contract's ({', '.join(sorted(got ^ expected)[:4])})")
    if engine.num_optimization_profiles != _PROFILES:
        raise _broken(named, f"it has {engine.num_optimization_profiles} profiles, {_PROFILES} are expected")
    for tensors, mode in ((signature.inputs, "INPUT"), (signature.outputs, "OUTPUT")):
        for tensor in tensors:
            if fault := _fault(api, engine, tensor, mode, named.record.capacity):
                raise _broken(named, f"{tensor.name} {fault}")
    for past, present in zip(signature.past, signature.present, strict=True):
        if (alias := engine.get_aliased_input_tensor(present.name)) != past.name:
            raise _broken(named, f"{present.name} is not written in place of {past.name} (but of {alias})")


def _fault(api: Any, engine: Any, tensor: Tensor, mode: str, capacity: int) -> str | None:
    if engine.get_tensor_mode(tensor.name) != getattr(api.TensorIOMode, mode):
        return f"is no {mode.lower()}"
    if engine.get_tensor_location(tensor.name) != api.TensorLocation.DEVICE:
        return "is read on the host"
    kind, expected = engine.get_tensor_dtype(tensor.name), DTYPES[tensor.dtype].tensorrt
    if kind != getattr(api.DataType, expected):
        return f"has the type {kind}, {expected} is expected"
    shape = tuple(engine.get_tensor_shape(tensor.name))
    sizes = tuple(capacity if size == "S" else -1 if isinstance(size, str) else size for size in tensor.shape)
    return None if shape == sizes else f"has the shape {shape}, {sizes} is expected"


def _broken(named: Named, fault: str) -> BundleError:
    return BundleError(f"engine {named.name}: {fault}: build it again with `spaceport build`")
