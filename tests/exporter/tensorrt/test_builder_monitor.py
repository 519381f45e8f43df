"""Builder monitor: nested phases as one number that grows, and what is kept of what the builder says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spaceport.exporter.tensorrt.builder_monitor import BuildMessages, BuildProgress


def test_a_phase_counts_for_the_step_that_it_is_part_of() -> None:
    heard: list[tuple[float, str]] = []
    advance = BuildProgress(lambda done, phase: heard.append((done, phase)), lambda: False)
    advance.begin("all", 4)
    advance.begin("parse", 2)
    advance.step("parse", 0)
    advance.begin("nodes", 10)
    advance.step("nodes", 4)
    advance.end("nodes")
    advance.end("parse")
    advance.step("all", 0)
    assert heard == [(0, "all"), (0, "parse"), (1 / 8, "parse"), (1 / 8, "parse"), (3 / 16, "parse"), (1 / 4, "all")]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 6)), max_size=30))
def test_whatever_phases_come_the_number_never_goes_back(events: list[tuple[str, int]]) -> None:
    heard: list[float] = []
    advance = BuildProgress(lambda done, phase: heard.append(done), lambda: False)
    advance.begin("all", 3)
    for name, step in events:
        if step < 0:
            advance.end(name)
        elif step == 6:
            advance.begin(name, 4)
        else:
            assert advance.step(name, step)
    assert heard == sorted(heard)
    assert all(0 <= done <= 1 for done in heard)


def test_errors_and_the_memory_of_the_largest_profile_are_kept() -> None:
    messages = BuildMessages()
    for severity, text in (
        (0, "internal"),
        (1, "error"),
        (2, "warning"),
        (3, "Total Activation Memory: 700 bytes"),
        (3, "Total Activation Memory: 300 bytes"),
        (4, "chatter"),
    ):
        messages.add(severity, text)
    assert messages == BuildMessages(["internal", "error"], ["warning"], 700)
