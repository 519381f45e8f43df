"""Hostile: schemathesis, which sends valid and invalid requests from the OpenAPI document of a service."""

from __future__ import annotations

import re
from pathlib import Path

from real_clients.environments import run

_SECONDS = 90
_RULES = "positive_data_acceptance"  # left out: a schema cannot say that of two fields one is expected


def check(program: str, url: str, folder: Path) -> list[str]:
    """What schemathesis reports; raises CommandFailed if a response is not as the document says."""
    folder.mkdir(exist_ok=True)
    output = run(
        [
            *(program, "run", f"{url.removesuffix('/v1')}/openapi.json", "--exclude-checks", _RULES),
            *("--workers", "1", "--max-time", str(_SECONDS), "-n", "300", "--phases", "examples,coverage,fuzzing"),
            *("--seed", "1", "--no-color", "--max-response-time", "30", "--warnings", "off"),
        ],
        folder,
        _SECONDS + 60,
    )
    found = re.search(r"(\d+) generated", output)
    assert found is not None, output[-2000:]
    assert int(found[1]) >= 1000, f"{found[1]} requests were sent, expected at least 1000"
    return [f"{found[1]} valid and invalid requests: no response that the document does not allow, no server error"]
