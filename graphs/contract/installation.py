"""Installation: the pip command that adds an extra to this installation of Spaceport."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlparse

import spaceport

_NAME = "spaceport"
_MARKER = re.compile(r"""(extra|python_version)\s*(==|>=|<)\s*['"]([\w.-]+)['"]""")


def installed_version(package: str) -> str | None:
    """The version of an installed package; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def install_command(extra: str = "") -> str:
    """The command that installs the packages of an extra; without one, those that every command needs.

    A checkout is installed again with its pinned versions, and a wheel or folder from where it came. Otherwise the
    packages themselves are named: the package may not be on the index that pip uses.
    """
    checkout = Path(spaceport.__file__).absolute().parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "src" / _NAME).is_dir():
        return _from_checkout(checkout, extra)
    try:
        installed = distribution(_NAME)
    except PackageNotFoundError:
        return f"pip install {shlex.quote(_with_extra(_NAME, extra))}"
    source = _source_of(installed)
    if source is not None:
        return f"pip install {shlex.quote(_with_extra(str(source), extra))}"
    return f"pip install {' '.join(map(shlex.quote, requirements(installed.requires or (), extra)))}"


def requirements(required: Iterable[str], extra: str) -> list[str]:
    """The requirements of an extra for this Python, without their markers; an extra that names others includes them."""
    named: list[str] = []
    required = list(required)
    for line in required:
        requirement, _, marker = line.partition(";")
        if not _applies(marker, extra):
            continue
        nested = re.fullmatch(rf"{_NAME}\[([\w,-]+)\]", requirement.strip())
        if nested is None:
            named.append(requirement.strip())
        else:
            for name in nested[1].split(","):
                named += requirements(required, name)
    return list(dict.fromkeys(named))


def _from_checkout(checkout: Path, extra: str) -> str:
    here = checkout == Path.cwd()
    constraints, target = ("constraints.txt", ".") if here else (str(checkout / "constraints.txt"), str(checkout))
    pinned = f"-c {shlex.quote(constraints)} " if (checkout / "constraints.txt").is_file() else ""
    name = _with_extra(target, extra)
    return f"pip install {pinned}-e {shlex.quote(name)}"


def _source_of(installed: Distribution) -> Path | None:
    """The wheel, archive or folder that the package was installed from, if it still exists."""
    try:
        url = urlparse(json.loads(installed.read_text("direct_url.json") or "{}").get("url", ""))
    except ValueError:
        return None
    source = Path(unquote(url.path))
    return source if url.scheme == "file" and source.exists() else None


def _with_extra(name: str, extra: str) -> str:
    return f"{name}[{extra}]" if extra else name


def _applies(marker: str, extra: str) -> bool:
    """Whether a requirement with this marker belongs to an extra; markers of the platform count as true."""
    named = ""
    for key, sign, value in _MARKER.findall(marker):
        if key == "extra":
            named = value
        else:
            wanted = tuple(map(int, value.split(".")))
            newer = sys.version_info[: len(wanted)] >= wanted
            if newer != (sign == ">="):
                return False
    return named == extra
