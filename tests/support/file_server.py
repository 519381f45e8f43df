"""File server: a web server of a folder that answers ranges, records what is read, and fails where a test says so."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

_ENDLESS = 2**28  # bytes of a file without end: far more than a client may read


@dataclass
class FileServer:
    """A running server, and how it behaves."""

    folder: Path
    address: str = ""
    ranges: bool = True  # whether it answers requests for ranges with ranges
    failures: list[str] = field(default_factory=list)  # of the next requests: a status, or "cut" for half an answer
    endless: str = ""  # name of a file that never ends
    drip: int = 0  # bytes that it sends at a time, with pauses of 10 ms; 0: without pauses
    moved: str = ""  # where each file is now: an address, before which an answer without end is sent
    pause: threading.Event = field(default_factory=threading.Event)  # not set: files that `held` names wait for it
    held: str = ""
    read: dict[str, int] = field(default_factory=dict)  # bytes that were sent, by name
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    """A server of a folder while the block runs."""
    found = FileServer(folder)

    class Handler(_Handler):
        files = found

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    found.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield found
    finally:
        found.pause.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Dripping(io.BufferedIOBase):
    """A stream to which a few bytes at a time are written."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._size = size

    def write(self, content: Any) -> int:
        for start in range(0, len(content), self._size):
            self._stream.write(content[start : start + self._size])
            time.sleep(0.01)
        return len(content)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: FileServer

    def do_GET(self) -> None:
        """Send a file, or the range of it that is asked for."""
        server, name = self.files, unquote(self.path).lstrip("/")
        with server.lock:
            failure = server.failures.pop(0) if server.failures else ""
        if server.drip:
            self.wfile = _Dripping(self.wfile, server.drip)
        if name == server.held:
            server.pause.wait()
        if failure.isdecimal():
            self.send_error(int(failure))
        elif server.moved or name == server.endless:
            self._send_without_end(name)
        elif not (server.folder / name).is_file():
            self.send_error(404)
        else:
            self._send(name, (server.folder / name).read_bytes(), cut=failure == "cut")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _send(self, name: str, content: bytes, cut: bool) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not self.files.ranges:
            self.send_response(200)
            part = content
        else:
            part = content[int(asked[1]) : int(asked[2]) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.close_connection = cut
        self._write(name, part[: len(part) // 2] if cut else part)

    def _send_without_end(self, name: str) -> None:
        self.send_response(302 if self.files.moved else 200)
        self.send_header("Location", f"{self.files.moved}/{name}")
        self.end_headers()
        self.close_connection = True
        while self.files.read.get(name, 0) < _ENDLESS and self._write(name, bytes(2**16)):
            pass

    def _write(self, name: str, content: bytes) -> bool:
        """Send a part of a file; returns whether the client is still there."""
        with suppress(OSError):
            self.wfile.write(content)
            with self.files.lock:
                self.files.read[name] = self.files.read.get(name, 0) + len(content)
            return True
        self.close_connection = True
        return False
