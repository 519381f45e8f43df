"""Process: a job that takes too long ends soon, disturbs no later one and leaves no process; others wait in order."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore
from time import monotonic, sleep
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.isolation import DeadlinePassed, HelperPool, HelperProcess, JobFailed
from spaceport.runtime.sampling.grammar import Grammar, GrammarCompiler, is_simple, open_vocabulary
from spaceport.runtime.text.chat_template import ChatTemplate
from spaceport.runtime.text.messages import Message, TemplateError
from support.hash_engine import greedy
from support.small_tokenizers import BYTES

HELLO: list[Message] = [{"role": "user", "content": "Hello"}]
GREETING = "{{ 1 * 2 }}{{ messages[0].content }}"  # a product is not among the harmless expressions
PATTERNS = [{"pattern": f"^.{{0,{number + 2}}}(a|b){{1,{3 * number + 5}}}$"} for number in range(30)]
ALL_OF_THIRTY = Grammar(json_schema={"type": "string", "allOf": PATTERNS})

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def helper() -> Iterator[HelperPool]:
    started = HelperPool(processes=1, cpu_seconds=0.5)
    yield started
    started.close()


def rendered(helper: HelperProcess | HelperPool, source: str = GREETING, deadline: float | None = None) -> object:
    return helper.run("render", deadline, source=source, special_tokens={}, messages=HELLO, ask=True)


POWER = "{{ 10 ** (10 ** 8) }}"
HANGING = {
    "large power": POWER,
    "recursive macro": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "long text": "{{ 'x' * 10 ** 9 }}",
    "text that doubles": "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
}
RARE = ("lipsum", "long text")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in RARE else ()) for name in HANGING]
)
def test_a_template_that_takes_long_fails_alone(helper: HelperPool, name: str) -> None:
    template = ChatTemplate(HANGING[name], {}, helper)
    assert not template.harmless
    with pytest.raises(TemplateError, match="chat template: "):
        template.render(HELLO)
    assert ChatTemplate(GREETING, {}, helper).render(HELLO) == "2Hello"


def test_a_template_renders_the_same_in_the_helper(helper: HelperPool) -> None:
    template = (
        "{{ bos_token }}{% macro f(x) %}[{{ x }}]{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}"
    )
    messages: list[Message] = [{"role": "user", "content": "é😀\n"}, {"role": "assistant", "content": "</s>"}]
    there = ChatTemplate(template, {"bos_token": "<s>"}, helper).render(messages)
    assert there == ChatTemplate(template, {"bos_token": "<s>"}).render(messages) == "<s>[é😀\n][</s>]"


def test_thirty_schemas_that_all_hold_are_refused(helper: HelperPool) -> None:
    opened: list[int] = []
    compiler = GrammarCompiler(
        lambda: (opened.append(0), open_vocabulary(BYTES, BYTES.get_vocab_size(), (1,)))[1], helper
    )
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: compiler.prepare(), range(2)))
    assert opened == [0]
    assert not is_simple(ALL_OF_THIRTY)
    with pytest.raises(
        OptionFault, match=r"the JSON schema .* cannot be used: took more than 0.5 s or too much memory"
    ):
        compiler.constrained(greedy(), ALL_OF_THIRTY)
    compiler.constrained(greedy(), Grammar(json_schema={"allOf": [{"type": "string"}]}))


@pytest.mark.parametrize(
    ("schema", "simple"),
    [
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, True),
        ({"type": "string", "pattern": "a+"}, True),
        ({"type": "string", "pattern": "a+", "minLength": 3}, False),
        ({"type": "array", "items": {"oneOf": [{"type": "string"}]}}, False),
        ({"$defs": {"a": {"allOf": []}}}, False),
    ],
)
def test_only_intersections_of_schemas_need_the_helper(schema: dict[str, Any], simple: bool) -> None:
    assert is_simple(Grammar(json_schema=schema)) == simple


def test_the_helper_inherits_no_sockets_starts_again_when_it_was_killed_and_leaves_no_process() -> None:
    helper = HelperProcess()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.set_inheritable(True)
        assert rendered(helper) == "2Hello"
        assert helper._process is not None
        links = [str(entry.readlink()) for entry in Path(f"/proc/{helper._process.pid}/fd").iterdir()]
        assert not [link for link in links if link.startswith("socket")]
    helper._process.kill()
    helper._process.wait()
    assert rendered(helper) == "2Hello"
    process = helper._process.pid
    helper.close()
    assert not Path(f"/proc/{process}").exists()
    helper.close()


def test_a_job_ends_at_its_deadline_or_with_the_pool() -> None:
    pool = HelperPool(processes=1, cpu_seconds=30)
    with pytest.raises(DeadlinePassed):
        rendered(pool, POWER, monotonic() + 0.01)  # while the process starts
    assert rendered(pool) == "2Hello"
    with pytest.raises(DeadlinePassed, match="before it ended"):
        rendered(pool, POWER, monotonic() + 0.1)
    assert rendered(pool) == "2Hello"
    with ThreadPoolExecutor(1) as callers:
        found = callers.submit(rendered, pool, POWER)
        sleep(0.1)
        pool.close()
        with pytest.raises(JobFailed, match="the runtime is closed"):
            found.result(60)


def waiting(pool: HelperPool, count: int) -> None:
    condition: Any = pool._idle.not_empty
    while len(condition._waiters) < count:
        sleep(0.001)


def test_two_jobs_run_at_a_time_the_others_follow_in_order_and_waiting_counts_towards_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = SimpleQueue[str](), Semaphore(0)

    def run(helper: HelperProcess, job: str, deadline: float | None = None) -> str:
        begun.put(job)
        assert may_end.acquire(timeout=60)
        if job == "bad":
            raise JobFailed("bad")
        return job

    monkeypatch.setattr(HelperProcess, "run", run)
    pool, names = HelperPool(processes=2), ("a", "bad", "c", "d", "e")
    with ThreadPoolExecutor(8) as callers:
        found: list[Future[object]] = []
        for number, name in enumerate(names):
            found.append(callers.submit(pool.run, name))
            if number < 2:
                assert begun.get(timeout=60) == name
            waiting(pool, max(0, number - 1))
        with pytest.raises(DeadlinePassed, match="before it began"):
            pool.run("late", monotonic() + 0.01)
        for name in names[2:]:
            assert begun.empty()
            may_end.release()
            assert begun.get(timeout=60) == name
        may_end.release(2)
        assert [str(each.exception() or each.result()) for each in found] == [*names]
    assert pool._idle.qsize() == 2
