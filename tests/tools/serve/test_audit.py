"""Audit: completions equal those of plain decoding, wrong tokens are faults, and clients never wait for it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from starlette.testclient import TestClient

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.capacity import capacity_for
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.session import Runtime
from spaceport.tools.serve.application import application
from spaceport.tools.serve.audit import Audit, AuditResult
from spaceport.tools.serve.audit_log import AuditLog
from spaceport.tools.serve.comparison import plain_decoding
from spaceport.tools.serve.options import ServiceOptions
from support.hash_engine import END, VOCAB, HashEngine, Language
from support.hash_runtime import hash_runtime
from support.spoilt_engine import SpoiltEngine, positions_of, spoilt_runtime

PROMPT = [1, 2, 3, 4, 5]
ALWAYS = 0.0  # the chance of a completion that is audited at any rate

Spoil = Callable[[NDArray[np.float32], int], None]  # changes the logits for the token at a position in place


@dataclass
class WideEngine(HashEngine):
    """A fake engine with other logits in steps of several rows."""

    spoil: Spoil = lambda line, position: None

    def run(self, batch: Batch) -> NDArray[np.float32]:
        logits = super().run(batch)
        if batch.input_ids.shape[1] > 1:
            for request in range(batch.requests):
                for out, row in enumerate(batch.logit_rows[request]):
                    if not np.isnan(logits[request, out]).any():
                        self.spoil(logits[request, out], int(batch.position_ids[request, row]) + 1)
        return logits


def ends(size: float) -> Spoil:
    """The end token wins at position 12 by this difference."""

    def spoil(line: NDArray[np.float32], position: int) -> None:
        line[END] = line[:10].max() + (size if position == 12 else -1)

    return spoil


def wrong(line: NDArray[np.float32], position: int) -> None:
    """Another token wins at position 12."""
    if position == 12:
        line[:10] = np.roll(line[:10], 1) * 3


def tied(size: float) -> Spoil:
    """Another token wins at position 12 by this difference."""

    def spoil(line: NDArray[np.float32], position: int) -> None:
        best = int(line[:10].argmax())
        line[(best + 1) % 10] = line[best] + (size if position == 12 else -1)

    return spoil


@dataclass
class TiedEngine(WideEngine):
    """In steps of one row, the two best tokens at position 12 are nearly equal."""

    size: float = 0.0

    def run(self, batch: Batch) -> NDArray[np.float32]:
        logits = super().run(batch)
        if batch.input_ids.shape[1] == 1:
            for request in range(batch.requests):
                if int(batch.position_ids[request, 0]) + 1 == 12:
                    line = logits[request, 0]
                    best = int(line[:10].argmax())
                    line[[(best + 1) % 10, END]] = line[best] - self.size
        return logits


def runtime_over(engine: type[HashEngine], language: Language, requests: int = 1, **more: object) -> Runtime:
    plain = hash_runtime(language, requests=requests)
    made = engine(language, plain.engine.capacity, requests, **more)  # type: ignore[arg-type]
    return Runtime(plain.bundle, made, 64)


def audited(runtime: Runtime, decodings: Sequence[Decoding], prompt: Sequence[int] = PROMPT) -> list[AuditResult]:
    """The results of an audit of all completions with these options."""

    async def run() -> list[AuditResult]:
        results: list[AuditResult] = []
        audit = Audit("hash", runtime, 1.0, results.append, chance=lambda: ALWAYS)
        audit.start()
        for decoding in decodings:
            audit.offer(decoding, await runtime.agenerate(prompt, decoding))
            await until(lambda: not audit.busy)
        await audit.stop()
        return results

    with runtime:
        return asyncio.run(asyncio.wait_for(run(), 60))


async def until(done: Callable[[], bool]) -> None:
    for _ in range(6000):
        if done():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it did not happen within 30 seconds")


KINDS = {
    "greedy": Decoding(max_tokens=40),
    "chain": Decoding(max_tokens=40, draft="chain"),
    "sampled": Decoding(max_tokens=40, sampling=Sampling(temperature=0.9)),
    "filtered": Decoding(max_tokens=40, sampling=Sampling(temperature=2.0, top_k=4, top_p=0.9, min_p=0.01, seed=3)),
    "penalised": Decoding(max_tokens=40, sampling=Sampling(repetition_penalty=1.3, frequency_penalty=0.7)),
    "biased": Decoding(max_tokens=40, sampling=Sampling(logit_bias={3: 0.5}, banned=[4])),
    "stops": Decoding(max_tokens=40, stop=["ab", "c", "ff"]),
    "stop token": Decoding(max_tokens=40, stop_token_ids=[3]),
    "least": Decoding(max_tokens=40, min_tokens=30),
    "no end": Decoding(max_tokens=40, ignore_eos=True),
    "log probabilities": Decoding(max_tokens=40, logprobs=2),
    "forked": Decoding(max_tokens=40, fork=True),
    "forked, sampled": Decoding(max_tokens=40, fork=True, sampling=Sampling(temperature=1.0)),
    "forked, stops": Decoding(max_tokens=40, fork=True, stop=["ab", "c", "ff"]),
    "forked, few slots": Decoding(max_total_tokens=30, fork=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_equals_plain_decoding(kind: str) -> None:
    for seed in range(4):
        language = Language(seed, quality=70, end_every=17, fork_every=6)
        assert audited(hash_runtime(language), [KINDS[kind]]) == ["equal"]


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalised", "biased", "forked", "log probabilities"])
def test_a_wrong_token_is_a_fault(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    language = Language(5, end_every=10**9)
    given = replace(KINDS[kind], ignore_eos=True)
    if kind == "sampled":  # with some seeds, the changed logits give the same token
        given = replace(given, sampling=replace(given.sampling, seed=2))
    runtime = runtime_over(WideEngine, language, spoil=wrong)
    assert audited(runtime, [given]) == ["fault"]
    (message,) = [one.getMessage() for one in caplog.records if "exactness fault" in one.getMessage()]
    record = json.loads(message.partition(": ")[2])
    assert record["differences"][0]["position"] == 12
    assert record["differences"][0]["shift"] > 0.01
    assert record["seed"] == given.sampling.seed
    assert {"bundle", "engine", "cpu", "versions", "options"} <= record.keys()
    assert not {"prompt", "found", "plain"} & record.keys()


@pytest.mark.parametrize(("size", "expected"), [(1e-5, "near_tie"), (0.01, "fault")])
def test_tokens_that_are_equally_probable_up_to_rounding_are_a_near_tie(size: float, expected: AuditResult) -> None:
    for given in (Decoding(max_tokens=20), Decoding(max_tokens=20, sampling=Sampling(logit_bias={11: 1.0}))):
        runtime = runtime_over(TiedEngine, Language(5, end_every=10**9), spoil=tied(size), size=size)
        assert audited(runtime, [replace(given, ignore_eos=True)]) == [expected]
    runtime = runtime_over(TiedEngine, Language(5, end_every=10**9), spoil=ends(size), size=size)
    assert audited(runtime, [Decoding(max_tokens=20)]) == [expected]


@pytest.mark.parametrize(("size", "expected"), [(0.0, "equal"), (9.0, "fault")])
def test_completions_with_a_grammar_are_audited(tiny_bundle: Path, size: float, expected: AuditResult) -> None:
    def raise_one(batch: Batch, logits: NDArray[np.float32]) -> None:
        if batch.input_ids.shape[1] > 1:
            for request, row in np.argwhere(positions_of(batch) == 12):
                logits[request, row] *= -size if size else 1

    runtime, _ = spoilt_runtime(tiny_bundle, raise_one)
    given = Decoding(max_tokens=20, grammar=Grammar(regex="[a-z ]{40,60}"), fork=False)
    assert audited(runtime, [given]) == [expected]


def changed(completion: Completion, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Completion:
    first, *others = completion.threads
    return replace(completion, threads=(replace(first, tokens=change(first.tokens)), *others))


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("change", [lambda found: found[:-2], lambda found: (*found, 1)], ids=["shorter", "longer"])
def test_a_completion_of_another_length_is_a_fault(
    kind: str, change: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> None:
    given = replace(KINDS[kind], fork=False)  # with forks, the KV slots of all threads may run out
    if kind == "sampled":  # with some seeds, nothing is generated
        given = replace(given, sampling=replace(given.sampling, seed=2))
    assert offered(given, lambda found: changed(found, change)) == ["fault"]


def test_other_threads_and_endings_are_faults() -> None:
    forked = replace(KINDS["forked"], max_tokens=30)
    assert offered(forked, lambda found: found) == ["equal"]
    assert offered(forked, lambda found: replace(found, threads=found.threads[:-1])) == ["fault"]
    other = replace(KINDS["greedy"], ignore_eos=True)
    assert offered(other, lambda found: replace(found, threads=(replace(found.threads[0], ending="end"),))) == ["fault"]
    assert offered(other, lambda found: replace(found, text=found.text + "a")) == ["fault"]


def offered(decoding: Decoding, change: Callable[[Completion], Completion]) -> list[AuditResult]:
    """The result of an audit of a completion that was changed."""

    async def run() -> list[AuditResult]:
        results: list[AuditResult] = []
        audit = Audit("hash", runtime, 1.0, results.append, chance=lambda: ALWAYS)
        audit.start()
        audit.offer(decoding, change(await runtime.agenerate(PROMPT, decoding)))
        await until(lambda: not audit.busy)
        await audit.stop()
        return results

    with hash_runtime(Language(2, end_every=10**9, fork_every=6), max_slots=500) as runtime:
        return asyncio.run(run())


def test_rows_of_the_prefix_cache_are_not_used_again(tiny_bundle: Path) -> None:
    class Forgetful(SpoiltEngine):
        def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
            """Copy nothing: the reused rows are those of another prompt."""

    async def run(runtime: Runtime) -> list[AuditResult]:
        results: list[AuditResult] = []
        audit = Audit("tiny", runtime, 1.0, results.append, chance=lambda: ALWAYS)
        prompt = [5 + number % 50 for number in range(60)]
        given = Decoding(max_tokens=12, fork=False, ignore_eos=True)
        await runtime.agenerate([7] * 70, given)
        await runtime.agenerate(prompt, given)
        found = await asyncio.gather(*(runtime.agenerate([*prompt, last], given) for last in (9, 10)))
        assert all(one.statistics.cached_tokens for one in found)
        again = await runtime.agenerate(found[0].prompt_tokens, plain_decoding(given, found[0]))
        assert again.statistics.cached_tokens == 0
        audit.start()
        for one in found:
            audit.offer(given, one)
            await until(lambda: not audit.busy)
        await audit.stop()
        return results

    for kind, expected in ((SpoiltEngine, ["equal", "equal"]), (Forgetful, ["equal", "fault"])):
        opened = open_bundle(tiny_bundle)
        engine = open_engine(opened, "onnxruntime", EngineOptions(capacity_for(opened.manifest, 128), 2, 1))
        with Runtime(opened, kind(engine), 128, prefix_cache=True) as runtime:
            assert sorted(asyncio.run(run(runtime))) == expected


# What is audited


def test_only_a_share_of_the_drafted_completions_is_audited() -> None:
    async def run() -> list[AuditResult]:
        results: list[AuditResult] = []
        chances = iter([0.2, 0.1, 0.05, 0.3])
        audit = Audit("hash", runtime, 0.15, results.append, chance=lambda: next(chances))
        audit.start()
        given = Decoding(max_tokens=8)
        completion = await runtime.agenerate(PROMPT, given)
        audit.offer(replace(given, mask_slots=0), completion)  # without drafts
        audit.offer(given, replace(completion, ending="cancelled"))
        audit.offer(given, replace(completion, ending="deadline"))
        for _ in range(4):
            audit.offer(given, completion)
        await until(lambda: not audit.busy)
        await audit.stop()
        assert next(chances, None) is None
        return results

    with hash_runtime(Language(1)) as runtime:
        assert asyncio.run(run()) == ["equal", "equal"]


@dataclass
class GatedEngine(HashEngine):
    """A fake engine whose steps of one row wait until they are allowed."""

    allowed: Event | None = None
    waits: Event | None = None

    def run(self, batch: Batch) -> NDArray[np.float32]:
        if batch.input_ids.shape[1] == 1 and self.allowed is not None and self.waits is not None:
            self.waits.set()
            assert self.allowed.wait(60)
        return super().run(batch)


def test_a_client_gets_the_buffer_of_an_audited_completion() -> None:
    allowed, waits = Event(), Event()
    results: list[AuditResult] = []
    given = Decoding(max_tokens=30, ignore_eos=True)

    async def run() -> None:
        allowed.set()
        audit = Audit("hash", runtime, 1.0, results.append, chance=lambda: ALWAYS)
        audit.start()
        completion = await runtime.agenerate(PROMPT, given)
        allowed.clear()
        waits.clear()
        audit.offer(given, completion)
        await until(waits.is_set)
        assert audit.running
        others = asyncio.gather(audit.give_way(1), after_a_moment(allowed.set))
        await others
        assert runtime.status().active_requests == 0
        assert (await runtime.agenerate(PROMPT, given)).tokens == completion.tokens
        await until(lambda: not audit.busy)
        await audit.stop()

    async def after_a_moment(call: Callable[[], None]) -> None:
        await asyncio.sleep(0.05)
        call()

    with runtime_over(GatedEngine, Language(3), allowed=allowed, waits=waits) as runtime:
        asyncio.run(run())
    assert results == ["skipped"]


def test_a_completion_waits_while_requests_run_and_few_wait() -> None:
    results: list[AuditResult] = []
    given = Decoding(max_tokens=8)

    async def run() -> None:
        stopping = True
        audit = Audit("hash", runtime, 1.0, results.append, is_stopping=lambda: stopping, chance=lambda: ALWAYS)
        audit.start()
        completion = await runtime.agenerate(PROMPT, given)
        for _ in range(20):
            audit.offer(given, completion)
        await asyncio.sleep(0.1)
        assert results == ["skipped"] * 4
        stopping = False
        await until(lambda: not audit.busy)
        assert results[4:] == ["equal"] * 16
        await audit.stop()

    with hash_runtime(Language(1)) as runtime:
        asyncio.run(run())


def test_an_audit_ends_when_the_service_stops() -> None:
    allowed, waits = Event(), Event()
    results: list[AuditResult] = []

    async def run() -> None:
        stopping = False
        audit = Audit("hash", runtime, 1.0, results.append, is_stopping=lambda: stopping, chance=lambda: ALWAYS)
        audit.start()
        given = Decoding(max_tokens=30, ignore_eos=True)
        allowed.set()
        completion = await runtime.agenerate(PROMPT, given)
        allowed.clear()
        waits.clear()
        audit.offer(given, completion)
        await until(waits.is_set)
        stopping = True
        await asyncio.sleep(0.1)
        allowed.set()
        await until(lambda: not audit.running)
        await audit.stop()

    with runtime_over(GatedEngine, Language(3), allowed=allowed, waits=waits) as runtime:
        asyncio.run(run())
    assert results == ["skipped"]


# Faults


def test_a_fault_is_recorded_in_a_private_file_and_ends_the_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "faults"
    results: list[AuditResult] = []
    given = Decoding(max_tokens=20, ignore_eos=True, stop="zz")

    async def run() -> None:
        audit = Audit(
            "hash", runtime, 1.0, results.append, file=AuditLog(file), disables_drafts=True, chance=lambda: ALWAYS
        )
        audit.start()
        completion = await runtime.agenerate(PROMPT, given)
        assert audit.applied_to(given) == given
        audit.offer(given, completion)
        await until(lambda: not audit.busy)
        plain = audit.applied_to(given)
        assert not audit.drafts
        assert (plain.mask_slots, plain.lookup) == (0, 0)
        audit.offer(plain, completion)
        assert not audit.busy
        await audit.stop()
        (line,) = file.read_text("utf-8").splitlines()
        record = json.loads(line)
        assert tuple(record["found"][0]["tokens"]) == completion.tokens
        again = await runtime.agenerate(record["prompt"], plain_decoding(given, completion))
        assert tuple(record["plain"][0]["tokens"]) == again.tokens
        assert again.tokens != completion.tokens
        assert record["stop"] == ["zz"]

    with runtime_over(WideEngine, Language(5, end_every=10**9), spoil=wrong) as runtime:
        asyncio.run(run())
    assert results == ["fault"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "zz" not in caplog.text
    assert "drafts of hash are switched off" in caplog.text


def test_the_file_of_faults_is_private_and_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "faults"
    found = AuditLog(file, most=40)
    for _ in range(3):
        found.append({"a": "x" * 20})
    assert file.read_text("utf-8") == '{"a":"xxxxxxxxxxxxxxxxxxxx"}\n'
    assert len(re.findall("is full", caplog.text)) == 1
    file.chmod(0o640)
    with pytest.raises(OptionFault, match="only this user may read and write"):
        AuditLog(file)
    with pytest.raises(OptionFault, match="only this user may read and write"):
        AuditLog(tmp_path / "none" / "faults")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    with pytest.raises(OptionFault, match="only this user may read and write"):
        AuditLog(link)


def test_plain_decoding_that_fails_is_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass
    class Broken(HashEngine):
        def run(self, batch: Batch) -> NDArray[np.float32]:
            logits = super().run(batch)
            if batch.input_ids.shape[1] == 1:
                logits[..., :VOCAB] = np.nan
            return logits

    assert audited(runtime_over(Broken, Language(5)), [Decoding(max_tokens=20, ignore_eos=True)]) == ["fault"]
    assert "plain decoding failed: NotANumber" in caplog.text


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spaceport.service")


# Over HTTP


@pytest.mark.slow
def test_answers_of_a_service_are_audited_and_count_in_no_other_metric(demo_bundle: Path) -> None:
    asked: list[dict[str, object]] = [
        {"temperature": 0},
        {"temperature": 0, "stream": True},
        {"temperature": 0.9, "n": 2},
        {"temperature": 1, "top_p": 0.9, "frequency_penalty": 0.5, "seed": 3},
        {"temperature": 0, "structured_outputs": {"regex": "[a-z ]{30,40}"}},
        {"temperature": 0, "spaceport": {"fork": True}},
        {"temperature": 0, "stop": ["\n    return"]},
        {"temperature": 0, "disable_spec_decode": True},
    ]
    opener = partial(Runtime.open, demo_bundle, max_requests=4, prefix_cache=True, step_costs="free")
    app = application({"demo": opener}, ServiceOptions(audit_rate=1.0, audit_action="disable-drafts"))
    with TestClient(app) as client:
        tokens = 0
        for given in asked:
            more = {"stream_options": {"include_usage": True}} if "stream" in given else {}
            body = {"prompt": "import json\n\n\ndef load(path):\n", "max_tokens": 60, **given, **more}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            tokens += int(re.findall(r'"completion_tokens":(\d+)', response.text)[-1])
        found: dict[str, float] = {}
        for _ in range(200):
            text = client.get("/metrics").text
            found = {name: float(value) for name, value in re.findall(r"exactness_(\w+)_total\{.*\} (\S+)", text)}
            if found["checked"] == len(asked):
                break
            time.sleep(0.05)
        assert found == {"checked": 8, "equal": 8, "near_tie": 0, "fault": 0, "skipped": 0}
        assert f'spaceport:generation_tokens_total{{model_name="demo"}} {float(tokens)}' in text
        assert 'spaceport:drafts_disabled{model_name="demo"} 0.0' in text
        assert client.get("/load").json()["models"]["demo"]["drafts"] is True


@pytest.mark.slow
def test_a_service_whose_drafts_are_wrong_goes_on_without_them(demo_bundle: Path, tmp_path: Path) -> None:
    def reverse(batch: Batch, logits: NDArray[np.float32]) -> None:
        if batch.input_ids.shape[1] > 1:
            logits *= -1

    options = ServiceOptions(audit_rate=1.0, audit_action="disable-drafts", audit_log=tmp_path / "faults")
    given = {"prompt": "import json\n", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with TestClient(application({"demo": lambda: spoilt_runtime(demo_bundle, reverse)[0]}, options)) as client:
        first = client.post("/v1/completions", json=given).json()
        assert first["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
        for _ in range(200):
            if not client.get("/load").json()["models"]["demo"]["drafts"]:
                break
            time.sleep(0.05)
        second = client.post("/v1/completions", json=given).json()
        assert second["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        text = client.get("/metrics").text
        assert 'spaceport:exactness_fault_total{model_name="demo"} 1.0' in text
        assert 'spaceport:drafts_disabled{model_name="demo"} 1.0' in text
    assert len((tmp_path / "faults").read_text("utf-8").splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"audit_rate": 1.5}, "audit_rate is 1.5: expected a share from 0 to 1"),
        ({"audit_rate": float("nan")}, "audit_rate is nan"),
        ({"audit_action": "stop"}, "audit_action is 'stop': expected log or disable-drafts"),
    ],
)
def test_invalid_options_of_an_audit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionFault, match=message):
        ServiceOptions(**given)
