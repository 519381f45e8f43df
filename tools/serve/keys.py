"""Keys: only clients that send a key of the service get past this layer of the application."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spaceport.tools.serve.completions import json_response
from spaceport.tools.serve.failures import Failure
from spaceport.tools.serve.request_record import record_in

_OPEN = ("/health", "/v2/health", "/page")  # health checks send no key, and the page asks for one
_SCHEME = "bearer "


def needs_key(path: str) -> bool:
    """Whether requests for a path need a key."""
    return path != "/" and not any(path == each or path.startswith(f"{each}/") for each in _OPEN)


class RequireKey:
    """An application that refuses requests without a key, apart from health checks and the files of the page."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or not needs_key(scope["path"]) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        failure = Failure(401, "no valid key: send the header Authorization: Bearer KEY", "authentication_error")
        if (record := record_in(scope)) is not None:
            record.error = failure.kind
        response = json_response(failure.body(), failure.status, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = Headers(scope=scope).get("authorization", "")
        if not given.lower().startswith(_SCHEME):
            return False
        sent = given[len(_SCHEME) :].strip().encode()
        equal = [
            hmac.compare_digest(sent, key) for key in self._keys
        ]  # all, so that the time does not depend on the key
        return any(equal)
