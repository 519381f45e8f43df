"""Service settings: the options of `spaceport serve` as what an application is built from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from spaceport.runtime.session import Runtime
from spaceport.serving.options import ServiceOptions
from spaceport.tools.cli.generate_request import limits_of
from spaceport.tools.cli.key_file import KEY_VARIABLE, keys_of

_SERVICE = (
    *("strict", "page", "metrics_prefix", "request_timeout", "drain_timeout", "most_bytes"),
    *("audit_rate", "audit_log", "audit_action"),
)
_RUNTIME = (
    *("backend", "threads", "max_requests", "queue_limit", "max_seq_len", "max_slots", "prefix_cache"),
    *("step_costs", "call_timeout", "trust_engines", "allow_links", "copy_weights", "require_signature"),
)


def service_options_of(given: Mapping[str, Any]) -> ServiceOptions:
    """The options of the service, with the keys in the file or in the environment of this process."""
    return ServiceOptions(
        keys=keys_of(given["api_key_file"], os.environ.get(KEY_VARIABLE, "")),
        tool_format=None if given["tool_format"] == "auto" else given["tool_format"],
        **{option: given[option] for option in _SERVICE},
    )


def openers_of(given: Mapping[str, Any]) -> dict[str, Callable[[], Runtime]]:
    """What opens the bundle of each model."""
    options = {option: given[option] for option in _RUNTIME}
    limits = limits_of(given["limits"])
    return {name: partial(Runtime.open, path, limits=limits, **options) for name, path in given["bundles"].items()}
