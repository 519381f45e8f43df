"""Key file: the keys of a service, from a file or the environment."""

from __future__ import annotations

from pathlib import Path

from spaceport.graphs.contract.faults import OptionFault

KEY_VARIABLE = "SPACEPORT_API_KEY"


def keys_of(file: Path | None, variable: str) -> tuple[str, ...]:
    """The keys in a file, one per line, or else those in the environment, separated by commas."""
    if file is None:
        return tuple(key.strip() for key in variable.split(",") if key.strip())
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionFault(f"--api-key-file: {file} cannot be read: {error}: expected one key per line") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise OptionFault(f"--api-key-file: {file} has no key: expected one per line")
    return keys
