"""Ray numbers: what Ray's proxy costs compared with `spaceport serve`, and the memory of replicas.

Run `PYTHONPATH=tests python docs/drawing/ray_numbers.py BUNDLE [REPLICAS]` where spaceport[cpu,serve,ray] is installed.
Both services run at the same time and take turns; a cluster of Ray begins and ends on this machine.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import NamedTuple

from support.ray_cluster import deployed, free_port, wait_for

ROUNDS = 11
EVENTS = 64
CLIENTS = 8
_FIELDS = {"model": "demo", "prompt": "import json\n", "temperature": 0, "ignore_eos": True, "stream": True}
STREAM = json.dumps({**_FIELDS, "max_tokens": EVENTS, "disable_spec_decode": True})


class Times(NamedTuple):
    """Seconds of one round with one service."""

    short: float  # a short response
    first: float  # the first event of a stream
    stream: float  # the whole stream


def times(port: int) -> Times:
    """One round: a short response and a stream on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    short = min(_short(connection) for _ in range(5))
    begin = perf_counter()
    connection.request("POST", "/v1/completions", STREAM)
    with connection.getresponse() as response:
        response.readline()
        first = perf_counter() - begin
        response.read()
    return Times(short, first, perf_counter() - begin)


def _short(connection: http.client.HTTPConnection) -> float:
    begin = perf_counter()
    connection.request("GET", "/version")
    connection.getresponse().read()
    return perf_counter() - begin


def rate(port: int, seconds: float = 3.0) -> float:
    """Short responses per second with several clients."""
    end = monotonic() + seconds

    def send(_: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        count = 0
        while monotonic() < end:
            _short(connection)
            count += 1
        return count

    with ThreadPoolExecutor(CLIENTS) as clients:
        return sum(clients.map(send, range(CLIENTS))) / seconds


def memory(process: int) -> tuple[float, float]:
    """Megabytes that only this process has, and its share of what it has in common with others."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text("utf-8")
    sizes = {name: int(size) / 1000 for name, size in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    own = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return own, sizes["Pss"] - own


@contextmanager
def one_process(bundle: Path) -> Iterator[int]:
    """The port of `spaceport serve` with this bundle."""
    port = free_port()
    options = ["--port", str(port), "--threads", "1", "--step-costs", "standard"]
    command = [
        sys.executable,
        "-c",
        "from spaceport.tools.cli import main; main()",
        "serve",
        f"demo={bundle}",
        *options,
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: _answers(port), "the service answers")
            yield port
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False


def spread(port: int, streams: int = 64) -> None:
    """Send streams at the same time, so that each replica answers some."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(times, [port] * streams))


def main(bundle: Path, replicas: int = 2) -> None:
    """Print all figures."""
    table = {"min_replicas": replicas, "max_replicas": replicas, "num_cpus": 0.1}
    args = {"models": {"demo": str(bundle)}, "threads": 1, "step_costs": "standard", "replicas": table}
    begin = monotonic()
    with TemporaryDirectory() as folder, deployed(Path(folder), args) as cluster:
        print(f"from ray start until {replicas} replicas answer: {monotonic() - begin:.1f} s")
        with one_process(bundle) as port:
            for one in (port, cluster.port):
                spread(one)
            rounds = [(times(port), times(cluster.port)) for _ in range(ROUNDS)]
            rates = [(rate(port), rate(cluster.port)) for _ in range(3)]
        for name in Times._fields:
            alone = [getattr(one, name) for one, _ in rounds]
            more = [getattr(ray, name) - getattr(one, name) for one, ray in rounds]
            print(f"{name}: {1000 * median(alone):.2f} ms, through Ray's proxy {1000 * median(more):.2f} ms more")
        for name, found in zip(("uvicorn", "Ray's proxy"), zip(*rates, strict=True), strict=True):
            print(f"{name}, {CLIENTS} clients: {min(found):,.0f} to {max(found):,.0f} short responses per second")
        for process in cluster.replicas():
            own, shared = memory(process)
            print(f"a replica: {own:.0f} MB of its own, {shared:.0f} MB of what processes share")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
