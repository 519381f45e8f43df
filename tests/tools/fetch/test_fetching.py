"""Fetching: a folder becomes a verified copy of the bundle at an address, or stays as it was."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

import pytest

from spaceport.exporter.atomic_folder import TargetError
from spaceport.exporter.bundle_manifest import sign_manifest
from spaceport.graphs.contract.ed25519 import SIGNATURE_FILE, SIGNER_FILE, new_private_key
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import (
    ACCURACY_FILE,
    DATA_FILE,
    ENGINES_FOLDER,
    MANIFEST_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
)
from spaceport.runtime.bundle import LARGEST_MANIFEST, BundleError, SignatureError, open_bundle, read_manifest
from spaceport.tools.fetch import fetching, sources
from spaceport.tools.fetch.fetching import FetchReport, fetch
from spaceport.tools.fetch.sources import FetchError
from support.paths import TESTS
from support.small_bundle import ENGINE, edit, fill, new_bundle

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


_PART = 1000  # bytes; the data file has 4,096

# argv: an address, a folder, and the maximum size of a file in bytes or 0. Fetches, and prints what came of it.
FETCH = """
import resource, signal, sys
from pathlib import Path
from spaceport.tools.fetch import fetching
from spaceport.tools.fetch.fetching import fetch
fetching.PART = 1000
if int(sys.argv[3]):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    print("unchanged" if fetch(sys.argv[1], Path(sys.argv[2]), connections=2).unchanged else "fetched")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PART", _PART)
    monkeypatch.setattr(fetching, "_PAUSES", (0.0, 0.0, 0.0))


@dataclass
class Scene:
    """A bundle, a server of it, and the folder for its copy."""

    bundle: Path
    server: FileServer
    target: Path

    def fetch(self, **options: Any) -> FetchReport:
        return fetch(self.server.address, self.target, **options)

    def refused(self, error: type[Exception], message: str, **options: Any) -> None:
        with pytest.raises(error, match=message):
            self.fetch(**options)

    @property
    def partial(self) -> Path:
        return self.target.with_name(f".{self.target.name}.fetch")

    def check_copy(self) -> None:
        """The target is a bundle with the files of the other one, and nothing is beside it."""
        manifest = open_bundle(self.target).manifest
        assert names(self.target) == {MANIFEST_FILE, *manifest.files}
        for name in names(self.target):
            assert (self.target / name).read_bytes() == (self.bundle / name).read_bytes()
        assert names(self.target.parent) == {self.target.name}

    def replace_bundle(self, content: bytes) -> None:
        """Make the bundle another version with this graph."""
        for name in names(self.bundle):
            (self.bundle / name).unlink()
        fill(self.bundle, content)

    def start(self, most: int = 0) -> subprocess.Popen[str]:
        """Fetch in another process."""
        command = [sys.executable, "-c", FETCH, self.server.address, str(self.target), str(most)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    bundle, target = new_bundle(tmp_path / "store"), tmp_path / "here" / "copy"
    target.parent.mkdir()
    with serving(bundle) as server:
        yield Scene(bundle, server, target)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_bundle_comes_whole_from_each_kind_of_address_without_other_files(scene: Scene) -> None:
    (scene.bundle / "other.bin").write_bytes(b"not of the bundle")
    (scene.bundle / ACCURACY_FILE).write_text("{}")
    for address in (str(scene.bundle), f"file://{scene.bundle}", scene.server.address):
        shutil.rmtree(scene.target, ignore_errors=True)
        report = fetch(f"{address}/", scene.target, connections=8)
        assert (report.fetched_bytes, report.reused_bytes, report.unchanged) == (report.total_bytes, 0, False)
        (scene.target / ACCURACY_FILE).unlink()
        scene.check_copy()
    assert scene.server.read.keys() == {MANIFEST_FILE, MODEL_FILE, DATA_FILE, TOKENIZER_FILE, ACCURACY_FILE}
    for wrong in ("https://", "https://user:word@host/a", "http://host/a?signed=1"):
        with pytest.raises(OptionFault, match="expected a"):
            fetch(wrong, scene.target)


@pytest.mark.parametrize("cut", [1, 1000, 4095])
def test_an_interrupted_fetch_goes_on_where_it_ended(scene: Scene, cut: int) -> None:
    size = (scene.bundle / DATA_FILE).stat().st_size
    scene.partial.mkdir()
    shutil.copy(scene.bundle / MANIFEST_FILE, scene.partial)
    (scene.partial / DATA_FILE).write_bytes((scene.bundle / DATA_FILE).read_bytes()[:cut])
    report = scene.fetch()
    assert scene.server.read[DATA_FILE] == size - cut
    assert report.reused_bytes == cut
    scene.check_copy()


@pytest.mark.parametrize("name", [MODEL_FILE, DATA_FILE])
def test_flipped_bits_and_other_sizes_are_found_and_named(scene: Scene, name: str) -> None:
    right = (scene.bundle / name).read_bytes()
    (scene.bundle / name).write_bytes(right[:5] + bytes([right[5] ^ 1]) + right[6:])
    scene.refused(FetchError, f"^{name}: sha256 is .*fetch again, or upload the bundle again")
    assert not (scene.partial / name).exists()
    (scene.bundle / name).write_bytes(right[:3])
    scene.refused(FetchError, f"^{name}: ends after 3 bytes, the manifest says {len(right)}: upload")
    (scene.bundle / name).unlink()
    scene.refused(FetchError, f"^{name}: .*404.*: the manifest lists it: upload the bundle again")
    assert not scene.target.exists()
    (scene.partial / "stray").mkdir(parents=True)
    (scene.partial / "stray" / "file").write_text("no")
    scene.replace_bundle(b"another graph, longer than the one before")
    scene.fetch()
    scene.check_copy()


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/outside", "a/../../outside", "", "a\\b", SIGNATURE_FILE, MANIFEST_FILE]
)
def test_a_manifest_cannot_name_files_outside_of_the_folder(scene: Scene, name: str) -> None:
    edit(scene.bundle, lambda entries: entries["files"].update({name: {"sha256": "0" * 64, "size": 1}}))
    with pytest.raises(BundleError if name not in (SIGNATURE_FILE, MANIFEST_FILE) else FetchError, match="manifest"):
        scene.fetch()
    assert names(scene.target.parent) == set()
    assert set(scene.server.read) == {MANIFEST_FILE}


