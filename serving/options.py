"""How a service runs, apart from the bundles that it serves."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.tool_calls.functions import FORMATS, FormatName

# What a fault of the audit leads to, besides a log entry.
AuditAction = Literal["log", "disable-drafts"]

_MOST_CONNECTIONS = 4096  # each may have a head of 64 KiB


def _default_connections() -> int:
    """As many connections as leave a quarter of the process's descriptors for its files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(_MOST_CONNECTIONS, limit * 3 // 4))


@dataclass(frozen=True)
class ServiceOptions:
    """Options of a service.

    - `keys`: Keys of which a client has to send one; empty: everybody may send requests.
    - `strict`: Whether a request with an unknown field is refused instead of answered without it; default False.
    - `metrics_prefix`: First part of the names of all metrics; default "spaceport".
    - `tool_format`: How models write calls of functions; default None: as their chat templates do.
    - `most_bytes`: Maximum bytes of a request's body; default 4 MiB.
    - `most_connections`: Maximum open connections; default 4096, at most three quarters of the descriptor limit.
    - `most_choices`: Maximum `n` of a request; default 16.
    - `head_timeout`: Seconds within which the head of a request has to be complete; default 10.
    - `body_timeout`: Seconds within which a body has to be complete, and 1 more for each 16 KiB that came; default 10.
    - `request_timeout`: Seconds after which a request ends with what it has, the queue included; default 600.
    - `send_timeout`: Seconds after which a client that reads nothing loses its stream; default 30.
    - `ping_interval`: Seconds between the comments that keep a silent stream open; default 10.
    - `share_prefixes`: Whether clients with different keys reuse each other's KV rows; default False.
    - `most_client_requests`: Maximum completions of one client, by its key or else its address, that run or wait; default
      None: any number.
    - `most_body_bytes`: Maximum bytes of all bodies that are being received and read; default 64 MiB.
    - `allowed_hosts`: Host names, besides those of this machine, under which pages and clients reach a service on a
      loopback address without keys; default: none.
    - `key_metrics`: Whether tokens and requests are counted for each key, named by digits of its digest; default False.
    - `drain_timeout`: Seconds that running requests may take after the signal to stop; default 30.
    - `page`: Whether the service has a page, on which people chat with its models; default True.
    - `audit_rate`: Share of the completions that are generated again without drafts, to compare them; default 0.
    - `audit_log`: File for the prompts and outputs of completions that differ; default None: they are not recorded.
    - `audit_action`: What happens when one differs: "log", or "disable-drafts": its model goes on without drafts.
    """

    keys: tuple[str, ...] = ()
    strict: bool = False
    metrics_prefix: str = "spaceport"
    tool_format: FormatName | None = None
    most_bytes: int = 4 << 20
    most_connections: int = field(default_factory=_default_connections)
    most_choices: int = 16
    share_prefixes: bool = False
    most_client_requests: int | None = None
    most_body_bytes: int = 64 << 20
    allowed_hosts: tuple[str, ...] = ()
    key_metrics: bool = False
    head_timeout: float = 10.0
    body_timeout: float = 10.0
    request_timeout: float = 600.0
    send_timeout: float = 30.0
    ping_interval: float = 10.0
    drain_timeout: float = 30.0
    page: bool = True
    audit_rate: float = 0.0
    audit_log: Path | None = None
    audit_action: AuditAction = "log"

    def __post_init__(self) -> None:
        if not all(isinstance(key, str) and key.isprintable() and key.strip() for key in self.keys):
            raise OptionFault("a key of the service is empty or not printable: expected lines such as sk-3f9c…")
        if not self.metrics_prefix.isidentifier():
            raise OptionFault(f"metrics_prefix is {self.metrics_prefix!r}: expected letters, digits and underscores")
        if self.tool_format not in (None, *FORMATS):
            raise OptionFault(f"tool_format is {self.tool_format!r}: expected {', '.join(FORMATS)} or None")
        for name in ("most_bytes", "most_connections", "most_choices", "most_client_requests", "most_body_bytes"):
            if (most := getattr(self, name)) is not None and most < 1:
                raise OptionFault(f"{name} is {most}: expected at least 1")
        timeouts = ("head_timeout", "body_timeout", "request_timeout", "send_timeout", "ping_interval", "drain_timeout")
        for name in timeouts:
            if not getattr(self, name) > 0:
                raise OptionFault(f"{name} is {getattr(self, name)}: expected seconds above 0")
        if not 0 <= self.audit_rate <= 1:
            raise OptionFault(f"audit_rate is {self.audit_rate}: expected a share from 0 to 1, such as 0.01")
        if self.audit_action not in get_args(AuditAction):
            expected = " or ".join(get_args(AuditAction))
            raise OptionFault(f"audit_action is {self.audit_action!r}: expected {expected}")
