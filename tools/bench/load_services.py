"""Services under load: started here or running already, and the runtime without HTTP in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import QueueFull
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.load_clients import (
    Address,
    BadResponse,
    Clock,
    Connection,
    HttpClients,
    LoadExchange,
    LoadRun,
    PlannedRequest,
    Target,
    Workload,
    planned,
    run_load,
)
from spaceport.tools.bench.machine import (
    SPACEPORT_COMMAND,
    ProcessFailed,
    Resources,
    end_process,
    free_port,
    last_lines,
    resources_of,
)
from spaceport.tools.bench.rivals import (
    ComparedRuntime,
    Environments,
    OnProgress,
    WorkerProcess,
    create_environment,
    open_model,
    start_worker,
)

ENVIRONMENT = "llama.cpp-server"
_READY = 600.0  # seconds until a service answers
_RUN = 86_400.0  # seconds until a run of the embedded runtime ends
_IDLE = 60.0  # seconds until the embedded runtime is idle once it is open


def address_of(url: str) -> Address:
    """The address in a URL; a path that ends in /v1 is that of the API."""
    parts = urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port or parts.query:
        raise OptionFault(f"{url!r} is no address of a service: expected http://HOST:PORT")
    return Address(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))


@dataclass(frozen=True)
class ServiceLoadOptions:
    """What is measured, and how the services are started."""

    workload: Workload  # of each run; `clients` is replaced by each of the next
    clients: tuple[int, ...] = (1, 8)
    rounds: int = 3
    sample: int | None = 40  # prompts that are used, in the order of the file; None: all
    bundle: Path | None = None  # served, embedded, and the source of the expected answers
    embedded: bool = True  # also measure the runtime without HTTP
    urls: tuple[tuple[str, str], ...] = ()  # services that run already: name and URL
    key: str = ""  # that these services ask for
    gguf: Path | None = None  # model of llama.cpp's server
    work: Path | None = None  # folder of its environment, and of logs
    setup: bool = False  # create that environment first
    threads: int = 1
    max_requests: int = 8
    queue_limit: int | None = None
    max_seq_len: int = 1024
    first_token_limit: float | None = None  # seconds; later answers do not count as goodput

    def __post_init__(self) -> None:
        if self.bundle is None and not self.urls:
            raise OptionFault("nothing to measure: expected --bundle BUNDLE, --url URL or both")
        for name in ("rounds", "sample", "threads", "max_requests", "max_seq_len"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise OptionFault(f"--{name.replace('_', '-')} is {count}: expected at least 1")
        if not self.clients or min(self.clients) < 1:
            raise OptionFault("--clients: expected numbers of at least 1, such as 1,8")
        if self.gguf is not None and not self.gguf.is_file():
            raise InputFault(f"--gguf {self.gguf}: expected a GGUF file")
        if self.gguf is not None and self.work is None:
            raise OptionFault(
                "--gguf without --work: expected the folder of llama.cpp's environment: add --work FOLDER"
            )
        if self.setup and self.gguf is None:
            raise OptionFault("--setup creates the environment of llama.cpp: add --gguf FILE, or leave it out")
        for _, url in self.urls:
            address_of(url)

    @property
    def runtime(self) -> dict[str, Any]:
        """Options of `Runtime.open` and flags of `spaceport serve`, the same for both."""
        return {
            "threads": self.threads,
            "max_requests": self.max_requests,
            "queue_limit": self.queue_limit,
            "max_seq_len": self.max_seq_len,
            "prefix_cache": True,
        }


def load_decoding(workload: Workload) -> Decoding:
    """The decoding options of a workload's requests."""
    if workload.drafts:
        return Decoding(max_tokens=workload.max_tokens, fork=False)
    return Decoding(max_tokens=workload.max_tokens, fork=False, mask_slots=0, lookup=0)


