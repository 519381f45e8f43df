"""How a service runs, apart from the bundles that it serves."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.sampling.option_fields import check_options, documented, option
from spaceport.runtime.tool_calls.functions import FormatName

# What a fault of the audit leads to, besides a log entry.
AuditAction = Literal["log", "disable-drafts"]

_MOST_CONNECTIONS = 4096  # each may have a head of 64 KiB


def _default_connections() -> int:
    """As many connections as leave a quarter of the process's descriptors for its files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(_MOST_CONNECTIONS, limit * 3 // 4))


@documented
@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service."""

    keys: tuple[str, ...] = option(
        (),
        "Keys of which a client has to send one.",
        unset="none: everybody may send requests",
        flag=None,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names, besides those of this machine, under which pages and clients reach a service on a loopback address "
        "without keys.",
        unset="none",
        flag="--allowed-host",
        metavar="NAME",
    )
    share_prefixes: bool = option(False, "Let clients with different keys share the prefix cache.")
    most_client_requests: int | None = option(
        None,
        "Maximum completions of one client, by its key or else its address, that run or wait.",
        1,
        unset="any number",
        flag="--client-requests",
    )
    page: bool = option(True, "Serve a page to chat with the models.")
    tool_format: FormatName | None = option(
        None, "How models write calls of functions.", unset="as their chat templates do", flag=None
    )
    key_metrics: bool = option(False, "Count requests and tokens of each key, named by digits of its digest.")
    metrics_prefix: str = option("spaceport", "First part of the names of all metrics.", metavar="NAME")
    drain_timeout: float = option(
        30.0, "Seconds that running requests may take after the signal to stop.", metavar="SECONDS"
    )
    request_timeout: float = option(
        600.0, "Seconds after which a request ends with what it has, the queue included.", metavar="SECONDS"
    )
    most_bytes: int = option(4 << 20, "Maximum bytes of a request's body.", 1, flag="--max-body", metavar="BYTES")
    most_body_bytes: int = option(
        64 << 20, "Maximum bytes of all bodies that are being received and read.", 1, flag=None
    )
    most_connections: int = option(
        _default_connections,
        "Maximum open connections.",
        1,
        unset=f"{_MOST_CONNECTIONS}, at most three quarters of the descriptor limit",
        flag=None,
    )
    most_choices: int = option(16, "Maximum `n` of a request.", 1, flag=None)
    head_timeout: float = option(10.0, "Seconds within which the head of a request has to be complete.", flag=None)
    body_timeout: float = option(
        10.0,
        "Seconds within which a body has to be complete, and 1 more for each 16 KiB that came; the rest of a body that "
        "is already answered has as long.",
        flag=None,
    )
    send_timeout: float = option(30.0, "Seconds after which a client that reads nothing loses its stream.", flag=None)
    ping_interval: float = option(10.0, "Seconds between the comments that keep a silent stream open.", flag=None)
    audit_rate: float = option(
        0.0,
        "Share of the completions to generate again without drafts and to compare, while nobody waits.",
        0,
        1,
        metavar="SHARE",
    )
    audit_log: Path | None = option(
        None, "Private file for prompts and outputs of completions that differ.", unset="none", metavar="FILE"
    )
    audit_action: AuditAction = option(
        "log", "What a completion that differs leads to: a log entry, or also the end of all drafts of its model."
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not all(isinstance(key, str) and key.isprintable() and key.strip() for key in self.keys):
            raise OptionFault("a key of the service is empty or not printable: expected lines such as sk-3f9c…")
        if not self.metrics_prefix.isidentifier():
            raise OptionFault(f"metrics_prefix is {self.metrics_prefix!r}: expected letters, digits and underscores")
        timeouts = ("head_timeout", "body_timeout", "request_timeout", "send_timeout", "ping_interval", "drain_timeout")
        for name in timeouts:
            if not getattr(self, name) > 0:
                raise OptionFault(f"{name} is {getattr(self, name)}: expected seconds above 0")
