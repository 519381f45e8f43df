"""One request that generates, from its body to the end of its completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.limits import Limits
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.scheduling.stream import AsyncStream
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.text.transcript import Piece
from spaceport.runtime.trace import TraceReader
from spaceport.serving.bodies import GenerationBody, read_body
from spaceport.serving.clients import Client, client_of
from spaceport.serving.event_stream import left
from spaceport.serving.failures import Failure, invalid, overloaded
from spaceport.serving.options import ServiceOptions
from spaceport.serving.request_log import RequestRecord, record_of
from spaceport.serving.service import ServedModel, Service, service_of
from spaceport.serving.tool_use import NO_TOOLS, ToolUse

GeneratingBody = TypeVar("GeneratingBody", bound=GenerationBody)
_Result = TypeVar("_Result")
_SEEDS = 2**64
_REASONS = {"end": "stop", "stop": "stop"}  # all others: "length"


def finish_reason(ending: str, has_calls: bool = False) -> str:
    """Why an answer ended, in the words of OpenAI's API."""
    reason = _REASONS.get(ending, "length")
    return "tool_calls" if has_calls and reason == "stop" else reason


async def generation_body(request: Request, kind: type[GeneratingBody]) -> GeneratingBody:
    """The body of a request that generates; raises while the service takes none, and if it has no such model."""
    service = service_of(request)
    if service.completions:
        await service.spacing.begin()
    if service.draining:
        raise overloaded("the service is stopping", "stopping")
    service.require_open()
    body = await read_body(request, kind)
    record_of(request).model = service.model(body.model).name
    return body


def _biases(body: GenerationBody) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    except ValueError as error:
        raise Failure(400, f"logit_bias: {error}: expected token ids as keys", param="logit_bias") from error


def _sampling(body: GenerationBody, suggested: Mapping[str, Any], choice: int) -> Sampling:
    """How tokens are chosen: as the request says, else as the model's publisher suggests, else as in OpenAI's API."""
    values, biases = body.chosen(Sampling, suggested), _biases(body)
    seed = None if body.seed is None else (body.seed + choice) % _SEEDS
    top_k = 0 if values["top_k"] == -1 else values["top_k"]  # vLLM spells "all tokens" as -1
    kept = {token: bias for token, bias in biases.items() if bias != -100}  # which bans a token, as OpenAI's API says
    return Sampling(
        **values | {"seed": seed, "top_k": top_k, "logit_bias": kept, "banned": biases.keys() - kept.keys()}
    )


def _grammar(body: GenerationBody, tools: ToolUse) -> Grammar | None:
    own = body.chosen(Grammar)
    grammars = [*([] if tools.grammar is None else [tools.grammar]), *body.formats()]
    if own["regex"] is not None or own["json_schema"] is not None:
        grammars.append(Grammar(**own))
    if len(grammars) > 1:
        expected = "expected one of response_format, tool_choice and a grammar in spaceport"
        raise Failure(400, f"the request has several grammars: {expected}")
    return grammars[0] if grammars else None


def _check_sizes(body: GenerationBody, limits: Limits) -> None:
    """Raise for lists beyond the limits, before anything is computed from them for each choice."""
    if isinstance(body.stop, list):
        limits.check("stop has", len(body.stop), "stop_strings", " stop strings")
    limits.check("stop_token_ids has", len(body.stop_token_ids or ()), "banned_tokens", " entries")
    biases = len(body.logit_bias or ())
    if biases > limits.bias_entries + limits.banned_tokens:  # a bias of -100 bans a token
        limits.check("logit_bias has", biases, "bias_entries", " entries")


def decodings_of(
    body: GenerationBody, model: ServedModel, options: ServiceOptions, tools: ToolUse = NO_TOOLS
) -> list[Decoding]:
    choices = 1 if body.n is None else body.n
    if not 1 <= choices <= options.most_choices:
        raise invalid("n", f"is {choices}: expected 1 to {options.most_choices}")
    _check_sizes(body, model.runtime.limits)
    grammar = _grammar(body, tools)
    suggested = model.runtime.bundle.manifest.generation_config
    if not suggested.get("do_sample"):
        suggested = {}
    decoding = Decoding(
        **body.chosen(Decoding)
        | {
            "max_tokens": body.most_tokens(),
            "timeout": options.request_timeout,
            "logprobs": body.top_tokens(),
            "grammar": grammar,
            **({"skip_special_tokens": False} if tools.shows_special_tokens else {}),
        }
    )
    return [replace(decoding, sampling=_sampling(body, suggested, choice)) for choice in range(choices)]


