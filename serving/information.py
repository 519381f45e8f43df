"""The endpoints that generate nothing: models, tokens, health, load and metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from spaceport import __version__
from spaceport.runtime.text.tokenizer import encode
from spaceport.serving.bodies import check_count, read_body
from spaceport.serving.chat import check_messages
from spaceport.serving.failures import Failure, invalid, json_response
from spaceport.serving.service import service_of

_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class TokenizeBody(Struct, kw_only=True):
    """A text or messages to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True  # false: the tokens of the text alone, and texts of special tokens are these


class DetokenizeBody(Struct, kw_only=True):
    """Token ids to turn into text."""

    tokens: list[int]
    model: str | None = None


async def models(request: Request) -> Response:
    """All served models."""
    service = service_of(request)
    service.require_open()
    entries = [model.entry() for model in service.models.values()]
    return json_response({"object": "list", "data": entries})


async def model(request: Request) -> Response:
    """One served model."""
    return json_response(service_of(request).model(request.path_params["name"]).entry())


async def tokenize(request: Request) -> Response:
    """The token ids of a text or of messages."""
    body = await read_body(request, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise Failure(400, "prompt and messages are both given, or neither is: expected one of the two")
    runtime = service_of(request).model(body.model).runtime
    prompt: Any = body.prompt if body.messages is None else body.messages
    if body.messages is not None:
        check_messages(body.messages)
    if body.prompt is not None and not body.add_special_tokens:  # for clients that join prompts from token ids
        runtime.limits.check_prompt(body.prompt)
        tokens = await asyncio.to_thread(encode, runtime.tokenizer, body.prompt, special=False)
    else:
        tokens = await asyncio.to_thread(runtime.tokens_of, prompt)
    return json_response({"count": len(tokens), "max_model_len": runtime.max_seq_len, "tokens": tokens})


async def tokenizer_info(request: Request) -> Response:
    """The special tokens and the chat template of a model, as vLLM reports them."""
    model = service_of(request).model(request.query_params.get("model"))
    special_tokens = model.runtime.bundle.manifest.special_tokens
    template = {"chat_template": model.chat_template} if model.chat_template else {}
    return json_response({"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens, **template})


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body = await read_body(request, DetokenizeBody)
    runtime = service_of(request).model(body.model).runtime
    vocab_size = runtime.bundle.manifest.signature.vocab_size
    check_count("tokens", body.tokens, runtime.limits.prompt_chars)
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < vocab_size):
        raise invalid("tokens", f"has ids outside of 0 to {vocab_size - 1}")
    text = await asyncio.to_thread(runtime.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


async def live(request: Request) -> Response:
    """Whether the process should go on: not after a hung engine call."""
    healthy = service_of(request).healthy
    return json_response({"status": "ok" if healthy else "hung"}, 200 if healthy else 503)


async def ready(request: Request) -> Response:
    """Whether the service takes requests."""
    service = service_of(request)
    status = "ok" if service.ready else "stopping" if service.draining else "opening" if service.opening else "hung"
    return json_response({"status": status}, 200 if service.ready else 503)


async def version(request: Request) -> Response:
    """The version of Spaceport, and what drafts of each model leave unchanged on this machine."""
    exactness = {name: str(model.runtime.exactness) for name, model in service_of(request).models.items()}
    return json_response({"version": __version__, "exactness": exactness})


async def load(request: Request) -> Response:
    """Running and waiting requests and KV slots, for load balancers."""
    loads = {}
    for name, model in service_of(request).models.items():
        status = model.status()
        loads[name] = {
            "running": status.active_requests,
            "waiting": status.queued_requests,
            "most_running": status.max_requests,
            "most_waiting": status.queue_limit,
            "kv_slots": status.kv_slots,
            "kv_slots_used": status.kv_slots_used,
            "cached_tokens": status.cached_tokens,
            "tokens_per_second": round(status.tokens_per_second, 1),
            "drafts": model.audit is None or model.audit.drafts,
        }
    server_load = sum(model_load["running"] + model_load["waiting"] for model_load in loads.values())
    return json_response({"server_load": server_load, "models": loads})


async def metrics(request: Request) -> Response:
    """All counters in Prometheus' text format."""
    return Response(service_of(request).metrics.text(), media_type=_METRICS)
