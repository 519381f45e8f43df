"""Service model: a model behind the HTTP API of OpenAI that answers chat messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from spaceport.graphs.contract.faults import InputFault, OptionFault, SpaceportError
from spaceport.tools.chat.chat_model import AnswerOptions, AnswerStatistics
from spaceport.tools.terminal.lanes import Span

_TIMEOUT = 600.0  # seconds without a byte; Spaceport's service sends a comment every 10 seconds
_LONGEST = 4 << 20  # bytes of a line or an error
_LOCAL = ("127.0.0.1", "::1", "localhost")


class ServiceFault(SpaceportError, RuntimeError):
    """A service did not answer: the message states why and what to do."""


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirects, which would send the key and the conversation elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


class ServiceModel:
    """A model of a service at an address such as http://host:8000."""

    def __init__(self, address: str, model: str | None, key: str | None, options: AnswerOptions) -> None:
        self.statistics: AnswerStatistics | None = None
        self._root = root_of(address)
        if key is not None and not (key.isascii() and key.isprintable()):
            raise OptionFault("the key of the service has other than printable ASCII characters: give one as sk-3f9c…")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._options = options
        local = urlsplit(self._root).hostname in _LOCAL
        self._opener: OpenerDirector = build_opener(_NoRedirect, *([ProxyHandler({})] if local else []))
        self.name, self._is_spaceport = self._find(model)

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Span]:
        """The answer while it is generated; closing the iterator ends it."""
        self.statistics = None
        first, ending = None, "end"
        last: dict[str, Any] = {}
        asked = time.monotonic()
        with self._ask("/chat/completions", self._body(messages)) as response:
            for event in _events(response):
                for choice in event.get("choices") or ():
                    spans = list(_spans(choice))
                    first = first or (time.monotonic() if spans else None)
                    ending = (choice.get("spaceport") or {}).get("ending") or choice.get("finish_reason") or ending
                    yield from spans
                last = event if event.get("usage") else last
        self.statistics = _statistics(last, ending, asked, first)

    def close(self) -> None:
        """Nothing is open between answers."""

    def _body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        options = self._options
        given = {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "seed": options.seed,
        }
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in given.items() if value is not None},
        }
        if self._is_spaceport:
            body |= {"disable_spec_decode": not options.drafts, "spaceport": {"fork": options.fork, "threads": True}}
        return body

    def _find(self, model: str | None) -> tuple[str, bool]:
        """The name of the model to ask, and whether Spaceport serves it."""
        with self._ask("/models") as response:
            try:
                entries = json.loads(response.read(_LONGEST))["data"]
                served = {str(entry["id"]): entry.get("owned_by") == "spaceport" for entry in entries}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise InputFault(f"{self._root}/models lists no models: expected the API of OpenAI") from error
        if model is None and len(served) == 1:
            return next(iter(served.items()))
        names = ", ".join(served) or "none"
        if model is None:
            raise OptionFault(f"{self._root} serves {len(served)} models: choose one with --model: {names}")
        if model not in served:
            raise OptionFault(f"{self._root} has no model {model}: expected one of {names}")
        return model, served[model]

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._root + path, data, self._headers)
        try:
            return cast(HTTPResponse, self._opener.open(request, timeout=_TIMEOUT))
        except HTTPError as error:
            with error:
                raise ServiceFault(_sentence(self._root, error)) from None
        except (URLError, OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServiceFault(f"no service answers at {self._root}: {reason}") from error


def root_of(address: str) -> str:
    """The address of a service up to /v1."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise OptionFault(f"{address!r} is no address of a service: expected one such as http://127.0.0.1:8000")
    root = address.rstrip("/")
    return root if root.endswith("/v1") else f"{root}/v1"


def _sentence(root: str, error: HTTPError) -> str:
    """What a status means for the user."""
    try:
        said = str(json.loads(error.read(_LONGEST))["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError, HTTPException, RecursionError):
        said = error.reason
    if error.code in (401, 403):
        return f"{root} wants a valid key: give its file with --api-key-file, or set SPACEPORT_API_KEY"
    if error.code == 404:
        return f"{root} has no such model or path: {said}"
    if error.code in (429, 503):
        return f"{root} is busy or not ready: {said}; try again"
    if 300 <= error.code < 400:
        return f"{root} redirects to {error.headers.get('Location', 'another address')}: give that address instead"
    return f"{root} answered with status {error.code}: {said}"


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream until its last one."""
    try:
        while line := response.readline(_LONGEST):
            field, _, content = line.strip().partition(b":")
            if field != b"data":
                continue
            if content.strip() == b"[DONE]":
                return
            event = json.loads(content)
            if not isinstance(event, dict):
                raise ServiceFault("the service sent an event that is no JSON object")
            if failure := event.get("error"):
                said = failure.get("message") if isinstance(failure, dict) else failure
                raise ServiceFault(f"the service ended the answer: {said}")
            yield event
    except (ValueError, OSError, HTTPException, RecursionError) as error:
        raise ServiceFault(f"the connection to the service broke: {error}") from error
    raise ServiceFault("the connection to the service broke before the answer ended")


def _spans(choice: Mapping[str, Any]) -> Iterator[Span]:
    """The text of an event; with the source of each token if the service reports it."""
    text = (choice.get("delta") or {}).get("content") or ""
    pieces = (choice.get("spaceport") or {}).get("pieces") or ()
    if text and "".join(piece["text"] for piece in pieces) == text:
        for piece in pieces:
            source = piece.get("source")
            yield Span(piece["text"], bool(piece.get("drafted")), source if isinstance(source, str) else None)
    elif text:
        yield Span(text, False)


def _statistics(event: Mapping[str, Any], ending: str, asked: float, first: float | None) -> AnswerStatistics | None:
    usage, metrics = event.get("usage"), event.get("metrics") or {}
    if usage is None:
        return None
    seconds, drafts = metrics.get("generation_time_ms"), metrics.get("speculative_decoding") or {}
    queued, waited = metrics.get("queue_time_ms", 0.0), metrics.get("time_to_first_token_ms")
    return AnswerStatistics(
        tokens=usage["completion_tokens"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        steps=drafts.get("num_spec_steps"),
        first_token_seconds=waited / 1e3 if waited else None if first is None else first - asked,
        seconds=(seconds - queued) / 1e3 if seconds else time.monotonic() - asked,
        ending=ending,
    )
