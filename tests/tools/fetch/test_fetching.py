"""Fetching: a folder becomes a verified copy of the bundle at an address, or stays as it was."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spaceport.exporter.atomic_folder import TargetError
from spaceport.exporter.signing import sign_manifest
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
from spaceport.tools.fetch import partial_folder, transfer
from spaceport.tools.fetch.fetching import fetch
from spaceport.tools.fetch.sources import FetchError
from support.file_server import FileServer, serving
from support.paths import TESTS
from support.small_bundle import ENGINE, edit, fill, new_bundle

_PART = 1000  # bytes; the data file has 4,096

# argv: an address, a folder, and the maximum size of a file in bytes or 0. Fetches, and prints what came of it.
FETCH = """
import resource, signal, sys
from pathlib import Path
from spaceport.tools.fetch import transfer
from spaceport.tools.fetch.fetching import fetch
transfer.PART = 1000
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
    monkeypatch.setattr(transfer, "PART", _PART)
    monkeypatch.setattr(transfer, "_PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return new_bundle(tmp_path / "store")


@pytest.fixture
def server(bundle: Path) -> Iterator[FileServer]:
    with serving(bundle) as found:
        yield found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder / "copy"


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.fetch")


def assert_copy(target: Path, bundle: Path) -> None:
    """The target is a bundle with the files of the other one, and nothing is beside it."""
    manifest = open_bundle(target).manifest
    assert names(target) == {MANIFEST_FILE, *manifest.files}
    for name in names(target):
        assert (target / name).read_bytes() == (bundle / name).read_bytes()
    assert names(target.parent) == {target.name}


def start(address: str, target: Path, most: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FETCH, address, str(target), str(most)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS)


def wait_for_tokenizer(target: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a process has fetched all but the data file, which the server holds back."""
    while not (partial_of(target) / TOKENIZER_FILE).exists():
        time.sleep(0.01)
        assert process.poll() is None


def replace_bundle(bundle: Path, content: bytes) -> None:
    """Make a bundle another version with this graph."""
    for name in names(bundle):
        (bundle / name).unlink()
    fill(bundle, content)


@pytest.mark.parametrize("kind", ["folder", "http", "file"])
def test_a_bundle_comes_whole_from_each_kind_of_address_without_other_files(
    bundle: Path, server: FileServer, target: Path, kind: str
) -> None:
    (bundle / "other.bin").write_bytes(b"not of the bundle")
    (bundle / ACCURACY_FILE).write_text("{}")
    address = {"folder": str(bundle), "http": server.address, "file": f"file://{bundle}"}[kind]
    for connections in (1, 8):
        shutil.rmtree(target, ignore_errors=True)
        report = fetch(f"{address}/", target, connections=connections)
        assert (report.fetched_bytes, report.reused_bytes, report.unchanged) == (report.total_bytes, 0, False)
        assert names(target) == {MANIFEST_FILE, MODEL_FILE, DATA_FILE, TOKENIZER_FILE, ACCURACY_FILE}
        (target / ACCURACY_FILE).unlink()
        assert_copy(target, bundle)
    assert set(server.read) <= {MANIFEST_FILE, MODEL_FILE, DATA_FILE, TOKENIZER_FILE, ACCURACY_FILE}


@pytest.mark.parametrize("cut", [1, 999, 1000, 2500, 4095])
def test_an_interrupted_fetch_goes_on_where_it_ended(bundle: Path, server: FileServer, target: Path, cut: int) -> None:
    size = (bundle / DATA_FILE).stat().st_size
    (target.parent / "partial").mkdir()
    partial = (target.parent / "partial").rename(partial_of(target))
    shutil.copy(bundle / MANIFEST_FILE, partial)
    (partial / DATA_FILE).write_bytes((bundle / DATA_FILE).read_bytes()[:cut])
    report = fetch(server.address, target)
    assert server.read[DATA_FILE] == size - cut
    assert report.reused_bytes == cut
    assert_copy(target, bundle)


def test_a_killed_fetch_leaves_the_earlier_bundle_and_goes_on_later(
    bundle: Path, server: FileServer, target: Path
) -> None:
    server.held = DATA_FILE
    process = start(server.address, target)
    wait_for_tokenizer(target, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not target.exists()
    server.pause.set()
    before = server.read[TOKENIZER_FILE]
    fetch(server.address, target)
    assert server.read[MODEL_FILE] == (bundle / MODEL_FILE).stat().st_size  # once: it had been complete
    assert server.read[TOKENIZER_FILE] >= before
    assert_copy(target, bundle)


@pytest.mark.parametrize("name", [MODEL_FILE, DATA_FILE])
def test_a_flipped_bit_is_found_and_named(bundle: Path, server: FileServer, target: Path, name: str) -> None:
    content = bytearray((bundle / name).read_bytes())
    right = bytes(content)
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    with pytest.raises(FetchError, match=f"^{name}: sha256 is .*fetch again, or upload the bundle again"):
        fetch(server.address, target)
    assert not target.exists()
    assert not (partial_of(target) / name).exists()
    (bundle / name).write_bytes(right)
    fetch(server.address, target)
    assert_copy(target, bundle)


def test_a_file_of_another_size_is_found_and_named(bundle: Path, server: FileServer, target: Path) -> None:
    with (bundle / DATA_FILE).open("ab") as stream:
        stream.truncate(700)
    with pytest.raises(FetchError, match=f"^{DATA_FILE}: ends after 700 bytes, the manifest says 4096: upload"):
        fetch(server.address, target)
    (bundle / DATA_FILE).unlink()
    with pytest.raises(FetchError, match=f"^{DATA_FILE}: .*404.*: the manifest lists it: upload the bundle again"):
        fetch(server.address, target)
    assert not target.exists()


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/outside", "a/../../outside", "", "a\\b", SIGNATURE_FILE, MANIFEST_FILE]
)
def test_a_manifest_cannot_name_files_outside_of_the_folder(
    bundle: Path, server: FileServer, target: Path, name: str
) -> None:
    edit(bundle, lambda entries: entries["files"].update({name: {"sha256": "0" * 64, "size": 1}}))
    with pytest.raises(BundleError if name not in (SIGNATURE_FILE, MANIFEST_FILE) else FetchError, match="manifest"):
        fetch(server.address, target)
    assert names(target.parent) == set()
    assert set(server.read) == {MANIFEST_FILE}


def test_a_bundle_larger_than_the_disk_is_refused_before_it_is_read(
    bundle: Path, server: FileServer, target: Path
) -> None:
    edit(bundle, lambda entries: entries["files"][DATA_FILE].update(size=2**50))
    with pytest.raises(
        TargetError, match=r"MB free, the bundle needs about .*: free some space or choose another disk"
    ):
        fetch(server.address, target)
    assert set(server.read) == {MANIFEST_FILE}
    assert names(target.parent) == set()


@pytest.mark.parametrize("name", [MANIFEST_FILE, SIGNATURE_FILE, DATA_FILE])
def test_a_server_cannot_send_more_than_was_asked_for(
    bundle: Path, server: FileServer, target: Path, name: str
) -> None:
    server.endless = name
    server.ranges = False
    expected = f"{name}: sha256" if name == DATA_FILE else f"{name}: more than"
    if name == DATA_FILE:  # one part: later parts would be refused
        transfer.PART = 2**20
    with pytest.raises(FetchError, match=expected):
        fetch(server.address, target)
    assert not target.exists()
    most = {MANIFEST_FILE: LARGEST_MANIFEST, SIGNATURE_FILE: 2**10, DATA_FILE: 4096}[name]
    assert server.read.get(name, 0) < most + 2**24  # buffers of the system


def test_a_full_disk_is_reported_and_the_fetch_goes_on_later(bundle: Path, server: FileServer, target: Path) -> None:
    """A limit on the size of files stands in for the disk; it is above the manifest and below the weights."""
    printed, _ = start(server.address, target, (bundle / DATA_FILE).stat().st_size - 1).communicate(timeout=60)
    assert printed.startswith("OSError ")
    assert "free some space or choose another disk, then fetch again to go on where it ended" in printed
    assert str(partial_of(target) / DATA_FILE) in printed
    assert not target.exists()
    fetch(server.address, target)
    assert_copy(target, bundle)


def test_a_new_version_and_a_damaged_copy_fetch_changed_files_only(
    bundle: Path, server: FileServer, target: Path
) -> None:
    fetch(server.address, target)
    replace_bundle(bundle, b"another graph")
    server.read.clear()
    with pytest.raises(TargetError, match="a bundle exists there: replace it with --overwrite"):
        fetch(server.address, target)
    report = fetch(server.address, target, overwrite=True)
    assert server.read[MODEL_FILE] == report.fetched_bytes == len(b"another graph")
    assert DATA_FILE not in server.read
    assert_copy(target, bundle)
    server.read.clear()
    assert fetch(server.address, target).unchanged
    assert set(server.read) == {MANIFEST_FILE}
    (target / DATA_FILE).write_bytes(bytes(4096))
    server.read.clear()
    report = fetch(server.address, target, overwrite=True)
    assert report.fetched_bytes == server.read[DATA_FILE] == 4096
    assert_copy(target, bundle)


def test_what_is_left_of_another_version_is_not_used(bundle: Path, server: FileServer, target: Path) -> None:
    (bundle / DATA_FILE).rename(bundle / "away")
    with pytest.raises(FetchError):
        fetch(server.address, target)
    partial = partial_of(target)
    (partial / "stray").mkdir()
    (partial / "stray" / "file").write_text("no")
    replace_bundle(bundle, b"another graph, longer than the one before")
    fetch(server.address, target)
    assert_copy(target, bundle)


def test_two_processes_share_one_copy(bundle: Path, server: FileServer, target: Path) -> None:
    server.held = DATA_FILE
    processes = [start(server.address, target) for _ in range(2)]
    wait_for_tokenizer(target, processes[0])
    server.pause.set()
    printed = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert sorted(printed) == ["fetched", "unchanged"]
    assert server.read[DATA_FILE] == (bundle / DATA_FILE).stat().st_size
    assert_copy(target, bundle)


def test_a_required_signature_is_verified_before_weights_are_read(
    bundle: Path, server: FileServer, target: Path, tmp_path: Path
) -> None:
    key, other = new_private_key(), new_private_key()
    (tmp_path / "public.pem").write_bytes(key.public.pem)
    with pytest.raises(SignatureError, match=f"^{server.address}: has no signature"):
        fetch(server.address, target, require_signature=tmp_path / "public.pem")
    sign_manifest(bundle, (bundle / MANIFEST_FILE).read_bytes(), other)
    with pytest.raises(
        SignatureError, match=f"^{server.address}: is signed with key {other.public.fingerprint}, expected"
    ):
        fetch(server.address, target, require_signature=tmp_path / "public.pem")
    assert set(server.read) == {MANIFEST_FILE, SIGNATURE_FILE, SIGNER_FILE}
    assert names(target.parent) == set()
    sign_manifest(bundle, (bundle / MANIFEST_FILE).read_bytes(), key)
    fetch(server.address, target, require_signature=tmp_path / "public.pem")
    assert open_bundle(target, require_signature=tmp_path / "public.pem").manifest == read_manifest(bundle)


def test_engines_are_fetched_on_request(bundle: Path, server: FileServer, target: Path) -> None:
    (bundle / ENGINES_FOLDER).mkdir()
    (bundle / ENGINES_FOLDER / ENGINE).write_bytes(b"engine")
    fetch(server.address, target)
    assert ENGINES_FOLDER not in names(target)
    with pytest.raises(FetchError, match=f"^{ENGINES_FOLDER}/{ENGINE}: ends after 6 bytes, the manifest says 7"):
        fetch(server.address, target, overwrite=True, engines=True)
    assert not (target / ENGINES_FOLDER).exists()


def test_a_server_that_fails_for_a_moment_is_asked_again_but_not_one_that_refuses(
    bundle: Path, server: FileServer, target: Path
) -> None:
    server.failures += ["503", "cut", "429"]
    fetch(server.address, target, connections=1)
    assert_copy(target, bundle)
    shutil.rmtree(target)
    server.failures += ["500"] * 4
    with pytest.raises(FetchError, match=f"{MANIFEST_FILE}: .*500.*: tried 4 times; fetch again"):
        fetch(server.address, target)
    for status in ("401", "403"):
        server.failures.append(status)
        with pytest.raises(FetchError, match=f"{MANIFEST_FILE}: .*{status}.*: expected credentials that may read it"):
            fetch(server.address, target)


def test_a_server_without_ranges_is_refused_for_large_files(bundle: Path, server: FileServer, target: Path) -> None:
    server.ranges = False
    with pytest.raises(FetchError, match="sends the whole file instead of a range: expected one that answers"):
        fetch(server.address, target)
    shutil.rmtree(partial_of(target))
    transfer.PART = 2**20
    fetch(server.address, target)
    assert_copy(target, bundle)


def test_an_address_that_cannot_work_is_refused(target: Path) -> None:
    for address in ("https://", "https://user:word@host/a", "http://host/a?signed=1"):
        with pytest.raises(OptionFault, match="expected a"):
            fetch(address, target)


def test_a_folder_that_is_no_bundle_is_kept_and_one_that_others_may_write_to_is_refused(
    bundle: Path, target: Path
) -> None:
    target.mkdir()
    (target / "notes").write_text("mine")
    with pytest.raises(TargetError, match="contains files but no bundle"):
        fetch(str(bundle), target, overwrite=True)
    assert names(target) == {"notes"}
    shutil.rmtree(target)
    partial_of(target).mkdir()
    partial_of(target).chmod(0o777)
    with pytest.raises(FetchError, match=r"other users may write to it: .*remove it, or choose another folder"):
        fetch(str(bundle), target)


def test_a_partial_folder_that_another_process_publishes_meanwhile_is_begun_again(
    bundle: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = iter([True])

    def published(folder: Path) -> None:
        if next(moved, False):
            folder.rename(target)  # another process had it, and has just completed it

    monkeypatch.setattr(partial_folder, "problem_of", published)
    assert not fetch(str(bundle), target).unchanged
    assert_copy(target, bundle)
