"""Object store: bundles come from a real S3 server, and errors say what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import MissingDependency, OptionFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE, MODEL_FILE
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.fetch import fetching
from spaceport.tools.fetch.fetching import fetch
from spaceport.tools.fetch.sources import FetchError, open_source
from support.paths import ROOT
from support.ray_cluster import free_port, listens, wait_for
from support.small_bundle import fill, new_bundle

# An environment of its own: its packages do not agree with the pinned ones.
_SERVER = shutil.which("moto_server") or ROOT / "build" / "moto" / "bin" / "moto_server"
_INSTALL = "python3 -m venv build/moto && build/moto/bin/pip install 'moto[server]==5.2.5'"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty bucket of a running S3 server, with credentials in the environment."""
    pytest.importorskip("obstore", reason="needs obstore: pip install -c constraints.txt -e '.[storage]'")
    if not Path(_SERVER).exists():
        pytest.skip(f"needs an S3 server: {_INSTALL}")
    port = free_port()
    names = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    for variable, value in {**names, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(variable, value)
    process = subprocess.Popen([str(_SERVER), "-p", str(port)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: listens("127.0.0.1", port), "the server starts")
        urllib.request.urlopen(urllib.request.Request(f"{names['AWS_ENDPOINT_URL']}/models", method="PUT")).close()
        yield "s3://models"
    finally:
        process.kill()
        process.wait()


def upload(folder: Path, address: str) -> None:
    import obstore
    from obstore.store import from_url

    for file in folder.iterdir():
        obstore.put(from_url(address), file.name, file.read_bytes())


@pytest.mark.nightly
def test_a_bundle_comes_whole_from_an_object_store(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "PART", 500)
    bundle, target = new_bundle(tmp_path / "store"), tmp_path / "copy"
    upload(bundle, f"{bucket}/chat/1")
    report = fetch(f"{bucket}/chat/1/", target)
    assert report.fetched_bytes == report.total_bytes
    assert open_bundle(target).manifest_content == (bundle / MANIFEST_FILE).read_bytes()
    for file in bundle.iterdir():
        file.unlink()
    fill(bundle, b"another graph")
    upload(bundle, f"{bucket}/chat/2")
    assert fetch(f"{bucket}/chat/2", target, overwrite=True).fetched_bytes == len(b"another graph")
    assert (target / MODEL_FILE).read_bytes() == b"another graph"
    assert fetch(f"{bucket}/chat/2", target).unchanged
    for address in (f"{bucket}/a", "s3://no-such-bucket/a"):
        with pytest.raises(FetchError, match=f"{address}: no manifest.json there"):
            fetch(address, tmp_path / "other")
    with pytest.raises(OptionFault, match="expected a folder, https://… or an object store such as s3://"):
        open_source("hf://organisation/model")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(MissingDependency, match=r"s3://a/b: object stores need the package obstore: pip install"):
        open_source("s3://a/b")
