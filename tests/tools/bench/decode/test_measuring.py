"""Measuring: what counts as a difference between texts in threads, and in what order the modes run."""

from __future__ import annotations

from pathlib import Path

import pytest

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode.measuring import difference, measure
from spaceport.tools.bench.decode.modes import DecodeMode, modes_for
from spaceport.tools.bench.decode.options import DecodeOptions
from spaceport.tools.verify.audit.prompts import TokenizedPrompt
from spaceport.tools.verify.thread_tokens import ThreadTokens


def thread(tokens: list[int], *path: int, start: int = 2, ended: bool = True, cut: bool = False) -> ThreadTokens:
    return ThreadTokens(path, tuple(tokens), start, ended, cut)


ROOT = thread([1, 2, 3, 4, 5])
CHILD = thread([1, 2, 3, 9, 7, 8], 0, start=4)


@pytest.mark.parametrize(
    ("found", "expected", "place"),
    [
        ([ROOT, CHILD], [ROOT, CHILD], None),
        ([thread([1, 2, 3, 6, 5]), CHILD], [ROOT, CHILD], ((), 3)),
        ([thread([1, 2, 3, 4])], [ROOT], ((), 4)),
        ([thread([1, 2, 3, 4, 5], ended=False)], [ROOT], ((), 5)),
        ([ROOT, thread([1, 2, 3, 9, 7, 7], 0, start=4)], [ROOT, CHILD], ((0,), 5)),
        ([ROOT], [ROOT, CHILD], ((0,), 4)),
        ([ROOT, CHILD], [ROOT], ((0,), 4)),
        # Where the room of all threads ended, how far a thread came says nothing; what it wrote does.
        ([thread([1, 2, 3], cut=True, ended=False)], [ROOT, CHILD], None),
        ([thread([1, 2, 9], cut=True, ended=False)], [ROOT, CHILD], ((), 2)),
    ],
)
def test_texts_differ_at_the_first_token_of_the_first_thread_that_does(
    found: list[ThreadTokens], expected: list[ThreadTokens], place: tuple[tuple[int, ...], int] | None
) -> None:
    by_path = [{each.path: each for each in threads} for threads in (found, expected)]
    assert difference(*by_path) == place


def test_modes_take_turns_and_the_warm_up_is_not_measured(tiny_bundle: Path) -> None:
    options = DecodeOptions(max_tokens=4, rounds=2)
    prompts = [TokenizedPrompt(line, (5, 6, 7 + line)) for line in (1, 2)]
    asked: list[str] = []
    with Runtime.open(tiny_bundle, threads=1, max_seq_len=32, step_costs="standard") as runtime:
        modes = modes_for(runtime.bundle.manifest, 4, ("plain", "lookup", "masks"))
        runtimes = {mode.name: _Noting(runtime, mode, asked) for mode in modes}
        found = measure(modes, runtimes, prompts, options, lambda _: None)  # type: ignore[arg-type]
    orders = [asked[first : first + 3] for first in range(0, len(asked), 3)]
    names = [mode.name for mode in modes]
    turns = [names[turn:] + names[:turn] for turn in range(3)]
    # Two prompts in each of three rounds: the mode that begins is another one on each prompt, and in each round.
    assert orders == [turns[0], turns[1], turns[1], turns[2], turns[2], turns[0]]
    assert {text.round for text in found.texts} == {1, 2}
    assert len(found.texts) == 2 * 2 * 3
    assert found.seconds.keys() == {(name, 0.0, number) for name in names for number in range(3)}
    assert found.compared == {("lookup", 0.0): 6, ("masks", 0.0): 6}
    assert not found.differences


class _Noting:
    """A runtime that notes which mode asked it."""

    def __init__(self, runtime: Runtime, mode: DecodeMode, asked: list[str]) -> None:
        self.bundle, self._runtime, self._mode, self._asked = runtime.bundle, runtime, mode, asked

    def generate(self, prompt: list[int], decoding: Decoding) -> object:
        self._asked.append(self._mode.name)
        assert decoding.mask_slots == self._mode.decoding.mask_slots
        return self._runtime.generate(prompt, decoding)
