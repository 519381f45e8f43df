"""Generate screen: what the statistics of a completion say about drafts."""

from __future__ import annotations

import pytest

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.generation import Completion
from spaceport.tools.terminal.generate_screen import as_dict, show_statistics
from support.hash_engine import Language
from support.hash_runtime import hash_runtime


@pytest.fixture
def completion() -> Completion:
    with hash_runtime(Language(3, end_every=10**9), row=5.0) as runtime:
        return runtime.generate([1, 2, 3], Decoding(max_tokens=8))


def test_statistics_say_why_drafts_were_narrow_most_frequent_reason_first(
    completion: Completion, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completion.statistics.drafts_limited == {"budget": 8}
    completion.statistics.drafts_limited |= {"not_worth_it": 12, "end_of_text": 1}
    show_statistics(completion)
    assert capsys.readouterr().err.splitlines()[2:4] == [
        "draft tokens: none",
        "drafts limited: not worth it 12, budget 8, end of text 1",
    ]


def test_statistics_of_drafts_that_are_as_wide_as_their_limits_have_no_such_line(
    completion: Completion, capsys: pytest.CaptureFixture[str]
) -> None:
    completion.statistics.drafts_limited.clear()
    show_statistics(completion)
    assert "limited" not in capsys.readouterr().err


def test_json_has_the_steps_of_each_reason(completion: Completion) -> None:
    assert as_dict(completion)["statistics"]["drafts_limited"] == {"budget": 8}
