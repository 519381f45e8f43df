"""Chats: prompts, the order of subjects, differences and failures, other runtimes, and figures of measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chat_measuring import (
    NO_KIND,
    BenchPrompt,
    ChatMeasurements,
    ChatSubject,
    Job,
    MeasuredAnswer,
    PeerOptions,
    Peers,
    TimedAnswer,
    conversation_parts,
    read_chat_prompts,
    running_peers,
)
from benchmarks.chat_report import ALL, chat_figures, peer_ratios
from spaceport.runtime.comparison import ThreadTokens
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.machine import Machine, ProcessFailed
from spaceport.tools.bench.rivals import Environments, Peer
from support.fake_subjects import FAKE, installed
from support.paths import ROOT, TINY

pytestmark = pytest.mark.on_change("tests/support/fake_runtime.py")  # starts processes
HELD_OUT = ROOT / "tools" / "demo" / "chat" / "heldout.jsonl"
MACHINE = Machine("a CPU", "model 1", 2, (), "a system")
MODE = Statistics()  # marks an answer as that of a mode


def chat_prompt(line: int, kind: str = "code", turns: int = 1) -> BenchPrompt:
    return BenchPrompt(line, kind, tuple(({"role": "user", "content": f"{line}.{turn}"},) for turn in range(turns)))


def chat_answer(
    seconds: float,
    tokens: int = 11,
    first: float = 1.0,
    first_tokens: int = 1,
    *,
    complete: bool = True,
    statistics: Statistics | None = None,
    threads: int = 1,
) -> TimedAnswer:
    """An answer with these times; with statistics it is that of a mode."""
    found = {(index,) * bool(index): ThreadTokens((), (1,), 0) for index in range(threads)}
    return TimedAnswer(tokens, seconds, seconds / 2, first, first_tokens, complete, "text", found, statistics)


def chat_measured(*given: tuple[str, int, BenchPrompt, TimedAnswer]) -> ChatMeasurements:
    """Measurements of a subject, a round, a prompt and an answer each; answers of a prompt are its turns."""
    return ChatMeasurements([MeasuredAnswer(*one) for one in given])


Log = list[tuple[str, tuple[int, ...]]]  # subject and prompt of each answer


def fake_subject(name: str, log: Log, reference: str | None = None, change: int = 0) -> ChatSubject:
    """Answers a prompt with its sum, to which `change` is added, and records the prompts."""

    def answer(prompt: Sequence[int]) -> TimedAnswer:
        log.append((name, tuple(prompt)))
        token = sum(prompt) + change
        threads = {(): ThreadTokens((), (*prompt, token), len(prompt), "end")}
        return TimedAnswer(
            2, 0.5, 0.5, 0.25, 1, complete=True, text=f"answer {token}", threads=threads, statistics=Statistics()
        )

    return ChatSubject(name, answer, 8, reference)


CODE, OTHER, LIST = chat_prompt(3), chat_prompt(4), chat_prompt(9, "lists")


def turns(roles: str) -> list[dict[str, str]]:
    """Messages by the first letters of their roles."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[letter], "content": f"{letter}{number}"} for number, letter in enumerate(roles)]


def encode(prompt: Prompt) -> list[int]:
    """A token for each message: its length."""
    return [len(message["content"]) for message in prompt]  # type: ignore[index]


def subjects(*changes: int) -> tuple[list[ChatSubject], Log]:
    log: Log = []
    modes = [fake_subject(f"mode {n}", log, "plain", change) for n, change in enumerate(changes)]
    return [fake_subject("plain", log), *modes], log


def measured_chats(jobs: Sequence[Job], rounds: int) -> ChatMeasurements:
    found = ChatMeasurements()
    found.measure(jobs, encode, rounds, print)
    return found


def test_a_user_turn_without_an_answer_is_answered_and_the_conversation_continues_with_it(tmp_path: Path) -> None:
    for roles, expected in (("u", "u"), ("uuu", "u u u"), ("suu", "su u"), ("uau", "uau"), ("uauu", "uau u")):
        parts = ["".join(message["content"][0] for message in part) for part in conversation_parts(turns(roles))]
        assert parts == expected.split()
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": turns("suu")}) + "\n" + json.dumps({"text": "plain"}) + "\n", "utf-8")
    chat, plain = read_chat_prompts(file, None)
    assert chat.kind == plain.kind == NO_KIND
    first = chat.prompt([])
    assert first == turns("su")
    assert chat.prompt(["yes"]) == [*first, {"role": "assistant", "content": "yes"}, turns("suu")[2]]
    assert plain.prompt([]) == "plain"
    prompts = read_chat_prompts(HELD_OUT, 1)  # one of each kind
    assert [prompt.line for prompt in prompts] == list(range(1, 201, 25))
    assert len({prompt.kind for prompt in prompts}) == 8


def test_all_subjects_answer_a_prompt_before_the_next_one_and_the_order_rotates() -> None:
    modes, log = subjects(0, 0)
    found = measured_chats([Job(chat_prompt(line), modes) for line in (1, 22)], 2)
    names = [mode.name for mode in modes]
    rotated = [names[shift:] + names[:shift] for shift in (0, 1, 2, 2, 0)]  # the first one is the warm-up
    assert [name for name, _ in log] == [name for order in rotated for name in order]
    assert len(found.answers) == 2 * 2 * 3
    assert found.outputs.compared == {("mode 0", 0.0): 4, ("mode 1", 0.0): 4}
    assert not found.outputs.differences


