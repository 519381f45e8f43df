"""Prometheus: the real server reads the configuration, scrapes a service, and evaluates every query and alert."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spaceport.tools.serve.options import ServiceOptions
from support.chat_runtime import chat_runtime
from support.deployment import MONITORING, expressions
from support.paths import ROOT
from support.ray_cluster import free_port
from support.running_service import RunningService, running_service

pytestmark = [
    pytest.mark.on_change("tools/deploy"),
    pytest.mark.nightly,
    pytest.mark.skipif(not shutil.which("promtool"), reason="no Prometheus: apt-get install prometheus"),
]

KEY = "sk-metrics"
WAIT = 60.0  # seconds for anything that has to happen
# Without samples or a number in this test: no request was refused. Alerts have samples only when something is wrong.
MAY_BE_EMPTY = {"Rejected requests A", "Restarts"}


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_configuration_and_alerts_fire_when_they_should() -> None:
    promtool("check", "config", "--syntax-only", str(MONITORING / "prometheus.yml"))
    assert "6 rules found" in promtool("check", "rules", str(MONITORING / "alerts.yml"))
    assert "SUCCESS" in promtool("test", "rules", str(MONITORING / "alerts_test.yml"))
    tested = (MONITORING / "alerts_test.yml").read_text("utf-8")
    alerts = re.findall(r"alert: (\w+)", (MONITORING / "alerts.yml").read_text("utf-8"))
    assert [alert for alert in alerts if not re.search(rf"alertname: {alert}\n +exp_alerts:", tested)] == []


def asked(address: str, path: str, **fields: str) -> Any:
    query = urllib.parse.urlencode(fields)
    with urllib.request.urlopen(f"{address}{path}?{query}", timeout=10) as response:
        return json.load(response)["data"]


@contextmanager
def prometheus(service: RunningService, folder: Path) -> Iterator[str]:
    """The address of a Prometheus with our configuration, which scrapes a service each second."""
    target = service.url.removeprefix("http://").removesuffix("/v1")
    text = (MONITORING / "prometheus.yml").read_text("utf-8")
    for old, new in (("15s", "1s"), ("/run/secrets", str(folder)), ("spaceport:8000", target)):
        assert old in text
        text = text.replace(old, new)
    (folder / "prometheus.yml").write_text(text, "utf-8")
    (folder / "metrics_key").write_text(KEY, "utf-8")
    shutil.copy(MONITORING / "alerts.yml", folder)
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log, stdout=log)
    try:
        end = time.monotonic() + WAIT
        while "Server is ready" not in (folder / "log").read_text("utf-8"):
            assert process.poll() is None, (folder / "log").read_text("utf-8")
            assert time.monotonic() < end, "Prometheus does not start"
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(WAIT)


def concrete(query: str) -> str:
    """A query as Grafana sends it."""
    values = {"$model": "demo", "$instance": ".*", "$__rate_interval": "10s", "$__range": "60s"}
    for name, value in values.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that has scraped a service with an audit under load several times."""
    options = ServiceOptions(keys=(KEY,), audit_rate=1.0)
    folder = tmp_path_factory.mktemp("prometheus")
    with running_service({"demo": chat_runtime}, options) as service, prometheus(service, folder) as found:
        body = {"prompt": "import json\nimport json\n", "max_tokens": 16, "temperature": 0}
        headers = {"Authorization": f"Bearer {KEY}"}
        asking = urllib.request.Request(f"{service.url}/completions", json.dumps(body).encode(), headers)
        end = time.monotonic() + WAIT
        audited = concrete("rate(spaceport:exactness_equal_total[$__rate_interval]) > 0")
        while not asked(found, "/api/v1/query", query=audited)["result"]:
            assert time.monotonic() < end, asked(found, "/api/v1/targets")
            with urllib.request.urlopen(asking, timeout=WAIT) as response:
                assert response.status == 200
            time.sleep(0.2)
        yield found


def test_prometheus_scrapes_the_service_and_evaluates_every_query(address: str) -> None:
    (target,) = asked(address, "/api/v1/targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    (group,) = asked(address, "/api/v1/rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    assert len(group["rules"]) == 6
    for where, query in expressions().items():
        found = asked(address, "/api/v1/query", query=concrete(query))["result"]
        numbers = [float(sample["value"][1]) for sample in found]
        if where.startswith("Spaceport") or where in MAY_BE_EMPTY:
            assert numbers == [], "an alert fires for a healthy service"
        else:
            assert numbers, where
            assert all(math.isfinite(number) and number >= 0 for number in numbers)
