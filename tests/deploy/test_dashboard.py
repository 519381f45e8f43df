"""Dashboard and alerts: they show what a service exports, under its names and labels."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from spaceport.serving.application import application
from spaceport.serving.options import ServiceOptions
from support.chat_runtime import chat_runtime
from support.deployment import MONITORING, dashboard, expressions, panels
from support.paths import ROOT

pytestmark = pytest.mark.on_change("deploy")

# Exported, and of no use on a dashboard.
UNUSED = {"process_virtual_memory_bytes"}
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
OWN = {"up"}  # metrics of Prometheus itself

# A metric with its matchers, and the labels of an aggregation with the metric that is aggregated.
METRIC = re.compile(r"\b((?:spaceport:|process_)\w+|up)\b(?:\{([^}]*)\})?")
GROUPED = re.compile(r"by \(([^)]*)\) \((?:\w+\()?([\w:]+)")


def metrics(query: str) -> set[str]:
    """The metrics in a query."""
    return {name for name, _ in METRIC.findall(query)}


Exported = dict[str, dict[str, set[str]]]  # sample -> label -> its values


@pytest.fixture(scope="module")
def ours() -> Exported:
    """What a service exports after requests of several kinds, an audit and a refusal."""
    app = application({"demo": chat_runtime}, ServiceOptions(audit_rate=1.0))
    with TestClient(app) as client:
        given = {"prompt": "import json\nimport json\n", "temperature": 0, "max_tokens": 16}
        for more in ({"n": 2}, {"max_tokens": 1}):  # the latter is too short for drafts
            assert client.post("/v1/completions", json={**given, **more}).status_code == 200
        end = time.monotonic() + 60
        while 'exactness_equal_total{model_name="demo"} 0.0' in client.get("/metrics").text:
            assert time.monotonic() < end, "no completion was audited"
            time.sleep(0.01)
        app.state.service.draining = True
        assert client.post("/v1/completions", json=given).status_code == 503
        text = client.get("/metrics").text
    found: Exported = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def faults(found: Exported, queries: dict[str, str]) -> Iterator[str]:
    """What queries name that is not exported."""
    for where, query in queries.items():
        used = [
            (name, re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', matchers)))
            for name, matchers in METRIC.findall(query)
        ]
        used += [(name, re.split(r",\s*", labels)) for labels, name in GROUPED.findall(query)]
        for name, labels in used:
            if name not in found and name not in OWN:
                yield f"{where}: {name} is not exported"
            for label in {*labels} - {*found.get(name, ())} - SCRAPED:
                yield f"{where}: {name} has no label {label}"


def test_every_query_names_metrics_and_labels_of_a_service(ours: Exported) -> None:
    assert list(faults(ours, expressions())) == []
    wrong = 'sum by (le, model) (rate(spaceport:slots{kind="free"}[5m])) + spaceport:runing'
    assert len(list(faults(ours, {"x": wrong}))) == 4


def test_every_metric_of_a_service_is_on_the_dashboard(ours: Exported) -> None:
    shown = {name for target in panels() for query in target["targets"] for name in metrics(query["expr"])}
    shown |= {name for each in dashboard()["annotations"]["list"] for name in metrics(each["expr"])}
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in ours if not name.endswith("_created")}
    assert families - {re.sub("_(bucket|sum|count)$", "", name) for name in shown} == UNUSED
    assert len(families) > 30


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("promtool"), reason="no Prometheus: apt-get install prometheus")
def test_prometheus_takes_the_configuration_and_alerts_fire_when_they_should() -> None:
    def promtool(*arguments: str) -> str:
        done = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    promtool("check", "config", "--syntax-only", str(MONITORING / "prometheus.yml"))
    promtool("check", "rules", str(MONITORING / "alerts.yml"))
    assert "SUCCESS" in promtool("test", "rules", str(MONITORING / "alerts_test.yml"))
