"""Installation: the command fits the way in which the package is installed."""

from __future__ import annotations

import json
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

import spaceport
from spaceport.graphs.contract import installation
from spaceport.graphs.contract.installation import install_command, requirements
from support.paths import ROOT

REQUIRED = (
    "numpy>=2.0",
    'onnxruntime>=1.25; python_version >= "3.11" and extra == "cpu"',
    'onnxruntime>=1.23.2; python_version < "3.11" and extra == "cpu"',
    'torch>=2.9; extra == "export"',
    'spaceport[export]; extra == "tune"',
    "peft>=0.17 ; extra == 'tune'",
)


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, url: str | None) -> None:
    """Pretend that the package is installed below a folder, from a URL or from an index."""
    metadata = folder / "spaceport-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    lines = [f"Requires-Dist: {line}" for line in REQUIRED]
    (metadata / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", "Name: spaceport", *lines, ""]))
    if url is not None:
        (metadata / "direct_url.json").write_text(json.dumps({"url": url, "archive_info": {}}))
    monkeypatch.setattr(spaceport, "__file__", str(folder / "a" / "b" / "spaceport" / "__init__.py"))
    monkeypatch.setattr(installation, "distribution", lambda name: PathDistribution(metadata))


def test_a_checkout_is_installed_with_its_constraints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("cpu") == "pip install -c constraints.txt -e '.[cpu]'"
    assert install_command() == "pip install -c constraints.txt -e ."
    monkeypatch.chdir(tmp_path)
    assert install_command("cpu") == f"pip install -c {ROOT}/constraints.txt -e '{ROOT}[cpu]'"


def test_a_wheel_is_installed_again_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "my wheels" / "spaceport-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    zipfile.ZipFile(wheel, "w").close()
    installed(monkeypatch, tmp_path / "site", wheel.as_uri())
    assert install_command("gpu") == f"pip install '{wheel}[gpu]'"
    assert install_command() == f"pip install '{wheel}'"


@pytest.mark.parametrize("url", [None, "file:///nowhere/spaceport-0.1.0-py3-none-any.whl", "https://example.org/a.whl"])
def test_without_a_source_the_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str | None
) -> None:
    installed(monkeypatch, tmp_path, url)
    version = "1.25" if sys.version_info >= (3, 11) else "1.23.2"
    assert install_command("cpu") == f"pip install 'onnxruntime>={version}'"
    assert install_command() == "pip install 'numpy>=2.0'"
    assert requirements(REQUIRED, "tune") == ["torch>=2.9", "peft>=0.17"]
