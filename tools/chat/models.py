"""What a conversation needs of a model, of a bundle in this process, and of a model behind the HTTP API of OpenAI."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, Protocol, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from spaceport.graphs.contract.faults import InputFault, OptionFault, SpaceportError
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.tools.terminal.generation import Lanes, Span


@dataclass(frozen=True)
class AnswerOptions:
    """Options of all answers; None: as the model's publisher or the service suggests."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    drafts: bool = True
    fork: bool = False


@dataclass(frozen=True)
class AnswerStatistics:
    """Counts and times of one answer; None: a service does not report it."""

    tokens: int
    prompt_tokens: int
    cached_tokens: int
    steps: int | None
    first_token_seconds: float | None
    seconds: float  # from the first step to the last one
    ending: str

    def line(self) -> str:
        """The statistics in one line."""
        found = [f"{self.tokens} tokens"]
        if self.seconds > 0:
            found.append(f"{self.tokens / self.seconds:.1f} tokens/s")
        if self.steps:
            found.append(f"{self.tokens / self.steps:.2f} tokens per step")
        found.append(f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached")
        if self.first_token_seconds is not None:
            found.append(f"first token after {self.first_token_seconds:.2f} s")
        if self.ending not in ("end", "stop"):
            found.append(f"ending: {self.ending}")
        return ", ".join(found)


class ChatModel(Protocol):
    """A model that answers chat messages."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def statistics(self) -> AnswerStatistics | None:
        """Those of the last answer; None if it did not end or its service reports none."""

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Span]:
        """The answer while it is generated; closing the iterator ends it."""

    def close(self) -> None:
        """Release what the model holds."""


class BundleModel:
    """An open bundle; with a prefix cache, the next turn does not compute the conversation again."""

    def __init__(self, runtime: Runtime, options: AnswerOptions) -> None:
        manifest = runtime.bundle.manifest
        if TEMPLATE_FILE not in manifest.files:
            raise InputFault(f"{runtime.bundle.path} has no chat template: expected the bundle of a chat model")
        self.name = runtime.bundle.path.name
        self.statistics: AnswerStatistics | None = None
        self._runtime = runtime
        self._decoding = Decoding(
            max_tokens=options.max_tokens,
            sampling=_sampling(options, manifest.generation_config),
            mask_slots=None if options.drafts else 0,
            lookup=None if options.drafts else 0,
            fork=options.fork,
        )

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Span]:
        """The answer while it is generated; closing the iterator ends it."""
        self.statistics = None
        lanes = Lanes(self._runtime.bundle.manifest.tokens.fork)
        with self._runtime.stream(list(messages), self._decoding) as stream:
            for piece in stream:
                yield from lanes.add(piece)
            self.statistics = _statistics_of_completion(stream.completion())

    def close(self) -> None:
        """Close the bundle."""
        self._runtime.close()


def _sampling(options: AnswerOptions, suggested: Mapping[str, Any]) -> Sampling:
    """As the options say, else as the model's publisher suggests, else greedy."""
    found = dict(suggested) if suggested.get("do_sample") else {}
    found |= {name: value for name in ("temperature", "top_p") if (value := getattr(options, name)) is not None}
    temperature = found.get("temperature", 1.0 if suggested.get("do_sample") else 0.0)
    if not temperature:
        return Sampling()
    known = {name: found[name] for name in ("top_k", "top_p", "min_p", "repetition_penalty") if name in found}
    return Sampling(temperature=temperature, seed=options.seed, **known)


def _statistics_of_completion(completion: Completion) -> AnswerStatistics:
    found = completion.statistics
    return AnswerStatistics(
        tokens=found.tokens,
        prompt_tokens=found.prompt_tokens,
        cached_tokens=found.cached_tokens,
        steps=found.steps,
        first_token_seconds=found.first_token_seconds,
        seconds=found.seconds - found.waiting_seconds,
        ending=completion.ending,
    )


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
            own: dict[str, Any] = {"fork": options.fork, "threads": True}
            body["spaceport"] = own if options.drafts else own | {"mask_slots": 0, "lookup": 0}
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
