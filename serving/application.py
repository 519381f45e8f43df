"""The ASGI application of a service, with its routes, API keys and page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha256

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.runtime.scheduling.worker import RuntimeStatus
from spaceport.runtime.session import Runtime
from spaceport.serving import information
from spaceport.serving.audit import AuditLog, CompletionAudit
from spaceport.serving.chat import chat
from spaceport.serving.clients import KnowClients
from spaceport.serving.completions import text
from spaceport.serving.failures import Failure
from spaceport.serving.infill import infill
from spaceport.serving.metrics import Metrics
from spaceport.serving.openapi import openapi
from spaceport.serving.options import ServiceOptions
from spaceport.serving.page.modules import STATIC
from spaceport.serving.request_log import LogRequests, recorded_failure
from spaceport.serving.responses import responses
from spaceport.serving.service import ServedModel, Service, log, service_of

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

# Opens the bundle of a model.
Opener = Callable[[], Runtime]

_ROUTES = (
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/completions", text, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/infill", infill, methods=["POST"]),
    Route("/v1/models", information.models),
    Route("/v1/models/{name:path}", information.model),
    Route("/tokenize", information.tokenize, methods=["POST"]),
    Route("/detokenize", information.detokenize, methods=["POST"]),
    Route("/tokenizer_info", information.tokenizer_info),
    Route("/health", information.ready),
    Route("/health/live", information.live),
    Route("/health/ready", information.ready),
    Route("/metrics", information.metrics),
    Route("/version", information.version),
    Route("/load", information.load),
    Route("/openapi.json", openapi),
)
_PATHS = frozenset(route.path for route in _ROUTES)


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


def page_routes() -> list[Route]:
    """The page and the files that it loads."""
    files = sorted(file.name for file in STATIC.iterdir() if file.suffix in _TYPES and file.name != "index.html")
    return [_route("/", "index.html"), *(_route(f"/page/{name}", name) for name in files)]


async def close_models(models: Iterable[ServedModel]) -> None:
    """Close the bundles of models; requests that still run end with an error."""
    await asyncio.gather(*(asyncio.to_thread(model.runtime.close) for model in models))


async def _open(
    openers: Mapping[str, Opener], opened: dict[str, ServedModel], service: Service, file: AuditLog | None
) -> None:
    """Open the bundles of all models, and begin to audit them."""
    log.info("opening %s", ", ".join(openers))
    try:
        for name, opener in openers.items():
            runtime = await asyncio.to_thread(opener)
            audit = None
            if service.options.audit_rate:
                audit = CompletionAudit(
                    name,
                    runtime,
                    service.options.audit_rate,
                    partial(service.metrics.audited, name),
                    file=file,
                    disables_drafts=service.options.audit_action == "disable-drafts",
                    is_stopping=lambda: service.draining,
                )
            opened[name] = ServedModel(name, runtime, audit)
    except (SpaceportError, OSError) as error:
        service.fault = error
        raise
    service.models = opened.copy()
    for model in opened.values():
        model.runtime.prepare_grammars()
        if model.audit is not None:
            service.metrics.begin_audit(model.name, model.audit)
            model.audit.start()


@asynccontextmanager
async def _open_models(
    openers: Mapping[str, Opener], service: Service, file: AuditLog | None, answers_while_opening: bool
) -> AsyncIterator[None]:
    """The time in which the bundles of all models are open."""
    opened: dict[str, ServedModel] = {}
    opening = asyncio.create_task(_open(openers, opened, service, file))
    try:
        if not answers_while_opening:
            await opening
        yield
    finally:
        with suppress(SpaceportError, OSError):  # the service's fault
            await opening
        await asyncio.gather(*(model.audit.stop() for model in opened.values() if model.audit is not None))
        await close_models(opened.values())


async def _failed(request: Request, error: Exception) -> Response:
    failure = recorded_failure(error, request.scope)
    if failure.status in (429, 503):
        service_of(request).metrics.refused(failure.code or "unavailable")
    if failure.status == 500:
        log.error("a request failed", exc_info=error)
    return failure.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    full = f"/v1{request.url.path}"  # clients of llama.cpp's server leave the version out
    missing = f"no such endpoint, expected {full}" if full in _PATHS else "no such endpoint"
    reason = {404: missing, 405: f"expected {headers.get('Allow')}"}.get(error.status_code, error.detail)
    return Failure(error.status_code, f"{request.method} {request.url.path}: {reason}", headers=headers).response()


def application(
    openers: Mapping[str, Opener],
    options: ServiceOptions | None = None,
    *,
    answers_while_opening: bool = False,
) -> Starlette:
    """The application that serves these models; it opens their bundles when it starts, and closes them when it ends.

    With `answers_while_opening`, it is not ready until they are open; an error is then the service's `fault`.
    """
    options = options or ServiceOptions()

    def statuses() -> dict[str, RuntimeStatus]:
        return {name: model.status() for name, model in service.models.items()}

    service = Service(options, Metrics(options.metrics_prefix, statuses, by_key=options.key_metrics))
    file = None if options.audit_log is None else AuditLog(options.audit_log)

    routes = [*_ROUTES, *(page_routes() if options.page else ())]
    app = Starlette(
        routes=routes,
        lifespan=lambda _: _open_models(openers, service, file, answers_while_opening),
        exception_handlers={HTTPException: _no_route, Failure: _failed, SpaceportError: _failed},
        middleware=[
            Middleware(LogRequests, paths=[route.path for route in routes]),
            Middleware(KnowClients, service=service),
        ],
    )
    app.state.service = service
    return app