class EmbeddedRunner:
    """What the process of an embedded runtime answers: the expected answers, and runs."""

    LIBRARIES = ()
    PACKAGES = ()

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._prompts: Sequence[Prompt] = settings["prompts"]
        self._runtime = Runtime.open(Path(settings["model"]), **settings["runtime"])

    def expected(self, workload: Mapping[str, Any]) -> list[tuple[list[int], str]]:
        """Tokens and text of the answer to each prompt, generated one at a time and without the prefix cache."""
        decoding = replace(load_decoding(Workload(**workload)), prefix_cache=False)
        completions = [self._runtime.generate(prompt, decoding) for prompt in self._prompts]
        return [(list(completion.tokens), completion.text) for completion in completions]

    def run(self, workload: Mapping[str, Any], first: int) -> dict[str, Any]:
        """The exchanges of a run, the first of which has this prompt."""
        work, clock = Workload(**workload), Clock()
        requests = planned(work, len(self._prompts), first)

        async def send(client: int, request: PlannedRequest, exchange: LoadExchange) -> None:
            del client
            await self._send(request, exchange, work, clock)

        run = asyncio.run(run_load(work, requests, send, clock))
        return {"exchanges": [asdict(exchange) for exchange in run.exchanges], "seconds": run.seconds}

    async def _send(self, request: PlannedRequest, exchange: LoadExchange, workload: Workload, clock: Clock) -> None:
        try:
            stream = self._runtime.astream(self._prompts[request.prompt], load_decoding(workload))
        except QueueFull:
            exchange.status, exchange.retry_after = 503, 1.0  # as the service answers
            return
        async with stream:
            await stream.submitted()
            exchange.status = 200
            while pieces := await stream.pieces():
                if text := "".join(piece.reading for piece in pieces):
                    exchange.text += text
                    exchange.text_times.append(clock())
                    if request.behaviour == "slow":
                        await asyncio.sleep(workload.pause)
                if request.leaves and len(exchange.text_times) >= request.events:
                    return
            completion = await stream.completion()
        statistics = completion.statistics
        exchange.text, exchange.token_ids = completion.text, list(completion.tokens)
        exchange.tokens, exchange.ending = statistics.tokens, completion.ending
        exchange.drafts = {
            "num_spec_steps": statistics.steps,
            "num_accepted_draft_tokens": sum(statistics.accepted_by_depth),
            "num_draft_tokens": sum(statistics.drafted_by_depth),
        }


@dataclass
class EmbeddedRuntime:
    """A runtime inside the measuring program, in a process of its own."""

    worker: WorkerProcess
    name: str = "embedded"
    compared: bool = True  # whether its answers are those of the bundle

    def expected(self, workload: Workload) -> list[tuple[list[int], str]]:
        """The tokens and text of the answer to each prompt."""
        answers = self.worker.call("expected", {"workload": asdict(workload)})["value"]
        return [(tokens, text) for tokens, text in answers]

    def run(self, workload: Workload, first: int) -> LoadRun:
        """Answer the requests of a workload, the first of which has this prompt."""
        run = self.worker.call("run", {"workload": asdict(workload), "first": first})["value"]
        return LoadRun([LoadExchange(**exchange) for exchange in run["exchanges"]], run["seconds"])

    def resources(self) -> Resources:
        """What its process holds."""
        return self.worker.resources()

    def idle(self) -> bool:
        """Whether it has no request: it answers one call at a time."""
        return True

    def close(self) -> None:
        """End its process."""
        self.worker.close()


@dataclass
class HttpService:
    """A service with an OpenAI-compatible API."""

    name: str
    target: Target
    prompts: Sequence[Prompt]
    compared: bool  # whether its answers are those of the bundle
    process: subprocess.Popen[str] | None = None  # None: it was running already

    def run(self, workload: Workload, first: int) -> LoadRun:
        """Answer the requests of a workload over HTTP, the first of which has this prompt."""

        async def run() -> LoadRun:
            clock = Clock()
            clients = HttpClients(self.target, workload, self.prompts, clock)
            try:
                return await run_load(workload, planned(workload, len(self.prompts), first), clients.send, clock)
            finally:
                await clients.close()

        return asyncio.run(run())

    def resources(self) -> Resources | None:
        """What the process holds, if it was started here."""
        return None if self.process is None else resources_of(self.process.pid)

    def idle(self) -> bool:
        """Whether `/load` reports no request; true if the service has no such endpoint."""
        status, load = asyncio.run(get_json(self.target, "/load"))
        return status != 200 or not isinstance(load, dict) or load.get("server_load", 0) == 0

    def close(self) -> None:
        """End the process, if it was started here."""
        if self.process is not None:
            end_process(self.process)


LoadSubject = EmbeddedRuntime | HttpService


def start_embedded(bundle: Path, options: Mapping[str, Any], prompts: Sequence[Prompt], logs: Path) -> EmbeddedRuntime:
    """Open a bundle in a process of its own; the options are those of `Runtime.open`."""
    runner = f"{__file__}:{EmbeddedRunner.__name__}"
    settings = {"runtime": options, "prompts": prompts}
    subject = ComparedRuntime("embedded", Path(sys.executable), runner, bundle, "", settings, is_bundle=True)
    worker = start_worker(subject, options["threads"], logs, _RUN)
    open_model(worker, options["max_seq_len"], options["threads"], _IDLE)
    return EmbeddedRuntime(worker)


