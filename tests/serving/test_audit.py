"""Audit: completions equal those of plain decoding, wrong tokens are faults, and clients never wait for it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from starlette.testclient import TestClient

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.comparison import plain_decoding
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.serving import audit as audits
from spaceport.serving.application import application
from spaceport.serving.audit import AuditLog, AuditResult, CompletionAudit
from spaceport.serving.options import ServiceOptions
from support.chat_runtime import NO_DRAFTS, chat_runtime
from support.hash_engine import END, HashEngine, Language
from support.hash_runtime import hash_runtime
from support.spoilt_engine import Logits, positions_of, spoilt

PROMPT = [1, 2, 3, 4, 5]
ENDLESS = Language(5, end_every=10**9)
AT = 12  # position of the token that is spoilt


Spoil = Callable[[NDArray[np.float32], bool], None]  # changes logits, given whether the step has several rows


def over(spoil: Spoil) -> Runtime:
    """A runtime whose logits at one position are changed."""

    def change(batch: Batch, logits: NDArray[np.float32]) -> None:
        for request, out in np.argwhere(positions_of(batch) == AT):
            if not np.isnan(logits[request, out]).any():
                spoil(logits[request, out], batch.input_ids.shape[1] > 1)

    return hash_runtime(ENDLESS, after=change)


def wrong(line: NDArray[np.float32], wide: bool) -> None:
    """Another token wins in steps of several rows."""
    if wide:
        line[:10] = np.roll(line[:10], 1) * 3


def tied(size: float, end: bool) -> Spoil:
    """Another token, perhaps the end token, wins by this difference in steps of several rows, and loses by it in others."""

    def spoil(line: NDArray[np.float32], wide: bool) -> None:
        best = int(line[:10].argmax())
        line[END if end else (best + 1) % 10] = line[best] + (size if wide else -size)

    return spoil


@asynccontextmanager
async def auditing(
    runtime: Runtime, *, rate: float = 1.0, chance: Callable[[], float] = lambda: 0.0, **options: Any
) -> AsyncIterator[tuple[CompletionAudit, list[AuditResult]]]:
    """An audit that runs, and its results."""
    results: list[AuditResult] = []
    audit = CompletionAudit("hash", runtime, rate, results.append, chance=chance, **options)
    audit.start()
    yield audit, results
    await audit.stop()


async def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "it did not happen within 60 seconds"
        await asyncio.sleep(0.005)


async def idle(audit: CompletionAudit) -> None:
    await until(lambda: not audit.running and not audit._waiting)


def audited(
    runtime: Runtime, decoding: Decoding, change: Callable[[Completion], Completion] = lambda found: found
) -> AuditResult:
    """The result of an audit of a completion with these options, which may be changed before."""

    async def run() -> AuditResult:
        async with auditing(runtime) as (audit, results):
            audit.offer(decoding, change(await runtime.agenerate(PROMPT, decoding)))
            await idle(audit)
        (result,) = results
        return result

    with runtime:
        return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spaceport.service")


KINDS = {
    "greedy": Decoding(max_tokens=40),
    "chain": Decoding(max_tokens=40, draft="chain"),
    "sampled": Decoding(max_tokens=40, sampling=Sampling(temperature=0.9, seed=2)),
    "penalised": Decoding(max_tokens=40, sampling=Sampling(repetition_penalty=1.3, frequency_penalty=0.7)),
    "biased": Decoding(max_tokens=40, sampling=Sampling(logit_bias={3: 0.5}, banned=[4])),
    "stops": Decoding(max_tokens=40, stop=["ab", "c", "ff"]),
    "stop token": Decoding(max_tokens=40, stop_token_ids=[3]),
    "least": Decoding(max_tokens=40, min_tokens=30),
    "no end": Decoding(max_tokens=40, ignore_eos=True),
    "forked": Decoding(max_tokens=40, fork=True),
    "forked, sampled": Decoding(max_tokens=40, fork=True, sampling=Sampling(temperature=1.0)),
    "forked, stops": Decoding(max_tokens=40, fork=True, stop=["ab", "c", "ff"]),
    "forked, few slots": Decoding(max_total_tokens=30, fork=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_equals_plain_decoding(kind: str) -> None:
    for seed in range(2):
        assert audited(hash_runtime(Language(seed, quality=70, end_every=17, fork_every=6)), KINDS[kind]) == "equal"


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalised", "biased", "forked"])
def test_a_wrong_token_is_a_fault(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    given = replace(KINDS[kind], ignore_eos=True)
    assert audited(over(wrong), given) == "fault"
    (message,) = [one.getMessage() for one in caplog.records if "exactness fault" in one.getMessage()]
    record = json.loads(message.partition(": ")[2])
    assert record["differences"][0]["position"] == AT
    assert record["differences"][0]["margin"] > 0.02
    assert record["seed"] == given.sampling.seed
    assert {"bundle", "engine", "cpu", "versions", "options"} <= record.keys()
    assert not {"prompt", "found", "plain"} & record.keys()


@pytest.mark.parametrize(("size", "expected"), [(1e-5, "near_tie"), (0.01, "fault")])
def test_tokens_that_are_equally_probable_up_to_rounding_are_a_near_tie(size: float, expected: AuditResult) -> None:
    other, end = (partial(over, tied(size, kind)) for kind in (False, True))
    assert audited(other(), Decoding(max_tokens=20, ignore_eos=True)) == expected
    biased = Decoding(max_tokens=20, ignore_eos=True, sampling=Sampling(logit_bias={11: 1.0}))
    assert audited(other(), biased) == expected
    assert audited(end(), Decoding(max_tokens=20)) == expected


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("no end", lambda found: replace(found, threads=(replace(found.threads[0], ending="end"),))),
        ("no end", lambda found: replace(found, text=found.text + "a")),
        ("forked", lambda found: replace(found, threads=found.threads[:-1])),
    ],
)
def test_other_texts_endings_and_threads_are_faults(kind: str, change: Any) -> None:
    given = replace(KINDS[kind], max_tokens=30, fork=kind == "forked")
    language = Language(2, end_every=10**9, fork_every=6)
    assert audited(hash_runtime(language, max_slots=500), given) == "equal"
    assert audited(hash_runtime(language, max_slots=500), given, change) == "fault"


def test_plain_decoding_that_fails_is_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    def broken(line: NDArray[np.float32], wide: bool) -> None:
        line[:] = line if wide else np.nan

    assert audited(over(broken), Decoding(max_tokens=20, ignore_eos=True)) == "fault"
    assert "plain decoding failed: NotANumber" in caplog.text


def test_rows_of_the_prefix_cache_are_not_used_again() -> None:
    prompt, given = [number % 10 for number in range(60)], Decoding(max_tokens=12, fork=False, ignore_eos=True)
    engine = HashEngine(ENDLESS, 256, 2, owner=lambda index: 0)
    with Runtime(hash_runtime(ENDLESS).bundle, engine, 128, prefix_cache=True) as runtime:
        runtime.generate(prompt, given)
        found = runtime.generate(prompt, given)
        assert found.statistics.cached_tokens > 0
        assert runtime.generate(prompt, plain_decoding(given, found)).statistics.cached_tokens == 0


# What is audited


def test_a_share_of_the_drafted_completions_is_audited_and_few_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        given, chances = Decoding(max_tokens=8), iter([0.2, 0.1, 0.05, 0.3])
        async with auditing(runtime, rate=0.15, chance=lambda: next(chances)) as (audit, results):
            completion = await runtime.agenerate(PROMPT, given)
            audit.offer(replace(given, mask_slots=0), completion)  # without drafts
            audit.offer(given, replace(completion, ending="cancelled"))
            audit.offer(given, replace(completion, ending="deadline"))
            for _ in range(4):
                audit.offer(given, completion)
            await idle(audit)
        assert (next(chances, None), results) == (None, ["equal", "equal"])
        for limit, most in (("MOST_WAITING", 16), ("MOST_WAITING_TOKENS", 16 * (len(PROMPT) + len(completion.tokens)))):
            with monkeypatch.context() as patch:
                patch.setattr(audits, limit, most)
                stopping = Event()
                stopping.set()
                async with auditing(runtime, is_stopping=stopping.is_set) as (audit, results):
                    for _ in range(20):
                        audit.offer(given, completion)
                    await asyncio.sleep(0.1)
                    assert results == ["skipped"] * 4
                    stopping.clear()
                    await idle(audit)
                    stopping.set()
                    audit.offer(given, completion)
                assert results[4:] == ["equal"] * 16 + ["skipped"]  # nothing is repeated after the end
                assert audit.coverage == 16 / 21
        assert caplog.text.count("skips completions, as 16 wait") == 2

    with hash_runtime(Language(1)) as runtime:
        asyncio.run(run())


@pytest.mark.parametrize("stops", [False, True], ids=["a client comes", "the service stops"])
def test_an_audit_ends_when_a_client_comes_or_the_service_stops(stops: bool) -> None:
    given, allowed, waits = Decoding(max_tokens=30, ignore_eos=True), Event(), Event()

    def gate(batch: Batch) -> None:
        """Steps of one row wait until they are allowed."""
        if batch.input_ids.shape[1] == 1:
            waits.set()
            assert allowed.wait(60)

    async def run() -> list[AuditResult]:
        stopping = False
        async with auditing(runtime, is_stopping=lambda: stopping) as (audit, results):
            allowed.set()
            completion = await runtime.agenerate(PROMPT, given)
            allowed.clear()
            waits.clear()
            audit.offer(given, completion)
            await until(waits.is_set)
            assert audit.running
            stopping = stops
            asyncio.get_running_loop().call_later(0.1, allowed.set)
            if stops:
                await until(lambda: not audit.running)
            else:
                await audit.give_way(1)
                assert runtime.status().active_requests == 0
                assert (await runtime.agenerate(PROMPT, given)).tokens == completion.tokens
                assert audit.coverage == 0.0
                await idle(audit)
        return results

    with hash_runtime(Language(3), before=gate) as runtime:
        assert asyncio.run(run()) == ["skipped" if stops else "equal"]


def test_a_fault_is_recorded_in_a_private_bounded_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, link = tmp_path / "faults", tmp_path / "link"
    given = Decoding(max_tokens=20, ignore_eos=True, stop="zz")

    async def run() -> None:
        log = AuditLog(file, most=3000)
        async with auditing(runtime, file=log) as (audit, results):
            completion = await runtime.agenerate(PROMPT, given)
            audit.offer(given, completion)
            await idle(audit)
        assert results == ["fault"]
        for _ in range(3):
            log.append({"a": "x" * 3000})
        (line,) = file.read_text("utf-8").splitlines()
        record = json.loads(line)
        assert tuple(record["found"][0]["tokens"]) == completion.tokens
        again = await runtime.agenerate(record["prompt"], plain_decoding(given, completion))
        assert tuple(record["plain"][0]["tokens"]) == again.tokens != completion.tokens
        assert record["stop"] == ["zz"]

    with over(wrong) as runtime:
        asyncio.run(run())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "zz" not in caplog.text
    assert caplog.text.count("is full") == 1
    file.chmod(0o640)
    link.symlink_to(tmp_path / "target")
    for unfit in (file, link, tmp_path / "none" / "faults"):
        with pytest.raises(OptionFault, match="only this user may read and write"):
            AuditLog(unfit)


# Over HTTP


def test_answers_of_a_service_are_audited_and_count_in_no_other_metric() -> None:
    asked: list[dict[str, object]] = [
        {},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"temperature": 0.9, "n": 2, "frequency_penalty": 0.5},
        {"spaceport": {"regex": "[a-z ]{30,40}"}},
        {"spaceport": {"fork": True}},
        {"spaceport": NO_DRAFTS},
    ]
    app = application({"demo": chat_runtime}, ServiceOptions(audit_rate=1.0, audit_action="disable-drafts"))
    with TestClient(app) as client:
        tokens = 0
        for given in asked:
            body = {"prompt": "import json\n\n\ndef load(path):\n", "max_tokens": 60, "temperature": 0, **given}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            tokens += int(re.findall(r'"completion_tokens":(\d+)', response.text)[-1])
        asyncio.run(until(lambda: 'exactness_checked_total{model_name="demo"} 6.0' in client.get("/metrics").text))
        text = client.get("/metrics").text
        found = dict(re.findall(r"exactness_(\w+)_total\{.*\} (\S+)", text))
        assert found == {"checked": "6.0", "equal": "6.0", "near_tie": "0.0", "fault": "0.0", "skipped": "0.0"}
        assert f'spaceport:generation_tokens_total{{model_name="demo"}} {float(tokens)}' in text
        assert 'spaceport:drafts_disabled{model_name="demo"} 0.0' in text
        assert 'spaceport:audit_coverage{model_name="demo"} 1.0' in text


def test_a_service_whose_drafts_are_wrong_goes_on_without_them(tmp_path: Path) -> None:
    def reverse(batch: Batch, logits: Logits) -> None:
        if batch.input_ids.shape[1] > 1:
            logits *= -1

    options = ServiceOptions(audit_rate=1.0, audit_action="disable-drafts", audit_log=tmp_path / "faults")
    given = {"prompt": "import json\n", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    plain = chat_runtime(requests=1)
    spoilt(plain.engine, reverse)
    with TestClient(application({"demo": lambda: plain}, options)) as client:
        first = client.post("/v1/completions", json=given).json()
        assert first["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
        asyncio.run(until(lambda: not client.get("/load").json()["models"]["demo"]["drafts"]))
        second = client.post("/v1/completions", json=given).json()
        assert second["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        text = client.get("/metrics").text
        assert 'spaceport:exactness_fault_total{model_name="demo"} 1.0' in text
        assert 'spaceport:drafts_disabled{model_name="demo"} 1.0' in text
    assert len((tmp_path / "faults").read_text("utf-8").splitlines()) == 1
