"""Page: the page of a service, on which people chat with a model and see how it decodes."""

from __future__ import annotations

from hashlib import sha256

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spaceport.tools.page.modules import STATIC

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """The page and the files that it loads."""
    files = sorted(file.name for file in STATIC.iterdir() if file.suffix in _TYPES and file.name != "index.html")
    return [_route("/", "index.html"), *(_route(f"/page/{name}", name) for name in files)]


def _route(path: str, name: str) -> Route:
    file = STATIC / name
    content = file.read_bytes()
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_TYPES[file.suffix])

    return Route(path, answer)
