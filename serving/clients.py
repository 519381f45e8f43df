"""Who sends a request: its key or address, and whether a page of another site could have sent it."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, replace
from hashlib import sha256
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from spaceport.runtime.decoding import Decoding
from spaceport.serving.failures import Failure
from spaceport.serving.request_log import recorded_failure
from spaceport.serving.service import Service

_SCHEME = "bearer "
_CLIENT = "spaceport.client"
_FORMS = ("text/plain", "multipart/form-data")  # types of bodies that any page may send to any site


@dataclass(frozen=True)
class Client:
    """Whoever sends requests: clients take turns, and those with different keys share no prefixes."""

    tenant: str  # its key or address
    key: str | None = None  # first digits of the digest of its key; None: the service has no keys
    shares_prefixes: bool = True

    def applied_to(self, decoding: Decoding) -> Decoding:
        """The options of a completion for this client."""
        salt = decoding.cache_salt
        if not self.shares_prefixes:
            salt = sha256(f"{self.tenant} {salt}".encode()).hexdigest()
        return replace(decoding, tenant=self.tenant, cache_salt=salt)


def client_of(request: Request) -> Client:
    client: Client = request.scope[_CLIENT]
    return client


def _is_health(path: str) -> bool:
    return path == "/health" or path.startswith("/health/")


def needs_key(path: str) -> bool:
    """Whether requests for a path need a key: health checks send none, and the page asks for one."""
    return not (_is_health(path) or path in ("/", "/page") or path.startswith("/page/"))


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def is_local(name: str | None) -> bool:
    """Whether a host name or address always means this machine, whatever name servers say."""
    return name is not None and (name == "localhost" or name.endswith(".localhost") or _is_loopback(name))


def _name_in(address: str) -> str | None:
    """The host in an address such as //localhost:8000; None: it has none."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _address(scope: Scope) -> str:
    """The address of a client; on this machine, its connection, since all have one address."""
    host, port = scope.get("client") or ("unknown", 0)
    return f"{host}:{port}" if _is_loopback(host) else host


class KnowClients:
    """An application that refuses requests without a key, apart from health checks and the files of the page.

    Without keys, a service on a loopback address refuses what a page of another site can make a browser send.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = [sha256(key.encode()) for key in service.options.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = None
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if self._keys:
                failure = self._identify(scope, headers)
            else:
                scope[_CLIENT] = Client(_address(scope))
                failure = self._foreign(scope, headers) if self._service.is_local else None
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await recorded_failure(failure, scope).response()(scope, receive, send)

    def _identify(self, scope: Scope, headers: Headers) -> Failure | None:
        """Note whose key a request has; returns why it is refused without a valid one."""
        header = headers.get("authorization", "")
        sent = header[len(_SCHEME) :].strip().encode() if header.lower().startswith(_SCHEME) else b""
        digest = sha256(sent).digest()
        # All keys are compared, so that the time does not depend on the key.
        equal = [hmac.compare_digest(digest, key.digest()) for key in self._keys]
        if any(equal):
            name = digest.hex()[:16]
            scope[_CLIENT] = Client(name, name, self._service.options.share_prefixes)
        elif needs_key(scope["path"]):
            message, advice = "no valid key: send the header Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
            return Failure(401, message, "authentication_error", headers=advice)
        return None

    def _foreign(self, scope: Scope, headers: Headers) -> Failure | None:
        """Why a request may come from a page of another site, which may have a name that leads to this machine."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_own(f"//{host}") and not _is_health(scope["path"]):
            message = (
                f"the service has no host {host!r:.80}: send requests to localhost, or allow it with --allowed-host"
            )
            return Failure(421, message, code="unknown_host")
        if scope["method"] != "POST":
            return None
        if origin is not None and not self._is_own(origin):
            message = f"a page of {origin!r:.80} sent the request: use keys, or allow its host with --allowed-host"
            return Failure(403, message, "permission_error", code="foreign_origin")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in _FORMS:
            return Failure(415, f"the body has the type {kind}: expected application/json", code="unsupported_type")
        return None

    def _is_own(self, address: str) -> bool:
        name = _name_in(address)
        return is_local(name) or name in self._service.options.allowed_hosts
