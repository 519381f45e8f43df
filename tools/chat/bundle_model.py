"""Bundle model: a bundle that answers chat messages in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.tools.chat.chat_model import AnswerOptions, AnswerStatistics
from spaceport.tools.terminal.lanes import Lanes, Span


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
            self.statistics = _statistics(stream.completion())

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


def _statistics(completion: Completion) -> AnswerStatistics:
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
