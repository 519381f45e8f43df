"""Audit log: what is recorded of a completion that differs from plain decoding, so that it can be reproduced."""

from __future__ import annotations

import logging
import os
import platform
import stat
from collections.abc import Iterable
from dataclasses import asdict, fields
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from spaceport import __version__
from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.backends.machine import cpu_name
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.tools.serve.comparison import Difference

MOST_BYTES = 64 << 20  # of the file
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "torch", "llguidance")
_TEXT = ("stop", "stops", "stop_token_ids", "grammar", "cache_salt", "timeout", "logprobs", "trace")

log = logging.getLogger("spaceport.service")


class AuditLog:
    """A file for the user who runs the service alone; it ends before `most` bytes."""

    def __init__(self, file: Path, most: int = MOST_BYTES) -> None:
        self._file = file
        self._most = most
        self._full = False
        try:
            os.close(self._open())
        except OSError as error:
            raise OptionFault(
                f"audit_log is {str(file)!r}: {error.strerror}: expected a file that only this user may read and write"
            ) from error

    def append(self, record: dict[str, Any]) -> None:
        """Append a record as a line of JSON, unless the file is full."""
        line = msgspec.json.encode(record) + b"\n"
        descriptor = self._open()
        with os.fdopen(descriptor, "ab") as stream:
            if os.fstat(descriptor).st_size + len(line) <= self._most:
                stream.write(line)
            elif not self._full:
                self._full = True
                log.warning("the audit log %s is full: further faults are not recorded in it", self._file)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._file, flags, 0o600)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
            os.close(descriptor)
            raise PermissionError(1, "others may read or write it, or it is no file")
        return descriptor


def fault_record(
    name: str, runtime: Runtime, decoding: Decoding, completion: Completion, differences: Iterable[Difference]
) -> dict[str, Any]:
    """What is needed to reproduce a fault, apart from what the client sent and got."""
    manifest, engine = runtime.bundle.manifest, runtime.engine
    return {
        "model": name,
        "bundle": sha256(runtime.bundle.manifest_content).hexdigest(),
        "engine": f"{type(engine).__name__} {engine.device} {manifest.signature.dtype} {manifest.signature.lowering}",
        "cpu": cpu_name(),
        "versions": {"spaceport": __version__, "python": platform.python_version(), **_versions()},
        "options": _options_of(decoding),
        "seed": completion.seed,
        "prompt_tokens": len(completion.prompt_tokens),
        "tokens": len(completion.tokens),
        "differences": [asdict(one) for one in differences],
    }


def contents_of(decoding: Decoding, completion: Completion, plain: Completion | None) -> dict[str, Any]:
    """What the client sent and got, and what plain decoding generates."""
    return {
        "prompt": completion.prompt_tokens,
        "stop": decoding.stops,
        "stop_token_ids": decoding.stop_token_ids,
        "logit_bias": {str(token): bias for token, bias in decoding.sampling.logit_bias.items()},
        "banned": sorted(decoding.sampling.banned),
        "grammar": None if decoding.grammar is None else decoding.grammar.source,
        "found": _threads_of(completion),
        "plain": None if plain is None else _threads_of(plain),
    }


def _threads_of(completion: Completion) -> list[dict[str, Any]]:
    return [
        {"path": thread.path, "fork": thread.fork, "tokens": thread.tokens, "ending": thread.ending}
        for thread in completion.threads
    ]


def _options_of(decoding: Decoding) -> dict[str, Any]:
    """The options without text and without what says something about it."""
    options = {one.name: getattr(decoding, one.name) for one in fields(decoding) if one.name not in _TEXT}
    sampling = asdict(options.pop("sampling"))
    for name in ("logit_bias", "banned"):
        sampling[name] = len(sampling[name])
    return {
        **options,
        **{name: value for name, value in sampling.items() if name != "seed"},
        "stop_strings": len(decoding.stops),
        "stop_token_ids": len(decoding.stop_token_ids),
        "grammar": decoding.grammar is not None,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
