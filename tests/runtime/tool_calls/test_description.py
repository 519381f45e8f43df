"""Description: functions are described to models whose chat template does not render them."""

from __future__ import annotations

from typing import Any

import pytest

from spaceport.runtime.tool_calls.description import renders_tools, with_description
from spaceport.runtime.tool_calls.formats import FORMATS
from spaceport.runtime.tool_calls.parser import ToolCallParser
from spaceport.runtime.tool_calls.parts import joined

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Wetter für Orte"}}]
USER: dict[str, Any] = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("template", "renders"),
    [("{% if tools %}", True), ("{{ tools | tojson }}", True), ("{{ messages }}", False), ("{{ tools_in }}", False)],
)
def test_a_template_renders_tools_if_it_names_them(template: str, renders: bool) -> None:
    assert renders_tools(template) == renders


def test_the_system_message_describes_the_functions() -> None:
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
