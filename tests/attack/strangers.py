"""What strangers send to a service over HTTP, each kind until its process is ended: python -m attack.strangers NAME URL."""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

COMPLETIONS = "/v1/completions"
_CONTENT = {"Content-Type": "application/json"}
_REST = 0.002  # seconds between attempts: the clients of an attack do not keep a CPU busy themselves
TEXT = "def read(path, mode):\n    for name in names:\n        print(name)\n"


class Target:
    """The address of a service."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = str(parts.hostname), int(parts.port or 80)

    def ask(self, body: object, key: str = "", path: str = COMPLETIONS, **headers: str) -> tuple[int, Any]:
        """The status and content of an answer, over a connection of its own; None as body gets the path."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {**_CONTENT, **headers, **({"Authorization": f"Bearer {key}"} if key else {})}
        try:
            connection.request("GET" if body is None else "POST", path, content, sent)
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()

    def load(self) -> dict[str, int]:
        """Running and waiting requests and KV slots of the only model."""
        _, answer = self.ask(None, path="/load")
        (load,) = answer["models"].values()
        return load  # type: ignore[no-any-return]

    def connected(self, sent: bytes = b"", buffer: int = 0) -> socket.socket:
        """A connection over which something was sent; `buffer` bytes of answers are buffered, 0: as usual."""
        client = socket.create_connection((self.host, self.port), timeout=30)
        if buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.sendall(sent)
        return client

    def posted(self, length: int, content: bytes, buffer: int = 0, path: str = COMPLETIONS) -> socket.socket:
        """A connection over which the beginning of a request with a body of this length was sent."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {length}\r\n"
        return self.connected(f"{head}Content-Type: application/json\r\n\r\n".encode() + content, buffer)


def _generated(**fields: Any) -> dict[str, Any]:
    return {"prompt": TEXT, "max_tokens": 200, "temperature": 1.0, "ignore_eos": True, **fields}


def _headers(target: Target) -> None:
    with target.connected(b"GET /health HTTP/1.1\r\nHost: localhost\r\n") as client:
        for number in range(4000):
            client.sendall(b"name-%d: %b\r\n" % (number, b"x" * 100))


def _silent(target: Target) -> None:
    held = [target.connected() for _ in range(20)]
    time.sleep(0.1)
    _HELD.extend(held)
    del _HELD[:-600]  # closes the oldest ones


_HELD: list[socket.socket] = []


def _slow_body(target: Target) -> None:
    with target.posted(4 << 20, b'{"prompt": "') as client:
        for _ in range(100):
            client.sendall(b"x" * 2000)
            time.sleep(0.1)


def _slow_reader(target: Target) -> None:
    body = json.dumps(_generated(stream=True, n=8, max_tokens=400, logprobs=5)).encode()
    with target.posted(len(body), body, buffer=2048) as client:
        for _ in range(20):
            client.recv(64)
            time.sleep(0.5)


_LARGE = b'{"prompt": "a", "max_tokens": 1, "metadata": [' + b"{}," * 1_390_000 + b"{}]}"


def _cancelled(target: Target) -> None:
    body = json.dumps(_generated(stream=True)).encode()
    with target.posted(len(body), body) as client:
        client.recv(1 << 12)


def _foreign(target: Target) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Content-Type": "text/plain"}):
        status, _ = target.ask(_generated(max_tokens=1), **headers)
        _hold(status in (421, 403, 415), f"{headers}: {status}")


def _wrong_keys(target: Target) -> None:
    """Keys that begin like a right one take as long as others."""
    times: dict[str, list[float]] = {"sk-right-and-wrong": [], "xxxxxxxxxxxxxxxxxx": []}
    for _ in range(60):
        for key, seconds in times.items():
            began = time.perf_counter()
            status, _ = target.ask({"prompt": "a"}, key)
            seconds.append(time.perf_counter() - began)
            _hold(status == 401, f"a wrong key: {status}")
    similar, other = (statistics.quantiles(seconds, n=10)[0] for seconds in times.values())
    _hold(abs(similar - other) < 0.3 * max(similar, other), f"keys take {similar * 1e3:.2f} and {other * 1e3:.2f} ms")


_PROBED: list[bool] = []


def _probed(target: Target) -> None:
    """Nothing tells whether another key has sent a prompt."""
    probe = {"prompt": QUIET_PROMPT, "max_tokens": 1, "cache_salt": f"{time.time()}" if _PROBED else ""}
    _PROBED.append(True)  # later probes would find the first one
    status, answer = target.ask(probe, "sk-other")
    _hold(status == 200, f"a probe: {status} {answer}")
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    _hold(cached == 0, f"{cached} tokens of another key are cached")


QUIET_PROMPT = TEXT * 4

# What each attack does, how many times at a time, and whether the service has keys.
STRANGERS: dict[str, tuple[Callable[[Target], object], int, bool]] = {
    "long headers": (_headers, 4, False),
    "silent sockets": (_silent, 1, False),
    "slow bodies": (_slow_body, 40, False),
    "slow readers": (_slow_reader, 8, False),
    "large bodies": (lambda target: target.ask(_LARGE), 3, False),
    "two times n=16": (lambda target: _asked(target, _generated(n=16)), 2, False),
    "eight times n=16": (lambda target: _asked(target, _generated(n=16)), 8, False),
    "15 prompts with n=16": (lambda target: _asked(target, _generated(prompt=[TEXT] * 15, n=16)), 1, False),
    "16 long prompts": (lambda target: _asked(target, _generated(prompt=_long_prompts(), max_tokens=20)), 1, False),
    "cancelled streams": (_cancelled, 4, False),
    "foreign hosts": (_foreign, 1, False),
    "wrong keys": (_wrong_keys, 1, True),
    "prefix probes": (_probed, 1, True),
}


def _long_prompts() -> list[list[int]]:
    """Prompts that begin differently each time."""
    start = time.time_ns() // 1000
    return [[5 + (start * 7 + number * 31 + place * place) % 900 for place in range(1000)] for number in range(16)]


def _asked(target: Target, body: dict[str, Any]) -> None:
    status, answer = target.ask({**body, "seed": time.time_ns() % 2**40})
    if status != 200:
        _hold(status in (429, 503), f"{status} {answer}")
        time.sleep(0.2)


def _hold(condition: bool, message: str) -> None:
    if not condition:
        print(message, flush=True)  # a promise that was broken


def main() -> None:
    """Attack until the process is ended; prints what a service must not do."""
    name, url = sys.argv[1:]
    attack, clients, _ = STRANGERS[name]
    target = Target(url)

    def repeat() -> None:
        while True:
            with suppress(OSError, http.client.HTTPException):
                attack(target)
            time.sleep(_REST)

    for _ in range(clients):
        threading.Thread(target=repeat, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
