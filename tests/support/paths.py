"""Paths: the checkout and the checkpoints in it."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DOCS = ROOT / "docs"
# Top folders, each a sub-package of spaceport
PARTS = ("exporter", "graphs", "kernels", "runtime", "serving", "tools", "training", "verify")
DEPLOY = ROOT / "deploy"
TINY = TESTS / "data" / "tiny"  # trained checkpoint that drafts, a few kilobytes
DEMO = ROOT / "tools" / "demo" / "model"  # trained checkpoint that drafts and forks


def package() -> Path:
    """A folder that holds `spaceport` as it is installed, of links to the folders of the checkout."""
    subprocess.run(["make", "--silent", "build/package/spaceport"], cwd=ROOT, check=True)
    return ROOT / "build" / "package"
