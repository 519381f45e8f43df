"""Metrics: counters of a service in Prometheus' text format, with vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.scheduling.status import RuntimeStatus
from spaceport.tools.serve.audit import AuditResult

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

# The state of each model by name.
States = Callable[[], dict[str, RuntimeStatus]]

_GAUGES: dict[str, tuple[str, Callable[[RuntimeStatus], float]]] = {
    "num_requests_running": ("Requests that have KV slots.", lambda one: one.active_requests),
    "num_requests_waiting": ("Requests that wait.", lambda one: one.queued_requests),
    "kv_cache_usage_perc": ("Share of the KV slots in use.", lambda one: one.kv_slots_used / one.kv_slots),
    "tokens_per_second": ("Generated tokens per second, last 10 s.", lambda one: one.tokens_per_second),
    "cached_tokens": ("Tokens of ended requests that others may reuse.", lambda one: one.cached_tokens),
}

# What a model has of something by state, in one metric.
_STATES: dict[str, tuple[str, Callable[[RuntimeStatus], dict[str, float]]]] = {
    "threads": ("Threads of running requests.", lambda one: {"live": one.live_threads, "queued": one.queued_threads}),
    "slots": ("KV slots of all requests that can run.", lambda one: _slots(one)),
}


def _slots(status: RuntimeStatus) -> dict[str, float]:
    """KV slots of running requests, of ended ones that others may reuse, and all others."""
    cached = min(status.cached_tokens, status.kv_slots - status.kv_slots_used)
    return {"used": status.kv_slots_used, "cached": cached, "free": status.kv_slots - status.kv_slots_used - cached}


_AUDITED = {
    "checked": "Completions that were generated again without drafts and compared.",
    "equal": "Of these, completions with the same tokens.",
    "near_tie": "Of these, completions that differ at tokens that are equally probable up to rounding.",
    "fault": "Of these, completions with a token that plain decoding does not select.",
    "skipped": "Completions that were to be compared, but clients waited.",
}


@dataclass(frozen=True)
class Sample:
    """One value of a metric."""

    name: str  # without the prefix, as in Prometheus' text format
    text: str  # what the metric counts
    labels: dict[str, str]
    value: float


class _Gauges(Collector):
    """The state of each model at the moment of the request."""

    def __init__(self, prefix: str, states: States) -> None:
        self._prefix = prefix
        self._states = states

    def collect(self) -> Iterable[GaugeMetricFamily]:
        states = self._states()
        for name, (text, value) in _GAUGES.items():
            family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            for model, status in states.items():
                family.add_metric([model], value(status))
            yield family
        for name, (text, values) in _STATES.items():
            family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name", "state"])
            for model, status in states.items():
                for state, count in values(status).items():
                    family.add_metric([model, state], count)
            yield family


class Metrics:
    """The counters of one service, in a registry of its own."""

    def __init__(self, prefix: str, states: States) -> None:
        self._prefix = prefix
        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(prefix, states))
        ProcessCollector(registry=self._registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, ["model_name", *labels], registry=self._registry)

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f"{prefix}:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        self._tokens = counter("generation_tokens", "Generated tokens.")
        self._ended = counter("request_success", "Answered requests.", "finished_reason")
        self._refused = Counter(
            f"{prefix}:admission_rejections", "Refused requests.", ["reason"], registry=self._registry
        )
        self._drafts = counter("spec_decode_num_drafts", "Decode steps.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._by_depth = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by depth in the draft.", "position"
        )
        self._by_source = counter("accepted_tokens", "Accepted draft tokens by source.", "source")
        self._limited = counter(
            "drafts_limited", "Steps in which a draft was narrower than its limits allow, by reason.", "reason"
        )
        self._rows = counter("rows", "Rows of all steps by what they hold.", "kind")
        self._outside = counter("time_outside_engine_seconds", "Seconds between engine calls.")
        self._first = histogram("time_to_first_token_seconds", "Seconds to the first token.")
        self._between = histogram("inter_token_latency_seconds", "Mean seconds between tokens.", _TOKEN_SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "Seconds of a request.")
        self._queued = histogram("request_queue_time_seconds", "Seconds in the queue.")
        self._prefill = histogram("request_prefill_time_seconds", "Seconds from the first step to the first token.")
        self._decode = histogram("request_decode_time_seconds", "Seconds from the first token to the last one.")
        self._audited = {name: counter(f"exactness_{name}", text) for name, text in _AUDITED.items()}
        self._drafts_disabled = Gauge(
            f"{prefix}:drafts_disabled",
            "1 after a fault has switched drafts off.",
            ["model_name"],
            registry=self._registry,
        )

    def begin_audit(self, model: str, drafts: Callable[[], bool]) -> None:
        """Show the counters of an audit, and whether the model still drafts."""
        for counter in self._audited.values():
            counter.labels(model)
        self._drafts_disabled.labels(model).set_function(lambda: not drafts())

    def audited(self, model: str, result: AuditResult) -> None:
        """Count a completion that was audited or skipped."""
        self._audited[result].labels(model).inc()
        if result != "skipped":
            self._audited["checked"].labels(model).inc()

    def refused(self, reason: str) -> None:
        """Count a request that was not admitted."""
        self._refused.labels(reason).inc()

    def ended(self, model: str, reason: str, found: Statistics, first: bool = True) -> None:
        """Count a completion that has ended; `first`: it is the first one of its prompt, whose tokens count once."""
        self._prompt_tokens.labels(model).inc(found.prompt_tokens if first else 0)
        self._tokens.labels(model).inc(found.tokens)
        self._ended.labels(model, reason).inc()
        self._drafts.labels(model).inc(found.steps)
        self._draft_tokens.labels(model).inc(sum(found.drafted_by_depth))
        self._accepted.labels(model).inc(sum(found.accepted_by_depth))
        for depth, count in enumerate(found.accepted_by_depth):
            self._by_depth.labels(model, str(depth)).inc(count)
        for source, count in found.accepted_by_source.items():
            self._by_source.labels(model, source).inc(count)
        for limit, count in found.drafts_limited.items():
            self._limited.labels(model, limit).inc(count)
        for kind, count in _rows(found).items():
            self._rows.labels(model, kind).inc(count)
        self._outside.labels(model).inc(found.outside_seconds)
        self._times(model, found)

    def text(self) -> bytes:
        """All counters in Prometheus' text format."""
        return generate_latest(self._registry)

    def samples(self) -> Iterator[Sample]:
        """The counters of the service as single values: a histogram has one for each bucket, its sum and its count."""
        for family in self._registry.collect():
            for one in family.samples:
                if one.name.startswith(f"{self._prefix}:") and not one.name.endswith("_created"):
                    yield Sample(one.name.partition(":")[2], family.documentation, dict(one.labels), one.value)

    def _times(self, model: str, found: Statistics) -> None:
        self._whole.labels(model).observe(found.seconds)
        self._queued.labels(model).observe(found.waiting_seconds)
        if found.tokens:
            decoding = max(0.0, found.seconds - found.first_token_seconds)
            self._first.labels(model).observe(found.first_token_seconds)
            self._prefill.labels(model).observe(max(0.0, found.first_token_seconds - found.waiting_seconds))
            self._decode.labels(model).observe(decoding)
            if found.tokens > 1:
                self._between.labels(model).observe(decoding / (found.tokens - 1))


def _rows(found: Statistics) -> dict[str, int]:
    """The rows of a completion by what they hold."""
    drafts = found.candidate_rows + found.mask_rows
    return {
        "known": found.rows - drafts,
        "candidate": found.candidate_rows,
        "mask": found.mask_rows,
        "padding": found.padding_rows,
    }
