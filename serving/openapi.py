"""The description of the endpoints and their bodies for clients, generated from the structs of the bodies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spaceport import __version__
from spaceport.runtime.limits import DEFAULT_LIMITS, Limits
from spaceport.serving.bodies import OPTION_FIELDS, SUPPORTED, Own, bounds_of
from spaceport.serving.chat import ChatBody
from spaceport.serving.clients import needs_key
from spaceport.serving.completions import TextBody
from spaceport.serving.failures import Error, json_response
from spaceport.serving.infill import InfillBody
from spaceport.serving.information import DetokenizeBody, TokenizeBody
from spaceport.serving.options import ServiceOptions
from spaceport.serving.responses import ResponsesBody
from spaceport.serving.service import service_of

# The body of each endpoint that takes one.
BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": TextBody,
    "/v1/responses": ResponsesBody,
    "/infill": InfillBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_TEXT = ("/metrics",)  # endpoints that answer with text
_REFERENCE = "#/components/schemas/{name}"


async def openapi(request: Request) -> Response:
    """This description, as OpenAPI 3.1."""
    service = service_of(request)
    limits = next((model.runtime.limits for model in service.models.values()), DEFAULT_LIMITS)
    return json_response(document(request.app.routes, limits, service.options))


def document(routes: Iterable[Any], limits: Limits, options: ServiceOptions) -> dict[str, Any]:
    """The description of these routes, apart from the files of the page."""
    paths = {
        route.path.replace(":path}", "}"): _path(route, options)
        for route in routes
        if isinstance(route, Route) and not route.path.startswith("/page/") and route.path != "/"
    }
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Spaceport", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas(limits, options.most_choices)},
    }
    if options.keys:
        description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return description


def schemas(limits: Limits, most_choices: int) -> dict[str, dict[str, Any]]:
    """The schemas of errors and of all bodies, with descriptions and bounds of their fields."""
    _, components = msgspec.json.schema_components([*BODIES.values(), Error], ref_template=_REFERENCE)
    bounds = bounds_of(limits, most_choices)
    structs: list[type[msgspec.Struct]] = [*BODIES.values(), Own]
    for struct in structs:
        prefix = "spaceport." if struct is Own else ""
        for name, schema in components[struct.__name__]["properties"].items():
            field = f"{prefix}{name}"
            schema["description"] = SUPPORTED[field]
            if (declared := OPTION_FIELDS.get(field)) is not None and (default := declared.request_default) is not None:
                schema["default"] = default
            for branch in schema.get("anyOf", [schema]):
                branch.update(bounds.get(field, {}).get(branch.get("type"), {}))
    return components


def _path(route: Route, options: ServiceOptions) -> dict[str, Any]:
    error = {
        "description": "The request is not answered.",
        "content": {"application/json": {"schema": _reference("Error")}},
    }
    media = (
        {"text/plain": {"schema": {"type": "string"}}} if route.path in _TEXT else {"application/json": {"schema": {}}}
    )
    if route.path.startswith("/v1/") and route.path in BODIES:
        media["text/event-stream"] = {"schema": {}}
    operation: dict[str, Any] = {
        "summary": inspect.getdoc(route.endpoint) or "",
        "operationId": re.sub(r"\W+", "_", route.path).strip("_"),
        "responses": {"200": {"description": "The answer.", "content": media}, "default": error},
    }
    if names := re.findall(r"\{(\w+)", route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.path in BODIES:
        body = {"schema": _reference(BODIES[route.path].__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    if options.keys and needs_key(route.path):
        operation["security"] = [{"key": []}]
    methods = sorted((route.methods or set()) - {"HEAD"})
    return {method.lower(): operation for method in methods}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=name)}
