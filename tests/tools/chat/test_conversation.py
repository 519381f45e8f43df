"""Conversation: undo, reset and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.chat.conversation import Conversation


def conversation(system: str | None = None) -> Conversation:
    found = Conversation(system)
    for text in ("one", "two"):
        found.add("user", text)
        found.add("assistant", f"re: {text}")
    return found


def contents(found: Conversation) -> list[str]:
    return [message["content"] for message in found.messages]


def test_undo_removes_the_last_turn_and_reset_all_but_the_system_prompt() -> None:
    found = conversation("sys")
    assert found.turns == 2
    assert found.undo()
    assert contents(found) == ["sys", "one", "re: one"]
    found.add("user", "unanswered")
    assert found.undo()
    assert contents(found) == ["sys", "one", "re: one"]
    found.reset()
    assert contents(found) == ["sys"]
    assert not found.undo()
    found.add("user", "one")
    for system, first in (("a", "a"), ("b", "b"), (None, "one")):  # it is replaced and comes first
        found.set_system(system)
        assert contents(found)[0] == first


def test_a_file_has_the_messages_and_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    file, found = tmp_path / "chat.json", conversation("é\n")
    found.save(file)
    loaded = Conversation("other")
    loaded.load(file)
    assert loaded.messages == found.messages
    with pytest.raises(InputFault, match="cannot be read"):
        loaded.load(tmp_path / "none")
    with pytest.raises(InputFault, match="cannot be written"):
        loaded.save(tmp_path / "none" / "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "has other content"),
        ('[{"role": "user"}]', "has other content"),
        ('[{"role": "nobody", "content": "a"}]', "has other content"),
        ('[{"role": "user", "content": 3}]', "has other content"),
    ],
)
def test_a_file_with_other_content_changes_nothing(tmp_path: Path, content: str, message: str) -> None:
    file, found = tmp_path / "chat.json", conversation()
    file.write_text(content, "utf-8")
    before = found.messages
    with pytest.raises(InputFault, match=message):
        found.load(file)
    assert found.messages == before
