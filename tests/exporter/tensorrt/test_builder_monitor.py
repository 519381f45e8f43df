"""Builder monitor: progress over nested phases, and recorded messages of the builder."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spaceport.exporter.tensorrt.builder_monitor import BuildMessages, BuildProgress


def test_nested_phases_progress_the_step_that_contains_them() -> None:
    reported: list[tuple[float, str]] = []
    progress = BuildProgress(lambda done, phase: reported.append((done, phase)), lambda: False)
    progress.begin("all", 4)
    progress.begin("parse", 2)
    progress.step("parse", 0)
    progress.begin("nodes", 10)
    progress.step("nodes", 4)
    progress.end("nodes")
    progress.end("parse")
    progress.step("all", 0)
    assert reported == [(0, "all"), (0, "parse"), (1 / 8, "parse"), (1 / 8, "parse"), (3 / 16, "parse"), (1 / 4, "all")]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 6)), max_size=30))
def test_progress_never_decreases(events: list[tuple[str, int]]) -> None:
    reported: list[float] = []
    progress = BuildProgress(lambda done, phase: reported.append(done), lambda: False)
    progress.begin("all", 3)
    for name, step in events:
        if step < 0:
            progress.end(name)
        elif step == 6:
            progress.begin(name, 4)
        else:
            assert progress.step(name, step)
    assert reported == sorted(reported)
    assert all(0 <= done <= 1 for done in reported)


def test_errors_and_the_activation_memory_of_the_largest_profile_are_recorded() -> None:
    messages = BuildMessages()
    for severity, text in (
        (0, "internal"),
        (1, "error"),
        (2, "warning"),
        (3, "Total Activation Memory: 700 bytes"),
        (3, "Total Activation Memory: 300 bytes"),
        (4, "verbose"),
    ):
        messages.add(severity, text)
    assert messages == BuildMessages(["internal", "error"], ["warning"], 700)