@dataclass
class Call:
    """One request that generates: who sent it, what it asks of which model, and its completions."""

    service: Service
    client: Client
    record: RequestRecord
    receive: Receive  # says when the client leaves
    model: ServedModel
    body: GenerationBody
    tools: ToolUse
    decodings: list[Decoding]  # of each choice of a prompt
    streams: list[AsyncStream] = field(default_factory=list)  # the choices of a prompt follow each other
    completions: dict[int, Completion] = field(default_factory=dict)  # that are complete, by index of the stream
    endings: dict[int, str] = field(default_factory=dict)  # of those that end otherwise than their completions
    _open: list[tuple[int, AsyncStream]] = field(default_factory=list)  # of which no end has been counted
    _traces: dict[int, TraceReader] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, body: GenerationBody) -> Call:
        """The call of a request with this body; raises if its tools or options are invalid."""
        service, client = service_of(request), client_of(request)
        model = service.model(body.model)
        tools = body.tool_use(model, service.options)
        decodings = [client.applied_to(decoding) for decoding in decodings_of(body, model, service.options, tools)]
        if model.audit is not None:
            decodings = [model.audit.applied_to(decoding) for decoding in decodings]
        return cls(service, client, record_of(request), request.receive, model, body, tools, decodings)

    async def begin(self, prompts: Sequence[Prompt]) -> None:
        """Submit all completions; raises the error of an invalid request or a full queue, and then none runs."""
        count = len(prompts) * len(self.decodings)
        if self.model.audit is not None:
            await self.model.audit.give_way(count)
        self.service.begin(self.client.tenant, count)
        try:
            await self._submit(prompts)
        except BaseException as error:
            self.service.end(self.client.tenant, count)
            grammar = self.tools.grammar
            if isinstance(error, OptionFault) and grammar is not None and str(error).startswith(grammar.label):
                raise Failure(400, str(error), param="tools") from error
            raise

    async def _submit(self, prompts: Sequence[Prompt]) -> None:
        """Submit all completions: further choices of a prompt get its tokens, so that it is tokenized once."""
        runtime, (first, *others) = self.model.runtime, self.decodings
        leads: list[AsyncStream] = []
        try:
            leads.extend(runtime.astream(prompt, first) for prompt in prompts)
            for lead, prompt in zip(leads, prompts, strict=True):
                self.streams.append(lead)
                await lead.submitted()
                tokens = lead.prompt_tokens or prompt  # without tokens, its time is over
                self.streams += [runtime.astream(tokens, decoding) for decoding in others]
                await asyncio.sleep(0)  # the choices of a prompt take milliseconds
            for stream in self.streams:
                await stream.submitted()
        except BaseException:
            for stream in (*leads, *self.streams):
                stream.close()
            raise
        self._open = list(enumerate(self.streams))

    def ended(self, index: int, ending: str, statistics: Statistics) -> None:
        """Count a choice that has ended, in the metrics and the log entry."""
        reason = "abort" if ending == "cancelled" else finish_reason(ending)
        is_first = index % len(self.decodings) == 0  # of its prompt
        self.service.metrics.ended(self.model.name, reason, statistics, is_first, self.client.key)
        self.record.ended(ending, statistics)

    def close(self) -> None:
        """Count all completions, and cancel those that have not ended."""
        streams, self._open = self._open, []
        for index, stream in streams:
            stream.close()
            completion = self.completions.get(index)
            ending = "cancelled" if completion is None else self.endings.get(index, completion.ending)
            self.ended(index, ending, stream.statistics)
            self.service.end(self.client.tenant)
            if completion is not None and self.model.audit is not None:
                self.model.audit.offer(self.decodings[index % len(self.decodings)], completion)

    @property
    def statistics(self) -> list[Statistics]:
        """Counts and times of each completion so far."""
        return [stream.statistics for stream in self.streams]

    async def unless_gone(self, work: Awaitable[_Result]) -> _Result:
        """The result of work that is cancelled when the client leaves."""
        gone, task = asyncio.create_task(left(self.receive)), asyncio.ensure_future(work)
        try:
            await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Failure(499, "the client has left")
            return task.result()
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def new_steps(self, index: int) -> dict[str, Any] | None:
        """The steps of a choice since the last call, as data of its trace; None without new ones or without a trace."""
        trace = self.streams[index].trace
        if trace is None:
            return None
        if index not in self._traces:
            self._traces[index] = TraceReader(trace, self.model.runtime.tokenizer)
        return self._traces[index].fresh()

    async def whole(self) -> list[Completion]:
        """All completions, once they have ended."""
        completions = await asyncio.gather(*(stream.completion() for stream in self.streams))
        self.completions = dict(enumerate(completions))
        return completions

    async def pieces(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        """The index of a choice with its next pieces, which one step generated; no pieces at its end.

        Its completion then has no log probabilities: they came with the pieces, and a slow client would keep them.
        """
        if len(self.streams) == 1:  # needs neither a queue nor a task, which cost as much as the text of a step
            (only,) = self.streams
            while pieces := await only.pieces():
                yield 0, pieces
            self.completions[0] = only.request.completion(with_logprobs=False)
            yield 0, []
            return
        async for index, pieces in self._pieces_of_all():
            yield index, pieces

    async def _pieces_of_all(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        """The next pieces of several choices as they come."""
        queue: asyncio.Queue[tuple[int, list[Piece] | Exception]] = asyncio.Queue(maxsize=len(self.streams))

        async def read(index: int, stream: AsyncStream) -> None:
            try:
                while pieces := await stream.pieces():
                    await queue.put((index, pieces))
                self.completions[index] = stream.request.completion(with_logprobs=False)
                await queue.put((index, []))
            except Exception as error:  # noqa: BLE001  (raised to the reader of the pieces)
                await queue.put((index, error))

        tasks = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(self.streams)]
        try:
            running = len(self.streams)
            while running:
                index, pieces = await queue.get()
                if isinstance(pieces, Exception):
                    raise pieces
                running -= not pieces
                yield index, pieces
        finally:
            for task in tasks:
                task.cancel()
