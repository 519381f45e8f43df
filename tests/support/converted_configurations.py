"""Converted configurations: tiny published configurations with changes, and the check that a changed one is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.converted_checkpoint import FAMILIES
from spaceport.exporter.converted_fields import Fields
from spaceport.exporter.sar_config import CheckpointError
from support.published_checkpoints import configuration


def converted(family: str, changes: Mapping[str, Any]) -> Any:
    """The configuration of the converted model."""
    fields = Fields(Path("config.json"), configuration(family, changes), FAMILIES[family].title)
    return FAMILIES[family].config(fields)


def assert_refused(family: str, changes: Mapping[str, Any], message: str) -> None:
    """Assert that a configuration with these changes is refused with this message."""
    with pytest.raises(CheckpointError, match=r"^config\.json: .*" + re.escape(message)):
        converted(family, changes)
