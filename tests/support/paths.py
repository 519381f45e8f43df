"""Paths: the checkout and the checkpoints in it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DOCS = ROOT / "docs"
DEPLOY = ROOT / "deploy"
TINY = TESTS / "data" / "tiny"  # trained checkpoint that drafts, a few kilobytes
DEMO = ROOT / "tools" / "demo" / "model"  # trained checkpoint that drafts and forks
