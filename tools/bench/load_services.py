"""Services under load: started here or running already, and the runtime without HTTP in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import QueueFull
from spaceport.runtime.scheduling.stream import AsyncStream
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.http_load import Address, Target, address_of, first_model, get_json, http_sender
from spaceport.tools.bench.machine import ProcessFailed, Resources, end_process, free_port, last_lines, resources_of
from spaceport.tools.bench.workload import (
    Clock,
    LoadExchange,
    LoadRun,
    PlannedRequest,
    Send,
    Workload,
    planned,
    run_load,
)

_READY = 300.0  # seconds until a service answers
_COMMAND = [sys.executable, "-c", "import sys; from spaceport.tools.cli import run; sys.exit(run(sys.argv[1:]))"]
_EMBEDDED = [sys.executable, "-c", "from spaceport.tools.bench.load_services import main; main()"]


@asynccontextmanager
async def runtime_sender(
    runtime: Runtime, workload: Workload, prompts: Sequence[Prompt], clock: Clock
) -> AsyncGenerator[Send, None]:
    """A function that sends requests to a runtime and records what comes back."""
    decoding = load_decoding(workload)

    async def send(client: int, request: PlannedRequest, exchange: LoadExchange) -> None:
        del client
        try:
            stream = runtime.astream(prompts[request.prompt], decoding)
        except QueueFull:
            exchange.status, exchange.retry_after = 503, 1.0  # as the service answers
            return
        async with stream:
            await stream.submitted()
            exchange.status = 200
            await _read(stream, request, exchange, workload, clock)

    yield send


def load_decoding(workload: Workload) -> Decoding:
    """The decoding options of a workload's requests."""
    if workload.drafts:
        return Decoding(max_tokens=workload.max_tokens, fork=False)
    return Decoding(max_tokens=workload.max_tokens, fork=False, mask_slots=0, lookup=0)


def expected_answers(runtime: Runtime, workload: Workload, prompts: Sequence[Prompt]) -> list[tuple[list[int], str]]:
    """The tokens and the text of the answer to each prompt, generated one at a time and without the prefix cache."""
    decoding = replace(load_decoding(workload), prefix_cache=False)
    found = [runtime.generate(prompt, decoding) for prompt in prompts]
    return [(list(one.tokens), one.text) for one in found]


async def _read(
    stream: AsyncStream, request: PlannedRequest, exchange: LoadExchange, workload: Workload, clock: Clock
) -> None:
    while pieces := await stream.pieces():
        if text := "".join(piece.reading for piece in pieces):
            exchange.text += text
            exchange.text_times.append(clock())
            if request.behaviour == "slow":
                await asyncio.sleep(workload.pause)
        if request.leaves and len(exchange.text_times) >= request.events:
            return
    completion = await stream.completion()
    exchange.text, exchange.token_ids = completion.text, list(completion.tokens)
    exchange.tokens, exchange.ending = completion.statistics.tokens, completion.ending
    found = completion.statistics
    exchange.drafts = {
        "num_spec_steps": found.steps,
        "num_accepted_draft_tokens": sum(found.accepted_by_depth),
        "num_draft_tokens": sum(found.drafted_by_depth),
    }


def answer_call(runtime: Runtime, prompts: Sequence[Prompt], call: dict[str, Any]) -> dict[str, Any]:
    """The result of one call: the expected answers, or a run."""
    workload = Workload(**call["workload"])
    if call["call"] == "expected":
        return {"answers": expected_answers(runtime, workload, prompts)}
    requests = planned(workload, len(prompts), call["first"])
    run = asyncio.run(run_load(workload, requests, lambda clock: runtime_sender(runtime, workload, prompts, clock)))
    return {"exchanges": [asdict(one) for one in run.exchanges], "seconds": run.seconds}


def main() -> None:
    """Answer calls, one JSON object per line; the first line says what to open."""
    opening = json.loads(sys.stdin.readline())
    with Runtime.open(Path(opening["bundle"]), **opening["options"]) as runtime:
        _write({"device": runtime.engine.device})
        for line in sys.stdin:
            _write(answer_call(runtime, opening["prompts"], json.loads(line)))


def _write(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


class LoadSubject(Protocol):
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
            run_load(workload, requests, lambda clock: http_sender(self.target, workload, self.prompts, clock))
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
            end_process(self.process)


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
        return LoadRun([LoadExchange(**one) for one in found["exchanges"]], found["seconds"])

    def resources(self) -> Resources | None:
        """What the process holds."""
        return resources_of(self.process.pid)

    def idle(self) -> bool:
        """Whether it has no request: it answers one call at a time."""
        return True

    def close(self) -> None:
        """End the process."""
        end_process(self.process)


def start_embedded(bundle: Path, options: Mapping[str, Any], prompts: Sequence[Prompt], logs: Path) -> EmbeddedRuntime:
    """Open a bundle in a process of its own."""
    log = logs / "embedded.log"
    process = _start_process(_EMBEDDED, log, subprocess.PIPE)
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
        model = asyncio.run(first_model(address, key))
    except OSError as error:
        raise ProcessFailed(f"{url}: {error}: expected a running service") from error
    return HttpService(name, Target(address, model, key), prompts, compared)


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [] if value is None else [f"--{flag}", str(value)]


def _start_process(command: Sequence[str], log: Path, pipe: int) -> subprocess.Popen[str]:
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
    process = _start_process(command, log, subprocess.DEVNULL)
    try:
        model = asyncio.run(_ready(address, process, log))
    except BaseException:
        end_process(process)
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
            return await first_model(address, "")
        except OSError as error:
            failure = error
            await asyncio.sleep(0.1)
    raise ProcessFailed(f"not ready after {_READY:g} s: {failure}: {last_lines(log)}")
