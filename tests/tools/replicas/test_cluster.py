"""Cluster: a service with replicas in a cluster of Ray answers as one process does, also while replicas die, begin and end."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from support.chat_runtime import NO_DRAFTS
from support.ray_cluster import Deployed, deployed, wait_for

pytestmark = [
    pytest.mark.on_change("deploy/ray", "serving"),
    pytest.mark.nightly,
    pytest.mark.skipif(not find_spec("ray"), reason="needs Ray: pip install -c constraints.txt '.[cpu,serve,ray]'"),
]

PROMPTS = ["import json\n", "def load(path):\n", "class A:\n", "for line in", "x = [1, 2, 3]\n", "with open("]
LONG = {"prompt": PROMPTS[0], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "spaceport": NO_DRAFTS}


def arguments(bundle: Path, count: int = 2, **options: Any) -> dict[str, Any]:
    """The args of a serve.yaml with a constant number of replicas, which the table `replicas` may change."""
    table = {"min_replicas": count, "max_replicas": count, "num_cpus": 0.1, **options.pop("replicas", {})}
    return {"models": {"demo": str(bundle)}, "step_costs": "free", "replicas": table, **options}


def post(service: Deployed, **fields: Any) -> dict[str, Any]:
    """The whole answer to a request."""
    with service.post({"model": "demo", **fields}) as response:
        found: dict[str, Any] = json.load(response)
    return found


def events(service: Deployed, begun: Event | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, without [DONE], which has to be the last one."""
    found = []
    with service.post({"model": "demo", "stream": True, **fields}) as response:
        for line in response:
            if line.startswith(b"data: "):
                found.append(line.removeprefix(b"data: ").strip())
                if begun is not None:
                    begun.set()
    assert found.pop() == b"[DONE]"
    return [json.loads(event) for event in found]


def text_of(stream: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in stream for choice in event["choices"])


def test_answers_are_those_of_the_runtime_and_metrics_those_of_all_replicas(demo_bundle: Path, tmp_path: Path) -> None:
    with (
        Runtime.open(demo_bundle, max_requests=4) as runtime,
        deployed(tmp_path, arguments(demo_bundle)) as service,
        ThreadPoolExecutor(6) as pool,
    ):
        given = [{"prompt": prompt, "max_tokens": 24, "temperature": 0.8, "seed": 7} for prompt in PROMPTS]
        whole = list(pool.map(lambda fields: post(service, **fields)["choices"][0]["text"], given))
        streamed = list(pool.map(lambda fields: text_of(events(service, **fields)), given))
        decoding = Decoding(max_tokens=24, sampling=Sampling(0.8, seed=7))
        assert whole == streamed == [runtime.generate(prompt, decoding).text for prompt in PROMPTS]

        def counted() -> list[float]:
            """The tokens of each replica, as Ray exports them."""
            return [
                sample.value
                for family in text_string_to_metric_families(service.metrics())
                for sample in family.samples
                if sample.name == "ray_spaceport_generation_tokens_total"
            ]

        wait_for(lambda: sum(counted()) == 24 * 2 * len(PROMPTS), "all tokens are counted")
        assert len(counted()) == 2
        assert all(counted())


def test_a_killed_replica_loses_no_request_that_has_not_begun_to_stream(demo_bundle: Path, tmp_path: Path) -> None:
    with deployed(tmp_path, arguments(demo_bundle)) as service, ThreadPoolExecutor(16) as pool:
        expected = post(service, **LONG)["choices"][0]["text"]
        begun = [Event() for _ in range(8)]
        streams = [pool.submit(events, service, begun=one, **LONG) for one in begun]
        assert all(one.wait(60) for one in begun)
        whole = [pool.submit(post, service, **LONG) for _ in range(8)]
        os.kill(service.replicas()[0], signal.SIGKILL)
        assert {one.result()["choices"][0]["text"] for one in whole} == {expected}
        found = [one.result() for one in streams]
        cut = [stream for stream in found if "error" in stream[-1]]
        assert {text_of(stream) for stream in found if stream not in cut} <= {expected}
        assert 0 < len(cut) < len(found)
        print(f"{len(whole)} whole answers, {len(found) - len(cut)} whole streams, {len(cut)} with an error event")
        for stream in cut:
            assert stream[-1]["error"]["code"] == "replica_died"
            assert expected.startswith(text_of(stream[:-1]))
        wait_for(lambda: len(service.replicas()) == 2, "the replica is replaced")


def test_no_request_fails_while_replicas_begin_end_and_are_replaced(demo_bundle: Path, tmp_path: Path) -> None:
    replicas = {"min_replicas": 1, "max_replicas": 3, "upscale_delay": 1.0, "downscale_delay": 2.0}
    args = arguments(demo_bundle, max_requests=2, replicas=replicas)
    with deployed(tmp_path, args) as service, ThreadPoolExecutor(12) as pool:
        expected = post(service, **LONG)["choices"][0]["text"]
        stop = Event()

        def ask_on() -> int:
            answered = 0
            while not stop.is_set():
                assert post(service, **LONG)["choices"][0]["text"] == expected
                answered += 1
            return answered

        load = [pool.submit(ask_on) for _ in range(9)]
        wait_for(lambda: len(service.replicas()) == 3, "three replicas run")
        stop.set()
        answered = sum(one.result() for one in load)
        stop.clear()
        single = pool.submit(ask_on)
        wait_for(lambda: len(service.replicas()) == 1, "one replica runs")
        before = service.replicas()
        with service.run(tmp_path, {**args, "key_metrics": True}):
            wait_for(lambda: service.replicas() and not {*before} & {*service.replicas()}, "the replica is replaced")
            stop.set()
            assert single.result() > 0
        print(f"{answered + single.result()} answers while replicas began and ended, none failed")
