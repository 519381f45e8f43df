"""Functions: they are described to a model, and whatever their grammar allows is made of valid calls of them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.limits import Limits
from spaceport.runtime.sampling.grammar import Grammar, Vocabulary, is_simple, open_vocabulary
from spaceport.runtime.tool_calls.functions import (
    FORMATS,
    FormatName,
    ToolFunction,
    calls_grammar,
    functions_of,
    renders_tools,
    with_description,
)
from spaceport.runtime.tool_calls.parser import ToolCallParser
from support.small_tokenizers import BYTES, one_byte_each
from support.tool_files import joined

CITY = {"type": "string", "enum": ["Oslo", 'a "quoted"\nname', "Łódź"]}
WEATHER = ToolFunction(
    "weather.of-1", {"properties": {"city": CITY, "days": {"type": "integer"}}, "required": ["city"]}
)
FUNCTIONS = (WEATHER, ToolFunction("now"))
END = 1


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return open_vocabulary(BYTES, BYTES.get_vocab_size(), (END,))


def random_text(vocabulary: Vocabulary, grammar: Grammar, random: Random) -> str:
    """A random text that the grammar allows, with a bias towards its end."""
    matcher, tokens = vocabulary.matcher(grammar.source), list[int]()
    assert not matcher.is_error(), matcher.get_error()
    while True:
        allowed = np.flatnonzero(vocabulary.allowed(matcher, first=False)).tolist()
        assert allowed
        if END in allowed and random.random() < 0.5:
            return BYTES.decode(tokens)
        tokens.append(random.choice([token for token in allowed if token != END] or [END]))
        if tokens[-1] == END:
            return BYTES.decode(tokens[:-1])
        assert matcher.consume_tokens(tokens[-1:])


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_text_is_made_of_valid_calls(vocabulary: Vocabulary, name: FormatName, parallel: bool) -> None:
    random, counts, called = Random(0), set(), set()
    for _ in range(40):
        opened = random.random() < 0.5
        grammar = calls_grammar(FORMATS[name], FUNCTIONS, parallel=parallel, opened=opened)
        text = random_text(vocabulary, grammar, random)
        opened = opened and bool(FORMATS[name].opening)
        assert text.startswith(FORMATS[name].opening) != opened
        for constrained in (False, True):
            names = [one.name for one in FUNCTIONS]
            parser = ToolCallParser(FORMATS[name], names, constrained=constrained, opened=opened)
            parts = [part for sign in text for part in parser.push(sign)]
            content, calls = joined([*parts, *parser.finish()])
            assert content == "", text
            assert calls, text
            for function, arguments in calls:
                given = json.loads(arguments)
                assert given == {} if function == "now" else given["city"] in CITY["enum"]
            counts.add(len(calls))
            called |= {function for function, _ in calls}
    assert called == {"weather.of-1", "now"}
    assert counts == {1} if not parallel else max(counts) > 1


def test_only_the_functions_can_be_called_and_only_with_their_arguments(vocabulary: Vocabulary) -> None:
    def allows(text: str, whitespace: bool = False) -> bool:
        hermes = FORMATS["hermes"]
        grammar = calls_grammar(hermes, FUNCTIONS[:1], parallel=False, opened=False, whitespace=whitespace)
        matcher = vocabulary.matcher(grammar.source)
        return matcher.consume_tokens(one_byte_each(text)) and matcher.is_accepting()

    call = '<tool_call>\n{"name": "weather.of-1", "arguments": {"city":"Oslo"}}\n</tool_call>'
    assert allows(call)
    assert allows(call.replace(':"Oslo', ': "Oslo'), whitespace=True)
    assert not allows(call.replace(':"Oslo', ': "Oslo'))
    for other in ("weather_of-1", "now", "weather.of-"):
        assert not allows(call.replace("weather.of-1", other))
    assert not allows(call.replace("Oslo", "Rome"))
    assert not allows(call.replace('"Oslo"', '"Oslo","more":1'))
    assert not allows(f"{call}\n{call}")


def test_a_grammar_is_limited_and_isolated_like_the_schemas_in_it() -> None:
    hard = ToolFunction("hard", {"allOf": [{"properties": {"a": {}}}]})
    assert is_simple(calls_grammar(FORMATS["json"], FUNCTIONS, parallel=True, opened=False))
    assert not is_simple(calls_grammar(FORMATS["json"], (hard,), parallel=True, opened=False))
    assert is_simple(Grammar(lark='start: "a/&~{{" | "b"{0,9}'))
    for lark in ('A & "b"', "~A", "/a/", "%json {}", "((A{0,9}){0,9})"):
        assert not is_simple(Grammar(lark=f"start: {lark}"))
    deep = calls_grammar(
        FORMATS["json"], (ToolFunction("f", {"properties": {"a": {"items": {}}}}),), parallel=True, opened=False
    )
    assert deep.depth == 4


def test_functions_have_the_schema_of_objects_without_other_properties_and_its_limits() -> None:
    assert ToolFunction("f").schema == {"type": "object", "properties": {}, "additionalProperties": False}
    more = {"additionalProperties": {"type": "integer"}}
    assert ToolFunction("f", more).schema["additionalProperties"] == {"type": "integer"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"items": {}}}}}}]
    assert functions_of(tools) == (ToolFunction("f", {"properties": {"a": {"items": {}}}}),)
    with pytest.raises(OptionFault, match=r"tools\[0\].function.parameters has more than 3 nested levels"):
        functions_of(tools, Limits(grammar_depth=3))
    with pytest.raises(OptionFault, match=r"tools\[0\].function.parameters has \d+ characters: expected at most 4"):
        functions_of(tools, Limits(grammar_chars=4))


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Wetter für Orte"}}]
USER: dict[str, Any] = {"role": "user", "content": "Hi"}


def test_the_system_message_describes_the_functions_to_templates_that_do_not_render_them() -> None:
    assert all(renders_tools(template) for template in ("{% if tools %}", "{{ tools | tojson }}"))
    assert not any(renders_tools(template) for template in ("{{ messages }}", "{{ tools_in }}"))
    system, user = with_description([USER], TOOLS, FORMATS["json"])
    assert user == USER
    assert system["role"] == "system"
    assert '{"name": "weather", "description": "Wetter für Orte"}' in system["content"]
    extended, again = with_description([{"role": "system", "content": "Be kind."}, USER], TOOLS, FORMATS["json"])
    assert again == USER
    assert extended == {"role": "system", "content": f"Be kind.\n\n{system['content']}"}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_call_that_it_shows_is_one_that_is_found(name: Any) -> None:
    (system, _) = with_description([USER], TOOLS, FORMATS[name])
    example = system["content"].partition("nothing but:\n")[2].replace("NAME", "weather").replace("ARGUMENTS", "")
    parser = ToolCallParser(FORMATS[name], ["weather"])
    assert joined([*parser.push(example), *parser.finish()]) == ("", [("weather", "{}")])