def test_a_bundle_larger_than_the_disk_is_refused_before_it_is_read(scene: Scene) -> None:
    edit(scene.bundle, lambda entries: entries["files"][DATA_FILE].update(size=2**50))
    scene.refused(TargetError, r"MB free, the bundle needs about .*: free some space or choose another disk")
    assert set(scene.server.read) == {MANIFEST_FILE}
    assert names(scene.target.parent) == set()


@pytest.mark.parametrize("name", [MANIFEST_FILE, SIGNATURE_FILE, DATA_FILE])
def test_a_server_cannot_send_more_than_was_asked_for(scene: Scene, name: str) -> None:
    scene.server.endless = name
    scene.server.ranges = False
    expected = f"{name}: sha256" if name == DATA_FILE else f"{name}: more than"
    if name == DATA_FILE:  # one part: later parts would be refused
        fetching.PART = 2**20
    scene.refused(FetchError, expected)
    assert not scene.target.exists()
    most = {MANIFEST_FILE: LARGEST_MANIFEST, SIGNATURE_FILE: 2**10, DATA_FILE: 4096}[name]
    assert scene.server.read.get(name, 0) < most + 2**24  # buffers of the system


def test_a_full_disk_is_reported_and_the_fetch_goes_on_later(scene: Scene) -> None:
    """A limit on the size of files stands in for the disk; it is above the manifest and below the weights."""
    printed, _ = scene.start((scene.bundle / DATA_FILE).stat().st_size - 1).communicate(timeout=60)
    assert printed.startswith("OSError ")
    assert "free some space or choose another disk, then fetch again to go on where it ended" in printed
    assert str(scene.partial / DATA_FILE) in printed
    assert not scene.target.exists()
    scene.fetch()
    scene.check_copy()


def test_a_new_version_and_a_damaged_copy_fetch_changed_files_only(scene: Scene) -> None:
    scene.fetch()
    scene.replace_bundle(b"another graph")
    scene.server.read.clear()
    scene.refused(TargetError, "a bundle exists there: replace it with --overwrite")
    report = scene.fetch(overwrite=True)
    assert scene.server.read[MODEL_FILE] == report.fetched_bytes == len(b"another graph")
    assert DATA_FILE not in scene.server.read
    scene.check_copy()
    scene.server.read.clear()
    assert scene.fetch().unchanged
    assert set(scene.server.read) == {MANIFEST_FILE}
    (scene.target / DATA_FILE).write_bytes(bytes(4096))
    scene.server.read.clear()
    report = scene.fetch(overwrite=True)
    assert report.fetched_bytes == scene.server.read[DATA_FILE] == 4096
    scene.check_copy()


def test_two_processes_share_one_copy(scene: Scene) -> None:
    scene.server.held = DATA_FILE
    processes = [scene.start() for _ in range(2)]
    while not (scene.partial / TOKENIZER_FILE).exists():  # all but the data file, which the server holds back
        time.sleep(0.01)
        assert all(process.poll() is None for process in processes)
    assert not scene.target.exists()
    scene.server.pause.set()
    printed = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert sorted(printed) == ["fetched", "unchanged"]
    assert scene.server.read[DATA_FILE] == (scene.bundle / DATA_FILE).stat().st_size
    scene.check_copy()