def test_a_conversation_continues_with_the_plain_answers_and_a_difference_names_its_place() -> None:
    modes, log = subjects(5)
    found = measured_chats([Job(chat_prompt(7, turns=3), modes)], 1)
    prompts = {name: [prompt for other, prompt in log[2:] if other == name] for name in ("plain", "mode 0")}
    assert prompts["plain"] == prompts["mode 0"] == [(3,), (3, 8, 3), (3, 8, 3, 9, 3)]  # "answer 3", "answer 14"
    assert found.outputs.different("mode 0") == 3
    assert [one.turn for one in found.outputs.differences] == [1, 2, 3]
    one = found.outputs.differences[0]
    first = one.first
    assert (one.mode, one.reference, one.line, first.token, first.expected, first.found) == (
        "mode 0",
        "plain",
        7,
        1,
        3,
        8,
    )


@contextmanager
def running(folder: Path, *peers: Peer) -> Iterator[Peers]:
    """Fake peers in an environment that looks installed."""
    installed(Environments(folder), "ctranslate2")
    options = PeerOptions(peers, folder, TINY)
    with running_peers(options, MACHINE, [99], 64, 6, 1, lambda _: None) as found:
        yield found


def fake(name: str = "fake", **options: object) -> Peer:
    return Peer(name, "ctranslate2", FAKE, (), "none", {"step": 2.0, **options})


def test_a_peer_answers_with_and_without_lookup_in_one_process(tmp_path: Path) -> None:
    with running(tmp_path, fake()) as peers:
        plain, lookup = peers.subjects
        (worker,) = peers.workers
        found = plain.answer([5, 6, 7])
        assert (found.tokens, found.seconds, found.first_token_seconds, found.first_tokens) == (4, 8.0, 2.0, 1)
        assert (found.complete, found.statistics) == (True, None)
        assert lookup.answer([5, 6, 7]).seconds == 5.0
        (opened,) = peers.opened
        assert (opened.name, opened.model, opened.versions) == ("fake", TINY.name, {})
    assert worker.process.poll() is not None
    with running(tmp_path, replace(fake(), looks_up=False)) as peers:
        assert [subject.name for subject in peers.subjects] == ["fake"]


def test_a_peer_that_cannot_run_is_skipped_with_the_reason_and_one_that_ends_has_failed(tmp_path: Path) -> None:
    missing = Peer("other", "openvino-genai", FAKE, (), "none", {})
    unconverted = Peer("model", "ctranslate2", FAKE, ("openvino-int8",), "none", {})
    narrow = fake("narrow", dtype="bfloat16")
    with running(tmp_path, fake(fails="open"), missing, unconverted, narrow) as peers:
        assert peers.subjects == []
        reasons = {skipped.name: skipped.reason for skipped in peers.skipped}
    assert "no model today" in reasons["fake"]
    assert reasons["other"].endswith("add --setup")
    assert reasons["model"].startswith("no converted model at ")
    assert reasons["narrow"] == "this CPU has none of avx512_bf16, amx_bf16: measure float32"
    with running(tmp_path, fake(fails="answer")) as peers, pytest.raises(ProcessFailed, match="no answer today"):
        peers.subjects[0].answer([5])


def test_a_speedup_is_the_geometric_mean_over_prompts_by_kind() -> None:
    found = chat_measured(
        *(("plain", 1, prompt, chat_answer(6.0, statistics=MODE)) for prompt in (CODE, OTHER, LIST)),
        ("default", 1, CODE, chat_answer(3.0, statistics=MODE)),
        ("default", 1, OTHER, chat_answer(12.0, statistics=MODE)),
        ("default", 1, LIST, chat_answer(1.5, statistics=MODE)),
    )
    by_kind = {one.kind: one for one in chat_figures(found, ["default"], ["code", "lists"], 0)}
    expected = {"code": (2 * 0.5) ** 0.5, "lists": 4.0, ALL: (2 * 0.5 * 4) ** (1 / 3)}
    means = {kind: one.speedup.mean for kind, one in by_kind.items() if one.speedup}
    assert means == pytest.approx(expected)
    overall = by_kind[ALL]
    assert overall.speedup is not None
    assert (overall.speedup.worst, overall.speedup.worst_line) == (pytest.approx(0.5), 4)
    assert overall.speedup.low < overall.speedup.mean < overall.speedup.high
    assert (overall.losses, by_kind["lists"].losses) == (1, 0)
    assert overall.tokens_per_second == pytest.approx(33 / 16.5)


def test_medians_over_rounds_decide_and_incomplete_rounds_are_left_out() -> None:
    found = chat_measured(
        *(("plain", n, prompt, chat_answer(6.0, statistics=MODE)) for n in (1, 2, 3) for prompt in (CODE, LIST)),
        *(("peer", number, CODE, chat_answer(seconds)) for number, seconds in ((1, 3.0), (2, 2.0), (3, 60.0))),
        ("peer", 1, LIST, chat_answer(0.1)),  # failed in the second round
    )
    (peer,) = chat_figures(found, ["peer"], [], 0)
    assert peer.speedup is not None
    assert peer.speedup.mean == pytest.approx(2.0)
    assert peer.prompts == 1
    ratios = {ratio.kind: ratio for ratio in peer_ratios(found, ["plain"], ["peer", "none"], ["code", "lists"], 0)}
    assert ratios[ALL].speedup == ratios["code"].speedup
    assert ratios["lists"].speedup is None
    overall = ratios[ALL].speedup
    assert overall is not None
    assert overall.mean == pytest.approx(0.5)
