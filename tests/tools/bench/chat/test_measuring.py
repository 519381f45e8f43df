"""Measuring: turns of the subjects, conversations, differences, failures."""

from __future__ import annotations

from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.chat.measuring import Job, measure
from support.chat_subjects import FakeSubject, chat_prompt


def encode(prompt: Prompt) -> list[int]:
    """A token for each message: its length."""
    return [len(message["content"]) for message in prompt]  # type: ignore[index]


def quiet(_: str) -> None:
    pass


def subjects(*changes: int) -> list[FakeSubject]:
    log: list[tuple[str, tuple[int, ...]]] = []
    plain = FakeSubject("plain", log=log)
    return [plain, *(FakeSubject(f"mode {n}", "plain", change=change, log=log) for n, change in enumerate(changes))]


def test_all_subjects_answer_a_prompt_before_the_next_one_and_the_order_rotates() -> None:
    modes = subjects(0, 0)
    jobs = [Job(chat_prompt(line), modes) for line in (1, 22)]
    found = measure(jobs, encode, 2, quiet)
    orders = [[name for name, _ in modes[0].log[start : start + 3]] for start in range(0, len(modes[0].log), 3)]
    names = [mode.name for mode in modes]
    rotated = [names[shift:] + names[:shift] for shift in range(3)]
    assert orders == [rotated[0], rotated[1], rotated[2], rotated[2], rotated[0]]  # the first one is the warm-up
    assert len(found.answers) == 2 * 2 * 3
    assert found.compared == {"mode 0": 4, "mode 1": 4}
    assert not found.differences


def test_a_conversation_continues_with_the_plain_answers_for_all() -> None:
    modes = subjects(1)
    measure([Job(chat_prompt(7, turns=3), modes)], encode, 1, quiet)
    prompts = {name: [prompt for other, prompt in modes[0].log[2:] if other == name] for name in ("plain", "mode 0")}
    assert prompts["plain"] == prompts["mode 0"] == [(3,), (3, 8, 3), (3, 8, 3, 9, 3)]  # "answer 3", "answer 14"


def test_a_difference_names_prompt_answer_and_position() -> None:
    found = measure([Job(chat_prompt(7, turns=2), subjects(5))], encode, 1, quiet)
    assert found.different == {"mode 0": 2}
    first, second = found.differences
    assert (first.turn, second.turn) == (1, 2)
    one = first.difference
    assert (one.mode, one.reference, one.line, one.token, one.expected, one.found) == ("mode 0", "plain", 7, 1, 3, 8)


def test_a_subject_that_fails_is_not_asked_again() -> None:
    plain = FakeSubject("plain")
    peer = FakeSubject("peer", fails=3)
    found = measure([Job(chat_prompt(line), [plain, peer]) for line in (1, 2, 3, 4)], encode, 1, quiet)
    assert found.failed == {"peer": "no answer today"}
    assert len(peer.log) == 3  # the warm-up, one answer, the failure
    assert [one.prompt.line for one in found.answers if one.subject == "peer"] == [1]
    assert [one.prompt.line for one in found.answers if one.subject == "plain"] == [1, 2, 3, 4]


def test_the_longest_duration_is_announced_after_the_warm_up() -> None:
    lines: list[str] = []
    measure([Job(chat_prompt(1, turns=2), [FakeSubject("plain", max_tokens=400)])], encode, 3, lines.append)
    # 0.25 s a token, 400 tokens, 2 answers, 3 rounds
    assert lines[0] == (
        "1 prompts, 1 modes and runtimes, 3 rounds: at most 10 min if every answer has the maximum length"
    )
