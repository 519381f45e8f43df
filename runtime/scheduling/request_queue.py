"""The bounded queue in which requests wait, and the turns that tenants take: in the queue, for KV buffers and for steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import count
from threading import Lock

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.runtime.decode.sequence_group import SequenceGroup
from spaceport.runtime.scheduling.request import Request

_MANY_BESIDE = 2  # steps of tenants with several requests in a round, for each request of the others
_LEAST_ROUNDS = 8  # that a request keeps its KV buffers while tenants with several requests take turns
_MOST_PARKED = 2.0  # parked requests for each running one; a quarter of them for tenants with several requests


class QueueFull(SpaceportError, RuntimeError):
    """The queue of waiting requests is full; try again later."""


class RequestQueue:
    """The requests that wait, in turns of their tenants, so that those with several requests do not delay the others.

    What a tenant has taken out of the queue counts by its tokens: the one that would be served first is due, if all tenants
    that wait got equal numbers of tokens. The requests of one tenant are taken in the order in which they were prepared.
    Any OS thread may add and count requests; what takes the running requests is for that of the scheduler.
    """

    def __init__(self, limit: int, most_tokens: int | None = None) -> None:
        self.limit = limit  # requests beyond those that get KV buffers at once
        self._most_tokens = most_tokens  # prompt tokens of all waiting requests; None: any number
        self._prepared: list[Request] = []  # those of each tenant in order
        self._preparing: set[Request] = set()  # those that are tokenized, or wait for that
        self._clock = 0.0  # tokens that a tenant would have got that has waited from the beginning
        self._due: dict[str, float] = {}  # on this clock, when a tenant is due
        self._lock = Lock()
        self._loads = Counter[str]()  # requests of each tenant that have got KV buffers since it had none
        self._rounds = 0
        self._steps = count(1)

    def __len__(self) -> int:
        """Number of requests that wait, those that are being prepared included."""
        with self._lock:
            return len(self._waiting())

    def prepared(self) -> list[Request]:
        """The prepared requests that wait."""
        with self._lock:
            return list(self._prepared)

    @property
    def ready(self) -> bool:
        """Whether a prepared request waits."""
        return bool(self._prepared)

    def enter(self, request: Request, free: int) -> None:
        """Count a request that will be prepared; `free` others get KV buffers at once."""
        with self._lock:
            self._check(request, free, request.tokens, self.limit)
            self._preparing.add(request)

    def leave(self, request: Request) -> None:
        """Count a request no longer that was not prepared."""
        with self._lock:
            self._preparing.discard(request)

    def put(self, request: Request, sequences: SequenceGroup, free: int) -> None:
        """Add a prepared request, unless it has ended."""
        with self._lock:
            limit = None if request in self._preparing else self.limit
            self._preparing.discard(request)
            self._check(request, free, sequences.statistics.prompt_tokens, limit)
            if request.start(sequences):
                self._add(request, len(self._prepared))

    def put_back(self, request: Request) -> None:
        """Add a request that has run, before the others of its tenant."""
        with self._lock:
            self._add(request, 0)

    def take_all(self) -> list[Request]:
        """All prepared requests that wait."""
        with self._lock:
            prepared, self._prepared = self._prepared, []
        return prepared

    def preparing(self) -> list[Request]:
        """The requests that are being prepared."""
        with self._lock:
            return list(self._preparing)

    def remove_done(self) -> None:
        """Remove the requests that have ended."""
        with self._lock:
            self._keep([request for request in self._prepared if not request.done])

    def forget_tenants(self, running: Collection[Request]) -> None:
        """Begin to count the requests of a tenant anew if it has none."""
        for tenant in self._loads.keys() - {request.tenant for request in (*self.prepared(), *running)}:
            del self._loads[tenant]

    def next_round(self) -> None:
        """Begin a round, by which the turns of tenants are counted."""
        self._rounds += 1

    def admit(self, running: Collection[Request], free: bool, parks: bool) -> tuple[Request, Request | None] | None:
        """Take the next request that gets KV buffers, with the running one that it preempts if none are free.

        It preempts one only if the engine parks its rows. None: nobody is due.
        """
        request, preempted = self._next(running, free, parks)
        if request is None:
            return None
        self._take(request)
        request.admitted = self._rounds
        self._loads[request.tenant] += request.parked is None
        return request, preempted

    def stepping(self, decoding: Mapping[int, Request], rows: int) -> Mapping[int, Request]:
        """Those of the decoding requests that take a step in this round, of at most `rows` rows where tenants take turns.

        Beside tenants with one request, those with several take few steps, in turns, so that a round stays short.
        """
        if len(self._loads) < 2:
            return decoding
        loads = self._all_loads()
        many = {index: request for index, request in decoding.items() if loads[request.tenant] > 1}
        most = min(rows, _MANY_BESIDE * (len(decoding) - len(many)))
        if not most or len(many) <= most:
            return decoding
        by_turn = sorted(many, key=lambda index: many[index].stepped)
        for index in by_turn[:most]:
            many[index].stepped = next(self._steps)
        late = {*by_turn[most:]}
        return {index: request for index, request in decoding.items() if index not in late}

    def prompt_rows(self, request: Request, beside: Collection[Request], rows: int, few: int) -> int:
        """How many of these prompt rows a request may feed beside decoding ones.

        Beside tenants with one request, those with several get few rows, and in every second round only.
        """
        loads = self._all_loads()
        if loads[request.tenant] > 1 and any(loads[other.tenant] == 1 for other in beside):
            return min(rows, 0 if self._rounds % 2 else few)
        return rows

    def prompt_fed(self, index: int, running: dict[int, Request]) -> None:
        """Let the prompts of other tenants get the next prefill chunks, then the others of this one."""
        tenant = running[index].tenant
        for other in (*(other for other, request in running.items() if request.tenant == tenant), index):
            running[other] = running.pop(other)

    def may_lead(self, request: Request, running: Collection[Request]) -> list[Request]:
        """The running requests whose prompts come no later than that of a request."""
        loads = self._all_loads()
        return [other for other in running if other.tenant == request.tenant or loads[other.tenant] == 1]

    def _all_loads(self) -> Counter[str]:
        """Number of requests of each tenant that wait, run, or have run since it had none."""
        return self._loads + Counter(request.tenant for request in self.prepared())

    def _next(self, running: Collection[Request], free: bool, parks: bool) -> tuple[Request | None, Request | None]:
        """The next request, if a running one makes room or need not; its tenant then has less than that of the latter."""
        due = self._firsts()
        if free and due:
            return due[0], None
        loads = self._all_loads()
        several = [request for request in running if request.paused or loads[request.tenant] > 1]
        if not parks or not several:
            return None, None
        held = Counter(request.tenant for request in running)
        parked = sum(request.parked is not None for request in self.prepared())
        for request in due:
            tenant = request.tenant
            alone = loads[tenant] == 1
            if parked >= (_MOST_PARKED if alone else _MOST_PARKED / 4) * len(running):
                continue
            preemptible = [
                other
                for other in several
                if held[other.tenant] > held[tenant] + 1
                or (not held[tenant] and (alone or self._rounds - other.admitted >= _LEAST_ROUNDS))
            ]
            if preemptible:
                return request, max(preemptible, key=lambda other: (other.paused, held[other.tenant], other.admitted))
        return None, None

    def _firsts(self) -> list[Request]:
        """The next request of each tenant: first those that have run, then the one whose tenant is due first."""
        with self._lock:
            firsts: dict[str, Request] = {}
            for request in self._prepared:
                if not request.paused:
                    firsts.setdefault(request.tenant, request)
            return sorted(firsts.values(), key=lambda request: (request.parked is None, self._due[request.tenant]))

    def _take(self, request: Request) -> None:
        """Remove a request that was due."""
        with self._lock:
            if request not in self._prepared:  # all were taken meanwhile
                return
            if request.parked is None:
                tokens, tenant = request.sequences.max_length, request.tenant
                self._clock = max(self._clock, self._due[tenant]) + tokens / len(self._tenants())
                self._due[tenant] += tokens
            self._keep([other for other in self._prepared if other is not request])

    def _tenants(self) -> set[str]:
        return {request.tenant for request in self._prepared}

    def _add(self, request: Request, index: int) -> None:
        if request.tenant not in self._tenants():
            self._due[request.tenant] = max(self._clock, self._due.get(request.tenant, 0.0))
        self._prepared.insert(index, request)

    def _keep(self, waiting: list[Request]) -> None:
        """Keep these prepared requests; a tenant without any is forgotten once it has no more than the others."""
        self._prepared = waiting
        tenants = self._tenants()
        self._due = {
            tenant: due for tenant, due in self._due.items() if tenant in tenants or (waiting and due > self._clock)
        }

    def _waiting(self) -> list[Request]:
        # what has ended before its preparation began does not count, nor what has made room for another tenant
        self._preparing = {request for request in self._preparing if request.begun or not request.done}
        waiting = (*self._prepared, *self._preparing)
        return [request for request in waiting if not isinstance(request.asked, QueueFull)]

    def _check(self, request: Request, free: int, tokens: int, limit: int | None) -> None:
        """Raise `QueueFull` if too many requests wait, or too many prompt tokens; a single one may have any number.

        If another tenant has more than half of what waits, its last requests make room instead.
        """
        while (fault := self._fault(waiting := self._waiting(), free, tokens, limit)) is not None:
            last = _last_of_most(waiting, request.tenant)
            if last is None:
                raise fault
            last.end(QueueFull("other clients wait, and this one has most of the queue: send fewer requests at a time"))

    def _fault(self, waiting: list[Request], free: int, tokens: int, limit: int | None) -> QueueFull | None:
        """Why another request with this number of prompt tokens cannot wait."""
        if limit is not None and len(waiting) >= limit + free:
            return QueueFull(
                f"{len(waiting) - free} requests wait already, queue_limit is {limit}: try again later, or "
                "raise queue_limit or max_requests"
            )
        if self._most_tokens is None or len(waiting) <= free:
            return None
        count = tokens + sum(request.tokens for request in waiting)
        if count <= self._most_tokens:
            return None
        return QueueFull(
            f"the requests that wait have {count} prompt tokens, queued_prompt_tokens is {self._most_tokens}: try again "
            "later, or raise it in Limits"
        )


def _last_of_most(waiting: list[Request], tenant: str) -> Request | None:
    """The last request of another tenant that has more than half of the requests or of their prompt tokens; None: none has."""
    places, tokens = Counter[str](), Counter[str]()
    for request in waiting:
        places[request.tenant] += 1
        tokens[request.tenant] += request.tokens
    for shares in (places, tokens):
        most = max(shares, key=shares.__getitem__, default=tenant)
        if most != tenant and 2 * shares[most] > sum(shares.values()):
            owned = [request for request in waiting if request.tenant == most and request.asked is None]
            return max(owned, key=lambda request: request.number, default=None)
    return None
