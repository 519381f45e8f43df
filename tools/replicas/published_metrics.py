"""Published metrics: the counters of a replica's service, in the metrics of its Ray cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.metrics import Gauge

from spaceport.serving.metrics import Metrics, MetricSample

_INTERVAL = 5.0  # seconds; Ray collects every 10


async def publish(metrics: Metrics, prefix: str) -> None:
    """Publish the counters of a service until the task is cancelled."""
    gauges: dict[str, Any] = {}
    while True:
        for sample in metrics.samples():
            name = f"{prefix}_{sample.name}"
            if name not in gauges:
                gauges[name] = _gauge(name, sample)
            gauges[name].set(sample.value, tags=sample.labels)
        await asyncio.sleep(_INTERVAL)


def _gauge(name: str, sample: MetricSample) -> Any:
    """A metric of Ray that takes values as they are: its counters only add, and its histograms only observe."""
    return Gauge(name, description=sample.text, tag_keys=tuple(sample.labels))
