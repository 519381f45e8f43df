"""Process: a job that takes too long ends soon, disturbs no later one, and leaves no process behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.isolation.pool import HelperPool
from spaceport.runtime.isolation.process import HelperProcess, JobFailed
from spaceport.runtime.sampling.choice import greedy
from spaceport.runtime.sampling.grammar import Grammar, is_simple
from spaceport.runtime.sampling.grammar_compiler import GrammarCompiler
from spaceport.runtime.sampling.vocabulary import open_vocabulary
from spaceport.runtime.text.chat import ChatTemplate, Message, TemplateError
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


def rendered(helper: HelperProcess) -> object:
    return helper.run("render", source=GREETING, special_tokens={}, messages=HELLO, ask=True)


HANGING = {
    "large power": "{{ 10 ** (10 ** 8) }}",
    "recursive macro": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "long text": "{{ 'x' * 10 ** 9 }}",
    "text that doubles": "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
}


@pytest.mark.parametrize("name", HANGING)
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


def test_errors_of_a_template_are_the_same_in_the_helper(helper: HelperPool) -> None:
    template = "{{ 1 * 2 }}{{ raise_exception('no') }}"
    with pytest.raises(TemplateError, match=r"^chat template: TemplateError: no$"):
        ChatTemplate(template, {}, helper).render(HELLO)


def test_a_template_adds_at_most_256_kib(helper: HelperPool) -> None:
    with pytest.raises(TemplateError, match="rendered more than 2621"):
        ChatTemplate("{{ 'x' * 300000 }}", {}, helper).render(HELLO)


def test_thirty_schemas_that_all_hold_are_refused(helper: HelperPool) -> None:
    compiler = GrammarCompiler(open_vocabulary(BYTES, BYTES.get_vocab_size(), (1,)), helper)
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


def test_a_compiled_grammar_is_reused() -> None:
    vocabulary = open_vocabulary(BYTES, BYTES.get_vocab_size(), (1,))
    compiler = GrammarCompiler(vocabulary)
    one, other = (compiler.constrained(greedy(), Grammar(regex="[ab]+")) for _ in range(2))
    assert list(compiler._compiled) == [Grammar(regex="[ab]+").source]
    assert one.start is not other.start  # their states are independent


def test_the_helper_inherits_no_sockets_and_leaves_no_process() -> None:
    helper = HelperProcess()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.set_inheritable(True)
        assert rendered(helper) == "2Hello"
        assert helper._process is not None
        process = helper._process.pid
        links = [str(entry.readlink()) for entry in Path(f"/proc/{process}/fd").iterdir()]
        assert not [link for link in links if link.startswith("socket")]
    helper.close()
    assert not Path(f"/proc/{process}").exists()
    helper.close()


def test_a_helper_that_was_killed_is_started_again() -> None:
    helper = HelperProcess()
    assert rendered(helper) == "2Hello"
    assert helper._process is not None
    helper._process.kill()
    helper._process.wait()
    assert rendered(helper) == "2Hello"
    helper.close()


def test_an_unknown_job_is_an_error(helper: HelperPool) -> None:
    with pytest.raises(JobFailed, match="unheard"):
        helper.run("unheard")
