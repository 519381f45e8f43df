"""Options: the options of `bench serve`, validated before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.tools.bench.serve.http_client import address_of
from spaceport.tools.bench.serve.workload import Workload


@dataclass(frozen=True)
class ServeOptions:
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
