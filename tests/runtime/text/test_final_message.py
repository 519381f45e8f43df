"""Final message: the mark at its end is found again, whatever the template does around it."""

from __future__ import annotations

from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.text.final_message import cut_at_mark, with_end_mark

FIRST = {"role": "user", "content": "a"}


def test_the_mark_is_behind_the_text_of_the_last_message() -> None:
    (first, last), mark = with_end_mark([FIRST, {"role": "assistant", "content": "b "}])
    assert first is FIRST
    assert last["content"] == f"b {mark}"
    assert cut_at_mark(f"<a><b {mark}>", mark) == "<a><b "
    assert cut_at_mark(f"<a><b {mark.strip()}>", mark) == "<a><b"
    parts = [{"type": "text", "text": "b"}, {"type": "image"}]
    (last,), mark = with_end_mark([{"role": "assistant", "content": parts}])
    assert last["content"] == [{"type": "text", "text": f"b{mark}"}, {"type": "image"}]
    assert parts[0]["text"] == "b"


def test_each_mark_is_another_one_which_no_text_can_contain() -> None:
    assert len({with_end_mark([FIRST])[1] for _ in range(20)}) == 20


@pytest.mark.parametrize(
    "last", [{"role": "assistant", "tool_calls": [{}]}, {"role": "assistant", "content": [{"type": "image"}]}]
)
def test_a_last_message_without_text_is_refused(last: dict[str, Any]) -> None:
    with pytest.raises(OptionFault, match="the last message has no text: expected a content to continue"):
        with_end_mark([FIRST, last])


def test_a_template_that_leaves_the_last_message_out_is_refused() -> None:
    with pytest.raises(OptionFault, match="leaves out or changes the text of the last message"):
        cut_at_mark("<a>", with_end_mark([FIRST])[1])