def start_spaceport(bundle: Path, options: Mapping[str, Any], prompts: Sequence[Prompt], logs: Path) -> HttpService:
    """Start `spaceport serve`; the options are those of `Runtime.open`."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    return _started("spaceport", [*SPACEPORT_COMMAND, "serve", f"model={bundle}", *flags], prompts, logs, compared=True)


def start_llama_cpp(
    python: Path, gguf: Path, threads: int, context: int, prompts: Sequence[Prompt], logs: Path
) -> HttpService:
    """Start the server of llama-cpp-python, which answers one request at a time."""
    command = [str(python), "-m", "llama_cpp.server", "--model", str(gguf), "--n_ctx", str(context)]
    command += ["--n_threads", str(threads), "--n_threads_batch", str(threads)]
    command += ["--interrupt_requests", "false", "--verbose", "false"]  # else a request ends the one before
    return _started("llama.cpp server", command, prompts, logs, compared=False)


def running_service(url: str, name: str, key: str, prompts: Sequence[Prompt], compared: bool) -> HttpService:
    """A service that is running already; its first model answers."""
    address = address_of(url)
    try:
        model = asyncio.run(first_model(address, key))
    except OSError as error:
        raise ProcessFailed(f"{url}: {error}: expected a running service") from error
    return HttpService(name, Target(address, model, key), prompts, compared)


def start_service(command: Sequence[str], port: int, log: Path, **variables: str) -> subprocess.Popen[str]:
    """The process of a service that will listen on a port of this machine."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "SPACEPORT_API_KEY": "", **variables}
    if command[0] != sys.executable:
        environment.pop("PYTHONPATH", None)
    pipe = subprocess.DEVNULL
    with log.open("w", encoding="utf-8") as errors:
        try:
            return subprocess.Popen(
                [*command, "--port", str(port)], stdin=pipe, stdout=pipe, stderr=errors, env=environment, text=True
            )
        except OSError as error:
            raise ProcessFailed(f"{command[0]}: {error.strerror}: expected an interpreter") from error


async def get_json(target: Target, path: str) -> tuple[int, Any]:
    """Status and JSON of an endpoint; the JSON is None if the body is not."""
    connection = await Connection.open(target.address)
    try:
        head = await connection.request("GET", path, headers=target.headers)
        try:
            return head.status, json.loads(await connection.body())
        except ValueError:
            return head.status, None
    finally:
        await connection.close()


async def first_model(address: Address, key: str) -> str:
    """The name of the first model of a service."""
    status, models = await get_json(Target(address, "", key), "/v1/models")
    if status != 200 or not isinstance(models, dict) or not models.get("data"):
        raise BadResponse(f"GET {address.url}/v1/models answered {status}: expected a list of models")
    return str(models["data"][0]["id"])


async def wait_for_answer(address: Address, path: str, process: subprocess.Popen[str], log: Path, pause: float) -> Any:
    """The JSON of an endpoint of a service once it answers 200, with at least one model if it lists them."""
    limit, state = monotonic() + _READY, "no answer"
    while monotonic() < limit:
        if process.poll() is not None:
            raise ProcessFailed(f"exit code {process.returncode}: {last_lines(log)}")
        try:
            status, answer = await get_json(Target(address, ""), path)
            if status == 200 and not (
                isinstance(answer, dict) and answer.get("data") == []
            ):  # []: no model is open yet
                return answer
            state = f"status {status}"
        except OSError as error:
            state = str(error)
        await asyncio.sleep(pause)
    raise ProcessFailed(f"not ready after {_READY:g} s: {state}: {last_lines(log)}")


def _started(name: str, command: Sequence[str], prompts: Sequence[Prompt], logs: Path, compared: bool) -> HttpService:
    """A service once it answers."""
    log, address = logs / f"{name.replace(' ', '-')}.log", Address("127.0.0.1", free_port(), "")
    process = start_service(command, address.port, log)
    try:
        models = asyncio.run(wait_for_answer(address, "/v1/models", process, log, 0.1))
    except BaseException:
        end_process(process)
        raise
    return HttpService(name, Target(address, str(models["data"][0]["id"])), prompts, compared, process)


@contextmanager
def open_subjects(
    options: ServiceLoadOptions, prompts: Sequence[Prompt], logs: Path, on_progress: OnProgress
) -> Iterator[list[LoadSubject]]:
    """Everything that is measured, started and ready; the embedded runtime is always the first if there is a bundle."""
    subjects: list[LoadSubject] = []
    try:
        if options.bundle is not None:
            on_progress("opening the bundle in an embedded runtime and in a service")
            subjects.append(start_embedded(options.bundle, options.runtime, prompts, logs))
            subjects.append(start_spaceport(options.bundle, options.runtime, prompts, logs))
        if options.gguf is not None:
            assert options.work is not None
            environments = Environments(options.work)
            if options.setup:
                create_environment(environments, ENVIRONMENT, on_progress)
            on_progress("opening the model in llama.cpp's server")
            python = environments.python(ENVIRONMENT)
            if not python.exists():
                raise ProcessFailed(f"{python.parent.parent}: no environment of llama.cpp's server: add --setup")
            length, threads = options.max_seq_len, options.threads
            subjects.append(start_llama_cpp(python, options.gguf, threads, length, prompts, logs))
        for name, url in options.urls:
            subjects.append(running_service(url, name, options.key, prompts, options.bundle is not None))
        yield subjects
    finally:
        for subject in subjects:
            subject.close()
