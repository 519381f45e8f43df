"""A cluster of Ray on this machine, with a service in it that `serve run` starts from a file."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from support.paths import DEPLOY
from support.programs import free_port

_WAIT = 120.0  # seconds for anything that has to happen
_CPUS = 1  # Ray starts as many processes at once; a replica of the tests claims a tenth
_MEMORY = 100 << 20  # bytes of the object store
_ADDRESS = "127.0.0.2"  # Ray replaces 127.0.0.1 by an address that other machines reach
_BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Head:
    """A node of Ray, which is the whole cluster."""

    address: str
    metrics_port: int
    session: int  # that all its processes are in
    environment: dict[str, str]


@dataclass(frozen=True)
class Deployed:
    """A service in a cluster."""

    port: int
    head: Head

    @property
    def url(self) -> str:
        """The address of Ray's proxy."""
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def run(self, folder: Path, args: Mapping[str, Any]) -> Iterator[None]:
        """Deploy the service with these arguments; with others than before, its replicas are replaced."""
        content: dict[str, Any] = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text("utf-8"))
        content["http_options"] |= {"host": "127.0.0.1", "port": self.port}
        content["applications"][0]["args"] = dict(args)
        file = folder / "serve.yaml"
        file.write_text(yaml.safe_dump(content), "utf-8")
        with (folder / "serve.log").open("a") as stream:
            command = [_BIN / "serve", "run", "--address", self.head.address, str(file)]
            with subprocess.Popen(command, env=self.head.environment, stdout=stream, stderr=stream) as process:
                try:
                    yield
                finally:
                    process.kill()

    def get(self, path: str) -> str:
        """The text at a path."""
        return urllib.request.urlopen(f"{self.url}{path}", timeout=_WAIT).read().decode()

    def post(self, fields: Mapping[str, Any]) -> Any:
        """The response to a request for a completion."""
        address, body = f"{self.url}/v1/completions", json.dumps(fields).encode()
        return urllib.request.urlopen(urllib.request.Request(address, body), timeout=_WAIT)

    def replicas(self) -> list[int]:
        """The processes of the replicas that have opened their bundles."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                title, process = (folder / "cmdline").read_bytes(), int(folder.name)
                named = title.startswith(b"ray::ServeReplica:") and b".initialize" not in title
                if named and os.getsid(process) == self.head.session:
                    found.append(process)
        return sorted(found)

    def metrics(self) -> str:
        """What Ray exports for Prometheus."""
        address = f"http://{_ADDRESS}:{self.head.metrics_port}/metrics"
        return urllib.request.urlopen(address, timeout=_WAIT).read().decode()


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first result of a condition that is true; fails if none is."""
    end = time.monotonic() + _WAIT
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: it does not happen"
        time.sleep(0.1)
    return found


@contextmanager
def started_head(folder: Path) -> Iterator[Head]:
    """A cluster that listens on this machine only; nothing of it is sent anywhere."""
    port, metrics = free_port(), free_port()
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # a token would be written to the user's home
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # on a machine that is busy
        "RAY_worker_niceness": "0",  # Ray's default is 15
        "PYTHONWARNINGS": "ignore",
    }
    options = (
        *("--num-cpus", str(_CPUS), "--object-store-memory", str(_MEMORY), "--include-dashboard", "false"),
        *("--node-ip-address", _ADDRESS, "--port", str(port), "--ray-client-server-port", str(free_port())),
        *("--dashboard-agent-listen-port", str(free_port()), "--metrics-export-port", str(metrics)),
        *("--temp-dir", str(folder), "--disable-usage-stats"),
    )
    command = [_BIN / "ray", "start", "--head", "--block", *options]
    with (folder / "head.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: listens(_ADDRESS, port), "Ray starts")
        yield Head(f"{_ADDRESS}:{port}", metrics, process.pid, environment)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # all processes of the cluster
        process.wait()


@contextmanager
def deployed(folder: Path, args: Mapping[str, Any]) -> Iterator[Deployed]:
    """A service in a cluster of its own, all of whose replicas answer, until the end of the block."""
    with TemporaryDirectory(prefix="ray") as short, started_head(Path(short)) as head:
        service, seen = Deployed(free_port(), head), set[str]()

        def all_answer() -> bool:
            said = (folder / "serve.log").read_text("utf-8")
            assert "Traceback" not in said, said[-4000:]
            with suppress(OSError):
                seen.update(re.findall(r"^process_start_time_seconds (\S+)$", service.get("/metrics"), re.MULTILINE))
            return len(seen) == args["replicas"]["min_replicas"]

        with service.run(folder, args):
            wait_for(all_answer, "all replicas answer")
            yield service


def listens(address: str, port: int) -> bool:
    """Whether something listens on a port."""
    try:
        socket.create_connection((address, port), 1).close()
    except OSError:
        return False
    return True
