"""Subjects: what answers the requests: services, started here or running already, and an embedded runtime."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.serve.exchange import Exchange
from spaceport.tools.bench.serve.http_client import Address, address_of
from spaceport.tools.bench.serve.http_load import Target, get_json, model_of, sender
from spaceport.tools.bench.serve.load_run import LoadRun, run_load
from spaceport.tools.bench.serve.processes import ProcessFailed, Resources, end, free_port, last_lines, resources_of
from spaceport.tools.bench.serve.workload import Workload, planned

_READY = 300.0  # seconds until a service answers
_COMMAND = [sys.executable, "-c", "import sys; from spaceport.tools.cli import run; sys.exit(run(sys.argv[1:]))"]
_EMBEDDED = [sys.executable, "-c", "from spaceport.tools.bench.serve.embedded import main; main()"]


class Subject(Protocol):
    """Something that answers the requests of a run."""

    name: str
    compared: bool  # whether its answers are those of the bundle

    def run(self, workload: Workload, first: int) -> LoadRun:
        """Answer the requests of a workload, the first of which has this prompt."""

    def resources(self) -> Resources | None:
        """What its process holds; None if that is unknown."""

    def idle(self) -> bool:
        """Whether it has no request, as far as it reports that."""

    def close(self) -> None:
        """End its process."""


@dataclass
class HttpService:
    """A service with an OpenAI-compatible API."""

    name: str
    target: Target
    prompts: Sequence[Prompt]
    compared: bool
    process: subprocess.Popen[str] | None = None  # None: it was running already

    def run(self, workload: Workload, first: int) -> LoadRun:
        """Answer the requests of a workload over HTTP."""
        requests = planned(workload, len(self.prompts), first)
        return asyncio.run(
            run_load(workload, requests, lambda clock: sender(self.target, workload, self.prompts, clock))
        )

    def resources(self) -> Resources | None:
        """What the process holds, if it was started here."""
        return None if self.process is None else resources_of(self.process.pid)

    def idle(self) -> bool:
        """Whether `/load` reports no request; true if the service has no such endpoint."""
        status, found = asyncio.run(get_json(self.target, "/load"))
        return status != 200 or not isinstance(found, dict) or found.get("server_load", 0) == 0

    def close(self) -> None:
        """End the process, if it was started here."""
        if self.process is not None:
            end(self.process)


@dataclass
class EmbeddedRuntime:
    """A runtime inside the measuring program, in a process of its own."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    compared: bool = True

    def call(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The result of one call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(content) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise ProcessFailed(f"the embedded runtime has ended: {last_lines(self.log)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def expected(self, workload: Workload) -> list[tuple[list[int], str]]:
        """The tokens and text of the answer to each prompt."""
        answers = self.call({"call": "expected", "workload": asdict(workload)})["answers"]
        return [(tokens, text) for tokens, text in answers]

    def run(self, workload: Workload, first: int) -> LoadRun:
        """Answer the requests of a workload in the process of the runtime."""
        found = self.call({"call": "run", "workload": asdict(workload), "first": first})
        return LoadRun([Exchange(**one) for one in found["exchanges"]], found["seconds"])

    def resources(self) -> Resources | None:
        """What the process holds."""
        return resources_of(self.process.pid)

    def idle(self) -> bool:
        """Whether it has no request: it answers one call at a time."""
        return True

    def close(self) -> None:
        """End the process."""
        end(self.process)


def start_embedded(bundle: Path, options: Mapping[str, Any], prompts: Sequence[Prompt], logs: Path) -> EmbeddedRuntime:
    """Open a bundle in a process of its own."""
    log = logs / "embedded.log"
    process = _start(_EMBEDDED, log, subprocess.PIPE)
    found = EmbeddedRuntime("embedded", process, log)
    found.call({"bundle": str(bundle), "options": options, "prompts": prompts})
    return found


def start_spaceport(bundle: Path, options: Mapping[str, Any], prompts: Sequence[Prompt], logs: Path) -> HttpService:
    """Start `spaceport serve`; the options are those of `Runtime.open`."""
    port = free_port()
    flags = [part for name, value in options.items() for part in _flag(name, value)]
    command = [*_COMMAND, "serve", f"model={bundle}", "--port", str(port), *flags]
    return _started("spaceport", command, Address("127.0.0.1", port, ""), prompts, logs, compared=True)


def start_llama_cpp(
    python: Path, gguf: Path, threads: int, context: int, prompts: Sequence[Prompt], logs: Path
) -> HttpService:
    """Start the server of llama-cpp-python, which answers one request at a time."""
    port = free_port()
    command = [str(python), "-m", "llama_cpp.server", "--model", str(gguf), "--port", str(port)]
    command += ["--n_ctx", str(context), "--n_threads", str(threads), "--n_threads_batch", str(threads)]
    command += ["--interrupt_requests", "false", "--verbose", "false"]  # else a request ends the one before
    return _started("llama.cpp server", command, Address("127.0.0.1", port, ""), prompts, logs, compared=False)


def running_service(url: str, name: str, key: str, prompts: Sequence[Prompt], compared: bool) -> HttpService:
    """A service that is running already; its first model answers."""
    address = address_of(url)
    try:
        model = asyncio.run(model_of(address, key))
    except OSError as error:
        raise ProcessFailed(f"{url}: {error}: expected a running service") from error
    return HttpService(name, Target(address, model, key), prompts, compared)


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [] if value is None else [f"--{flag}", str(value)]


def _start(command: Sequence[str], log: Path, pipe: int) -> subprocess.Popen[str]:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "SPACEPORT_API_KEY": ""}
    if command[0] != sys.executable:
        environment.pop("PYTHONPATH", None)
    with log.open("w", encoding="utf-8") as errors:
        try:
            return subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, text=True, bufsize=1
            )
        except OSError as error:
            raise ProcessFailed(f"{command[0]}: {error.strerror}: expected an interpreter") from error


def _started(
    name: str, command: Sequence[str], address: Address, prompts: Sequence[Prompt], logs: Path, compared: bool
) -> HttpService:
    """A service once it answers."""
    log = logs / f"{name.replace(' ', '-')}.log"
    process = _start(command, log, subprocess.DEVNULL)
    try:
        model = asyncio.run(_ready(address, process, log))
    except BaseException:
        end(process)
        raise
    return HttpService(name, Target(address, model), prompts, compared, process)


async def _ready(address: Address, process: subprocess.Popen[str], log: Path) -> str:
    """The model of a service once it is ready."""
    limit = monotonic() + _READY
    failure: Exception | None = None
    while monotonic() < limit:
        if process.poll() is not None:
            raise ProcessFailed(f"exit code {process.returncode}: {last_lines(log)}")
        try:
            return await model_of(address, "")
        except OSError as error:
            failure = error
            await asyncio.sleep(0.1)
    raise ProcessFailed(f"not ready after {_READY:g} s: {failure}: {last_lines(log)}")