def test_a_required_signature_is_verified_before_weights_are_read(scene: Scene, tmp_path: Path) -> None:
    key, public = new_private_key(), tmp_path / "public.pem"
    public.write_bytes(key.public.pem)
    scene.refused(SignatureError, f"^{scene.server.address}: has no signature", require_signature=public)
    sign_manifest(scene.bundle, (scene.bundle / MANIFEST_FILE).read_bytes(), new_private_key())
    scene.refused(SignatureError, "is signed with key .*, expected", require_signature=public)
    assert set(scene.server.read) == {MANIFEST_FILE, SIGNATURE_FILE, SIGNER_FILE}
    assert names(scene.target.parent) == set()
    sign_manifest(scene.bundle, (scene.bundle / MANIFEST_FILE).read_bytes(), key)
    scene.fetch(require_signature=public)
    assert open_bundle(scene.target, require_signature=public).manifest == read_manifest(scene.bundle)


def test_engines_are_fetched_on_request(scene: Scene) -> None:
    (scene.bundle / ENGINES_FOLDER).mkdir()
    (scene.bundle / ENGINES_FOLDER / ENGINE).write_bytes(b"engine")
    scene.fetch()
    assert ENGINES_FOLDER not in names(scene.target)
    message = f"^{ENGINES_FOLDER}/{ENGINE}: ends after 6 bytes, the manifest says 7"
    scene.refused(FetchError, message, overwrite=True, engines=True)
    assert not (scene.target / ENGINES_FOLDER).exists()


def test_a_server_that_fails_for_a_moment_is_asked_again_but_not_one_that_refuses(scene: Scene) -> None:
    scene.server.failures += ["503", "cut", "429"]
    scene.fetch(connections=1)
    scene.check_copy()
    shutil.rmtree(scene.target)
    scene.server.failures += ["500"] * 4
    scene.refused(FetchError, f"{MANIFEST_FILE}: .*500.*: tried 4 times; fetch again")
    for status in ("401", "403"):
        scene.server.failures.append(status)
        scene.refused(FetchError, f"{MANIFEST_FILE}: .*{status}.*: expected credentials that may read it")


def test_a_server_that_is_not_there_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_PAUSES", ())
    with pytest.raises(
        FetchError, match=rf"^{MANIFEST_FILE}: http://127.0.0.1:1/{MANIFEST_FILE}: .*Connection refused: tr"
    ):
        fetch("http://127.0.0.1:1", scene.target)


def test_a_server_that_sends_too_slowly_is_given_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_WINDOW", 0.2)
    scene.server.drip = 100  # more than 1024 bytes per second
    scene.fetch()
    shutil.rmtree(scene.target)
    scene.server.drip = 1
    expected = (
        r"^manifest.json: \d+ bytes came in 0 s: expected at least 1024 bytes per second: tried 4 times; fetch again"
    )
    scene.refused(FetchError, expected)


def test_redirects_lead_to_http_and_https_alone_and_their_answers_are_not_read(scene: Scene) -> None:
    with serving(scene.bundle) as other:
        scene.server.moved = other.address
        scene.fetch()
    scene.check_copy()
    assert sum(scene.server.read.values()) < 2**26  # buffers of the system
    shutil.rmtree(scene.target)
    scene.server.moved = "ftp://127.0.0.1"
    scene.refused(FetchError, "is redirected to ftp://127.0.0.1/manifest.json: expected .* stays with http or https$")


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
def test_redirects_do_not_leave_https(scheme: str) -> None:
    request = urllib.request.Request(f"{scheme}://host/a")
    redirect = partial(sources._SecureRedirects().redirect_request, request, io.BytesIO(), 302, "", HTTPMessage())
    assert redirect("https://other/a") is not None
    for address in ("http://host/a", "ftp://host/a"):
        with pytest.raises(FetchError, match=f"is redirected to {address}: expected an address that stays with https$"):
            redirect(address)


def test_a_server_without_ranges_is_refused_for_large_files(scene: Scene) -> None:
    scene.server.ranges = False
    scene.refused(FetchError, "sends the whole file instead of a range: expected one that answers")
    shutil.rmtree(scene.partial)
    fetching.PART = 2**20
    scene.fetch()
    scene.check_copy()


def test_a_folder_that_is_no_bundle_is_kept_and_one_that_others_may_write_to_is_refused(scene: Scene) -> None:
    scene.target.mkdir()
    (scene.target / "notes").write_text("mine")
    with pytest.raises(TargetError, match="contains files but no bundle"):
        fetch(str(scene.bundle), scene.target, overwrite=True)
    assert names(scene.target) == {"notes"}
    shutil.rmtree(scene.target)
    scene.partial.mkdir()
    scene.partial.chmod(0o777)
    with pytest.raises(FetchError, match=r"other users may write to it: .*remove it, or choose another folder"):
        fetch(str(scene.bundle), scene.target)


def test_a_partial_folder_that_another_process_publishes_meanwhile_is_begun_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = iter([True])

    def published(folder: Path) -> None:
        if next(moved, False):
            folder.rename(scene.target)  # another process had it, and has just completed it

    monkeypatch.setattr(fetching, "problem_of", published)
    assert not fetch(str(scene.bundle), scene.target).unchanged
    scene.check_copy()
