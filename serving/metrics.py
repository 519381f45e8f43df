"""The counters of a service in Prometheus' text format, with vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.scheduling.worker import RuntimeStatus
from spaceport.serving.audit import AuditResult, CompletionAudit

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

# The state of each model by name.
States = Callable[[], dict[str, RuntimeStatus]]


def _slots_by_state(status: RuntimeStatus) -> dict[str, float]:
    """KV slots of running requests, of ended ones that others may reuse, and all others."""
    cached = min(status.cached_tokens, status.kv_slots - status.kv_slots_used)
    return {"used": status.kv_slots_used, "cached": cached, "free": status.kv_slots - status.kv_slots_used - cached}


_GAUGES: dict[str, tuple[str, Callable[[RuntimeStatus], float]]] = {
    "num_requests_running": ("Requests that have KV slots.", lambda status: status.active_requests),
    "num_requests_waiting": ("Requests that wait.", lambda status: status.queued_requests),
    "kv_cache_usage_perc": ("Share of the KV slots in use.", lambda status: status.kv_slots_used / status.kv_slots),
    "tokens_per_second": ("Generated tokens per second, last 10 s.", lambda status: status.tokens_per_second),
    "cached_tokens": ("Tokens of ended requests that others may reuse.", lambda status: status.cached_tokens),
}

# What a model has of something by state, in one metric.
_STATES: dict[str, tuple[str, Callable[[RuntimeStatus], dict[str, float]]]] = {
    "threads": (
        "Threads of running requests.",
        lambda status: {"live": status.live_threads, "queued": status.queued_threads},
    ),
    "slots": ("KV slots of all requests that can run.", _slots_by_state),
}

_AUDITED = {
    "checked": "Completions that were generated again without drafts and compared.",
    "equal": "Of these, completions with the same tokens.",
    "near_tie": "Of these, completions that differ at tokens that are equally probable up to rounding.",
    "fault": "Of these, completions with a token that plain decoding does not select.",
    "skipped": "Completions that were to be compared, but too many waited, or the service stopped.",
}


_BY_KEY = {
    "completions": "Completions, by digits of the digest of the client's key.",
    "prompt_tokens": "Prompt tokens, by key.",
    "generation_tokens": "Generated tokens, by key.",
}


class Metrics(Collector):
    """The counters of one service and the state of its models, in a registry of its own."""

    def __init__(self, prefix: str, states: States, by_key: bool = False) -> None:
        self._prefix = prefix
        self._states = states
        self._registry = CollectorRegistry()
        self._registry.register(self)
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
        self._by_key = {
            name: Counter(f"{prefix}:key_{name}", text, ["key"], registry=self._registry)
            for name, text in (_BY_KEY.items() if by_key else ())
        }
        self._audited = {name: counter(f"exactness_{name}", text) for name, text in _AUDITED.items()}
        disabled = "1 after a fault has switched drafts off."
        self._drafts_disabled = Gauge(f"{prefix}:drafts_disabled", disabled, ["model_name"], registry=self._registry)
        coverage = "Share of the completions to be compared with plain decoding that have been compared."
        self._coverage = Gauge(f"{prefix}:audit_coverage", coverage, ["model_name"], registry=self._registry)

    def begin_audit(self, model: str, audit: CompletionAudit) -> None:
        """Show the counters of an audit, and whether the model still drafts."""
        for counter in self._audited.values():
            counter.labels(model)
        self._drafts_disabled.labels(model).set_function(lambda: not audit.drafts)
        self._coverage.labels(model).set_function(lambda: audit.coverage)

    def audited(self, model: str, result: AuditResult) -> None:
        """Count a completion that was audited or skipped."""
        self._audited[result].labels(model).inc()
        if result != "skipped":
            self._audited["checked"].labels(model).inc()

    def refused(self, reason: str) -> None:
        """Count a request that was not admitted."""
        self._refused.labels(reason).inc()

    def ended(
        self, model: str, reason: str, statistics: Statistics, first: bool = True, key: str | None = None
    ) -> None:
        """Count a completion that has ended; `first`: it is the first one of its prompt, whose tokens count once."""
        if self._by_key and key is not None:
            self._by_key["completions"].labels(key).inc()
            self._by_key["prompt_tokens"].labels(key).inc(statistics.prompt_tokens if first else 0)
            self._by_key["generation_tokens"].labels(key).inc(statistics.tokens)
        self._prompt_tokens.labels(model).inc(statistics.prompt_tokens if first else 0)
        self._tokens.labels(model).inc(statistics.tokens)
        self._ended.labels(model, reason).inc()
        self._drafts.labels(model).inc(statistics.steps)
        self._draft_tokens.labels(model).inc(sum(statistics.drafted_by_depth))
        self._accepted.labels(model).inc(sum(statistics.accepted_by_depth))
        for depth, count in enumerate(statistics.accepted_by_depth):
            self._by_depth.labels(model, str(depth)).inc(count)
        for source, count in statistics.accepted_by_source.items():
            self._by_source.labels(model, source).inc(count)
        for limit, count in statistics.drafts_limited.items():
            self._limited.labels(model, limit).inc(count)
        for kind, count in _rows(statistics).items():
            self._rows.labels(model, kind).inc(count)
        self._outside.labels(model).inc(statistics.outside_seconds)
        self._times(model, statistics)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The state of each model now."""
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

    def text(self) -> bytes:
        """All counters in Prometheus' text format."""
        return generate_latest(self._registry)

    def samples(self) -> Iterator[tuple[str, Sample]]:
        """What each counter counts, with its values: a histogram has one for each bucket, its sum and its count."""
        for family in self._registry.collect():
            for sample in family.samples:
                if sample.name.startswith(f"{self._prefix}:") and not sample.name.endswith("_created"):
                    yield family.documentation, sample

    def _times(self, model: str, statistics: Statistics) -> None:
        self._whole.labels(model).observe(statistics.seconds)
        self._queued.labels(model).observe(statistics.waiting_seconds)
        if statistics.tokens:
            decoding = max(0.0, statistics.seconds - statistics.first_token_seconds)
            self._first.labels(model).observe(statistics.first_token_seconds)
            self._prefill.labels(model).observe(max(0.0, statistics.first_token_seconds - statistics.waiting_seconds))
            self._decode.labels(model).observe(decoding)
            if statistics.tokens > 1:
                self._between.labels(model).observe(decoding / (statistics.tokens - 1))


def _rows(statistics: Statistics) -> dict[str, int]:
    drafts = statistics.candidate_rows + statistics.mask_rows
    return {
        "known": statistics.rows - drafts,
        "candidate": statistics.candidate_rows,
        "mask": statistics.mask_rows,
        "padding": statistics.padding_rows,
    }
