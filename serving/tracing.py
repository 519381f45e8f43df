"""An OpenTelemetry span for each request that generates, with attributes of the gen_ai conventions."""

from __future__ import annotations

from typing import Any

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id
from starlette.types import Scope

from spaceport import __version__
from spaceport.runtime.decoding import Decoding
from spaceport.serving.answers import finish_reason
from spaceport.serving.request_log import RequestRecord


class RequestSpans:
    """Spans of requests, which a provider exports; they have no text of a request."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("spaceport", __version__)

    def begin(self, record: RequestRecord, scope: Scope) -> Span:
        """Begin the span of a request, in the trace that its headers name."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = propagate.extract(headers, Context())
        span = self._tracer.start_span(record.method, parent, SpanKind.SERVER)
        record.trace = format_trace_id(span.get_span_context().trace_id)
        return span

    def end(self, span: Span, record: RequestRecord) -> None:
        """End a span with what is known of its request."""
        operation = "text_completion" if record.route == "/v1/completions" else "chat"
        generates = record.model is not None
        span.update_name(f"{operation} {record.model}" if generates else f"{record.method} {record.route}")
        attributes = {**_http(record), **(_asked(record, operation) if generates else {}), **_answered(record)}
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if record.status >= 500 or (record.status < 400 and record.error):  # the latter: after a stream has begun
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Export the spans that are left."""
        self._provider.shutdown()


def exported_spans() -> RequestSpans:
    """Spans that are exported over HTTP (OTLP), as the environment variables OTEL_… say."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "spaceport"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return RequestSpans(provider)


def _http(record: RequestRecord) -> dict[str, Any]:
    return {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status or None,
        "error.type": record.error,
        "spaceport.request.id": record.id,
    }


def _asked(record: RequestRecord, operation: str) -> dict[str, Any]:
    """Options of the request."""
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "spaceport",
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.stream,
        **({} if record.decoding is None else _options(record.decoding)),
    }
    if len(record.statistics) > record.prompts:
        attributes["gen_ai.request.choice.count"] = len(record.statistics) // record.prompts
    return attributes


def _options(decoding: Decoding) -> dict[str, Any]:
    sampling = decoding.sampling
    return {
        "gen_ai.request.max_tokens": decoding.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.seed": sampling.seed,
    }


def _answered(record: RequestRecord) -> dict[str, Any]:
    """Counts and times of the answer; those under gen_ai.latency have the names that vLLM gives them."""
    counts = record.counts()
    if not counts:
        return {}
    return {
        "gen_ai.response.id": record.answer,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": [finish_reason(ending) for ending in record.endings],
        "gen_ai.response.time_to_first_chunk": counts["first_token_seconds"] if record.stream else None,
        "gen_ai.usage.input_tokens": counts["prompt_tokens"],
        "gen_ai.usage.output_tokens": counts["tokens"],
        "gen_ai.usage.cache_read.input_tokens": counts["cached_tokens"],
        "gen_ai.latency.time_in_queue": counts["queue_seconds"],
        "gen_ai.latency.time_to_first_token": counts["first_token_seconds"],
        "gen_ai.latency.e2e": max(choice.seconds for choice in record.statistics),
        "spaceport.endings": record.endings,
        "spaceport.steps": counts["steps"],
        "spaceport.draft_tokens": counts["draft_tokens"],
        "spaceport.accepted_tokens": counts["accepted_tokens"],
    }
