"""Repeats a share of a model's completions without drafts while no client waits, and records those that differ."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import random
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from hashlib import sha256
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import msgspec

from spaceport import __version__
from spaceport.graphs.contract.exactness import tolerance_of
from spaceport.graphs.contract.faults import OptionFault, SpaceportError
from spaceport.graphs.contract.installation import installed_version
from spaceport.runtime.backends.machine import cpu_name
from spaceport.runtime.comparison import CompletionComparison, TokenDifference, plain_decoding
from spaceport.runtime.decode.sequence import NotANumber
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.scheduling.stream import AsyncStream
from spaceport.runtime.session import Runtime

MOST_BYTES = 64 << 20  # of the audit log
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "torch", "llguidance")
_TEXT = ("stop", "stops", "stop_token_ids", "grammar", "cache_salt", "tenant", "timeout", "logprobs", "trace")
MOST_WAITING = 1000  # completions that wait until there is capacity
MOST_WAITING_TOKENS = 1 << 20  # of these completions, prompts included: about 40 MB
_LOG_INTERVAL = 60.0  # seconds between two log entries on the coverage, at least
_INTERVAL = 0.05  # seconds between two looks at whether clients wait
_AFTER_INTERRUPTION = 0.5  # seconds until an interrupted completion is repeated: more clients may come
_UNFINISHED = ("cancelled", "deadline")  # endings of completions that plain decoding would continue

AuditResult = Literal["equal", "near_tie", "fault", "skipped"]

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


def _threads_of(completion: Completion) -> list[dict[str, Any]]:
    return [
        {"path": thread.path, "fork": thread.fork, "tokens": thread.tokens, "ending": thread.ending}
        for thread in completion.threads
    ]


def _options_of(decoding: Decoding) -> dict[str, Any]:
    """The options without text and without what says something about it."""
    options = {option.name: getattr(decoding, option.name) for option in fields(decoding) if option.name not in _TEXT}
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


def fault_record(
    name: str, runtime: Runtime, decoding: Decoding, completion: Completion, differences: Iterable[TokenDifference]
) -> dict[str, Any]:
    """What is needed to reproduce a fault, apart from what the client sent and got."""
    manifest, engine = runtime.bundle.manifest, runtime.engine
    versions = {package: found for package in _PACKAGES if (found := installed_version(package)) is not None}
    return {
        "model": name,
        "bundle": sha256(runtime.bundle.manifest_content).hexdigest(),
        "engine": f"{type(engine).__name__} {engine.device} {manifest.signature.dtype} {manifest.signature.lowering}",
        "cpu": cpu_name(),
        "versions": {"spaceport": __version__, "python": platform.python_version(), **versions},
        "options": _options_of(decoding),
        "seed": completion.seed,
        "prompt_tokens": len(completion.prompt_tokens),
        "tokens": len(completion.tokens),
        "differences": [asdict(difference) for difference in differences],
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


@dataclass(frozen=True)
class _Job:
    decoding: Decoding
    completion: Completion

    @property
    def tokens(self) -> int:
        """Number of tokens that the job keeps in memory."""
        return len(self.completion.prompt_tokens) + len(self.completion.tokens)


@dataclass(eq=False)
class CompletionAudit:
    """Repeats completions of one model, one at a time, while no client needs their KV buffers.

    Completions wait in memory, up to MOST_WAITING with MOST_WAITING_TOKENS. One that clients have interrupted is repeated
    again later.
    """

    name: str  # of the model
    runtime: Runtime
    rate: float  # share of the completions to repeat, from 0 to 1
    on_result: Callable[[AuditResult], None]  # called once for each completion of that share
    _: KW_ONLY
    file: AuditLog | None = None  # where the contents of faults are recorded
    disables_drafts: bool = False  # whether a fault switches the drafts of the model off
    is_stopping: Callable[[], bool] = lambda: False  # whether the service stops, and nothing more is repeated
    chance: Callable[[], float] = random.random
    drafts: bool = field(default=True, init=False)  # False: switched off after a fault
    _waiting: deque[_Job] = field(default_factory=deque, init=False)
    _chosen: int = field(default=0, init=False)  # completions to be compared
    _results: Counter[AuditResult] = field(default_factory=Counter, init=False)
    _logged: float = field(default=-inf, init=False)  # time of the last log entry on the coverage
    _offered: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _stream: AsyncStream | None = field(default=None, init=False)  # the completion that is repeated now
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def running(self) -> bool:
        return self._stream is not None

    @property
    def coverage(self) -> float:
        """Share of the completions to be compared that have been compared; 1 if there were none."""
        return self._compared / self._chosen if self._chosen else 1.0

    @property
    def _compared(self) -> int:
        return self._results.total() - self._results["skipped"]

    def applied_to(self, decoding: Decoding) -> Decoding:
        """The options of a request, without drafts if those are switched off."""
        return decoding if self.drafts else decoding.without_drafts()

    def offer(self, decoding: Decoding, completion: Completion) -> None:
        """Repeat this completion, if it is one of the share, as soon as there is capacity."""
        manifest = self.runtime.bundle.manifest
        drafts = decoding.draft_config(manifest.drafts, self.runtime.exactness.allows_drafts)
        drafted = drafts.mask_slots or drafts.heads or drafts.lookup
        if not drafted or completion.ending in _UNFINISHED or self.chance() >= self.rate:
            return
        self._chosen += 1
        threads = tuple(replace(thread, logprobs=()) for thread in completion.threads)
        job = _Job(decoding, replace(completion, threads=threads, logprobs=(), trace=None))  # what is compared
        tokens = job.tokens + sum(waiting.tokens for waiting in self._waiting)
        if len(self._waiting) >= MOST_WAITING or tokens > MOST_WAITING_TOKENS:
            if not self._results["skipped"]:
                waiting = len(self._waiting)
                log.warning("the audit of %s skips completions, as %d wait: lower the audit rate", self.name, waiting)
            self._report("skipped")
        else:
            self._waiting.append(job)
            self._offered.set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the completion that is repeated, and repeat no more: those that wait are skipped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._skip_waiting()
            self._log_coverage()

    async def give_way(self, requests: int) -> None:
        """Make sure that this number of requests finds the KV buffers that it would find without an audit."""
        if self._free < requests and self._stream is not None:
            self._stream.close()
            await self._ended.wait()  # the current step, which the requests would wait for as well

    async def _run(self) -> None:
        """Repeat the completions that wait, the longest first, while there is capacity."""
        while True:
            await self._offered.wait()
            if not self._waiting:
                self._offered.clear()
                if monotonic() - self._logged >= _LOG_INTERVAL:
                    self._log_coverage()
            elif self._free <= 0 or not self.runtime.status().healthy or self.is_stopping():
                await asyncio.sleep(_INTERVAL)
            else:
                await self._next(self._waiting.popleft())

    async def _next(self, job: _Job) -> None:
        """Repeat a completion; one that is interrupted waits again."""
        is_done = False
        try:
            is_done = await self._repeat(job)
        except SpaceportError as error:
            is_done = True
            self._report("skipped")
            log.info("a completion was not audited: %s", type(error).__name__)
        finally:
            if not is_done:
                self._waiting.appendleft(job)
        if not is_done:
            await asyncio.sleep(_AFTER_INTERRUPTION)

    async def _repeat(self, job: _Job) -> bool:
        """Generate a completion again without drafts and compare it; False: it was interrupted, as clients wait."""
        manifest = self.runtime.bundle.manifest
        tolerance = tolerance_of(manifest.signature.dtype, manifest.native)
        comparison = CompletionComparison(job.completion, manifest.tokens.child, tolerance)
        options = plain_decoding(job.decoding, job.completion)
        stream = self.runtime.astream(list(job.completion.prompt_tokens), options, observers=(comparison,))
        self._stream = stream
        self._ended.clear()
        task = asyncio.ensure_future(stream.completion())
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_INTERVAL)
                if self._free < 0 or self.is_stopping():
                    stream.close()
            plain = task.result()
            if plain.ending in _UNFINISHED:
                return False
            self._conclude(job, comparison.differences(plain), plain)
        except (NotANumber, OptionFault) as error:  # of plain decoding only
            reason, start = f"plain decoding failed: {type(error).__name__}", len(job.completion.prompt_tokens)
            self._conclude(job, [TokenDifference((), start, start, None, None, reason=reason)], None)
        finally:
            stream.close()
            task.cancel()
            self._stream = None
            self._ended.set()
        return True

    @property
    def _free(self) -> int:
        """KV buffers that no request has or is about to get; below 0: as many requests wait."""
        status = self.runtime.status()
        return status.max_requests - status.active_requests - status.queued_requests

    def _conclude(self, job: _Job, differences: list[TokenDifference], plain: Completion | None) -> None:
        """Report the differences of a completion from plain decoding; None: that has failed."""
        if not differences:
            self._report("equal")
        elif all(difference.near_tie for difference in differences):
            self._report("near_tie")
            for difference in differences:  # without the tokens, which are a part of the answer
                shown = f"at position {difference.position}, {difference.margin:.1e} of {difference.allowed:.1e}"
                log.info("near-tie in %s %s", self.name, shown)
        else:
            self._report("fault")
            self._record(job, differences, plain)

    def _record(self, job: _Job, differences: list[TokenDifference], plain: Completion | None) -> None:
        """Log a fault, and switch drafts off if it has that effect."""
        record = fault_record(self.name, self.runtime, job.decoding, job.completion, differences)
        log.error("exactness fault: %s", msgspec.json.encode(record).decode())
        if self.file is not None:
            try:
                self.file.append({**record, **contents_of(job.decoding, job.completion, plain)})
            except OSError as error:
                log.error("the audit log cannot be written: %s", error.strerror)
        if self.disables_drafts and self.drafts:
            self.drafts = False
            self._skip_waiting()
            log.error("drafts of %s are switched off: its output is not that of plain decoding", self.name)

    def _skip_waiting(self) -> None:
        while self._waiting:
            self._waiting.popleft()
            self._report("skipped")

    def _report(self, result: AuditResult) -> None:
        self._results[result] += 1
        self.on_result(result)

    def _log_coverage(self) -> None:
        """Log what share of the completions that were to be compared has been compared."""
        self._logged = monotonic()
        counts = f"{self._compared} of {self._chosen} completions ({self.coverage:.1%})"
        log.info("the audit of %s has compared %s, %d skipped", self.name, counts, self._results["skipped"])
