"""Chat runtime: the demo model's tokenizer and template over a fake engine, and a service with it that runs."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette

from spaceport.graphs.contract.draft_methods import LOOKUP_ONLY, DraftMethod
from spaceport.graphs.contract.manifest import TEMPLATE_FILE, TOKENIZER_FILE, FileRecord, Manifest, TokenIds
from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import Batch, Engine, Moves, capacity_for
from spaceport.runtime.scheduling.worker import RuntimeStatus
from spaceport.runtime.session import Runtime
from spaceport.serving.application import Opener, application
from spaceport.serving.options import ServiceOptions
from spaceport.serving.server import Server, configuration, listening
from spaceport.serving.service import Service
from support.hash_engine import FREE_ROWS
from support.paths import DEMO

NO_DRAFTS = {"mask_slots": 0, "lookup": 0}  # of the object `spaceport` of requests

_VOCAB = 1280
_BEGIN, _MASK, _FORK, _CHILD = 0, 1264, 1265, 1266
_END = (1, 3)
_WORDS = slice(4, _MASK - 1)  # tokens with text; the one before the mask token may be a special one of tool files
_FORKING = 40  # after one token in this many, a thread forks
_RIGHT = 0.7  # share of the tokens after which mask slots predict what follows
_REPEATED = 32  # positions in which the same tokens follow each other


def only(text: str) -> dict[str, str]:
    """The object `spaceport` of requests whose answer is this text."""
    return {"regex": re.sub(r"[^\w\s<>]", r"\\\g<0>", text, flags=re.ASCII)}  # \\< and \\> are borders of words


@functools.cache
def _table() -> NDArray[np.float32]:
    """Logits after each token, see `_line`."""
    table = np.random.default_rng(0).normal(0, 1.5, (_VOCAB, _VOCAB)).astype(np.float32)
    table[:, : _WORDS.start] = table[:, _WORDS.stop :] = -4
    table[::_FORKING, _FORK] = 9
    return table


@functools.cache
def _following() -> NDArray[np.int64]:
    """The most probable word in each line of the table."""
    found: NDArray[np.int64] = _table()[:, _WORDS].argmax(axis=1) + _WORDS.start
    return found


def _line(token: Any, position: Any) -> Any:
    """The line of the table after a token at a position: texts repeat a little, for prompt lookup."""
    return (token + position // _REPEATED * 37) % _VOCAB


@dataclass
class ChatEngine(Engine):
    """An engine whose next token depends on the last one and its position; most predictions of its mask slots are right."""

    capacity: int
    requests: int
    delay: float = 0.0  # seconds of a call
    device: str = "none"
    parks: bool = True
    signature = Signature(1, 1, 1, _VOCAB, "float32", "scatter")
    costs = FREE_ROWS

    def __post_init__(self) -> None:
        self.rows = self.capacity
        self._cells = np.full((2, self.requests, self.capacity), -1)  # token and position in each slot

    def run(self, batch: Batch) -> NDArray[np.float32]:
        time.sleep(self.delay)
        lines = np.arange(batch.first, batch.first + batch.requests)[:, None]
        self._cells[:, lines, batch.slot_ids] = batch.input_ids, batch.position_ids
        needed, positions = (
            np.take_along_axis(array, batch.logit_rows, axis=1) for array in (batch.input_ids, batch.position_ids)
        )
        logits = _table()[_line(needed, positions)]
        for line, out in np.argwhere(needed == _MASK):
            logits[line, out] = self._draft(batch, int(line), int(batch.logit_rows[line, out]))
        return logits

    def _draft(self, batch: Batch, line: int, row: int) -> NDArray[np.float32]:
        tokens, positions = self._cells[:, batch.first + line]
        seen = np.flatnonzero(batch.attention_mask[line, 0, row])
        known = seen[tokens[seen] != _MASK]
        last = known[positions[known].argmax()]
        token, position = int(tokens[last]), int(positions[last])
        is_right = token % 10 < 10 * _RIGHT
        while position < batch.position_ids[line, row]:
            token, position = int(_following()[_line(token, position)]), position + 1
        logits = _table()[_line(token, position)]
        return logits if is_right else np.roll(logits, 1)

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        assert not any(sources.size for sources, _ in moves)

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        self._cells[:, target, : slots.size] = self._cells[:, source, slots]

    def saved(self, request: int, slots: int) -> NDArray[np.int64]:
        return self._cells[:, request, :slots].copy()

    def restore(self, request: int, rows: NDArray[np.int64]) -> None:
        self._cells[:, request, : rows.shape[1]] = rows

    def clear(self, request: int) -> None:
        self._cells[:, request] = -1


def chat_runtime(
    folder: Path = DEMO, *, requests: int = 4, delay: float = 0.0, drafts: bool = True, **options: Any
) -> Runtime:
    """A runtime that chats; `folder` has a tokenizer and perhaps a chat template, `options` are those of `Runtime`.

    Without `drafts` it has neither mask slots nor forks.
    """
    contents = {
        file.name: file.read_bytes() for file in folder.iterdir() if file.name in (TEMPLATE_FILE, TOKENIZER_FILE)
    }
    files = {name: FileRecord(sha256(content).hexdigest(), len(content)) for name, content in contents.items()}
    manifest = Manifest(
        signature=ChatEngine.signature,
        tokens=TokenIds(mask=(_MASK,), fork=_FORK, child=_CHILD, end=_END) if drafts else TokenIds(end=_END),
        drafts=DraftMethod(max_tokens=5) if drafts else LOOKUP_ONLY,
        max_positions=1024,
        model_type="llama",
        parameters=1,
        opset=23,
        attention="plain",
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        files=files,
        provenance={"name": "Demo"},
    )
    length = options.pop("max_seq_len", 1024)
    engine = ChatEngine(capacity_for(manifest, length), requests, delay)
    return Runtime(Bundle(folder, manifest), engine, length, **{"prefix_cache": True, **options})


_WAIT = 60.0  # seconds for anything that has to happen


@dataclass(frozen=True)
class RunningService:
    """A running service."""

    url: str  # with the path /v1
    service: Service
    server: Server

    @property
    def statuses(self) -> dict[str, RuntimeStatus]:
        """The state of each model."""
        return {model.name: model.runtime.status() for model in self.service.models.values()}

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits; fails if one goes on."""
        wait_until(lambda: not any(one.active_requests or one.queued_requests for one in self.statuses.values()))
        assert all(one.kv_slots_used == 0 for one in self.statuses.values())

    def wait_until_busy(self) -> None:
        """Wait until a request runs."""
        wait_until(lambda: any(one.active_requests for one in self.statuses.values()))


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + _WAIT
    while not done():
        assert time.monotonic() < end, f"it does not happen within {_WAIT} seconds"
        time.sleep(0.01)


@contextmanager
def running_service(
    openers: Mapping[str, Opener], options: ServiceOptions | None = None, answers_while_opening: bool = False
) -> Iterator[RunningService]:
    """Serve bundles on a free port, in a thread of this process."""
    app: Starlette = application(openers, options or ServiceOptions(), answers_while_opening=answers_while_opening)
    server = Server(configuration(app), app.state.service)
    with listening("127.0.0.1", 0) as listener:
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            yield RunningService(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", app.state.service, server)
        finally:
            server.should_exit = True
            thread.join(_WAIT)
