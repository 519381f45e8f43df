"""Measuring: differences between completions with threads, and the order of the modes."""

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
    ("found", "expected", "first"),
    [
        ([ROOT, CHILD], [ROOT, CHILD], None),
        ([thread([1, 2, 3, 6, 5]), CHILD], [ROOT, CHILD], ((), 3)),
        ([thread([1, 2, 3, 4])], [ROOT], ((), 4)),
        ([thread([1, 2, 3, 4, 5], ended=False)], [ROOT], ((), 5)),
        ([ROOT, thread([1, 2, 3, 9, 7, 7], 0, start=4)], [ROOT, CHILD], ((0,), 5)),
        ([ROOT], [ROOT, CHILD], ((0,), 4)),
        ([ROOT, CHILD], [ROOT], ((0,), 4)),
        # The length of a cut thread is not compared; its tokens are.
        ([thread([1, 2, 3], cut=True, ended=False)], [ROOT, CHILD], None),
        ([thread([1, 2, 9], cut=True, ended=False)], [ROOT, CHILD], ((), 2)),
    ],
)
def test_a_difference_is_the_first_differing_token_of_the_first_differing_thread(
    found: list[ThreadTokens], expected: list[ThreadTokens], first: tuple[tuple[int, ...], int] | None
) -> None:
    by_path = [{each.path: each for each in threads} for threads in (found, expected)]
    assert difference(*by_path) == first


def test_the_order_of_modes_rotates_and_the_warm_up_is_not_recorded(tiny_bundle: Path) -> None:
    options = DecodeOptions(max_tokens=4, rounds=2)
    prompts = [TokenizedPrompt(line, (5, 6, 7 + line)) for line in (1, 2)]
    used: list[str] = []  # mode of each completion
    with Runtime.open(tiny_bundle, threads=1, max_seq_len=32, step_costs="standard") as runtime:
        modes = modes_for(runtime.bundle.manifest, 4, ("plain", "lookup", "masks"))
        runtimes = {mode.name: _RecordingRuntime(runtime, mode, used) for mode in modes}
        found = measure(modes, runtimes, prompts, options, lambda _: None)  # type: ignore[arg-type]
    orders = [used[first : first + 3] for first in range(0, len(used), 3)]
    names = [mode.name for mode in modes]
    rotated = [names[shift:] + names[:shift] for shift in range(3)]
    # Two prompts in each of three rounds: the first mode changes with the prompt and with the round.
    assert orders == [rotated[0], rotated[1], rotated[1], rotated[2], rotated[2], rotated[0]]
    assert {one.round for one in found.completions} == {1, 2}
    assert len(found.completions) == 2 * 2 * 3
    assert found.seconds.keys() == {(name, 0.0, number) for name in names for number in range(3)}
    assert found.compared == {("lookup", 0.0): 6, ("masks", 0.0): 6}
    assert not found.differences


class _RecordingRuntime:
    """A runtime that records the mode of each completion."""

    def __init__(self, runtime: Runtime, mode: DecodeMode, used: list[str]) -> None:
        self.bundle, self._runtime, self._mode, self._used = runtime.bundle, runtime, mode, used

    def generate(self, prompt: list[int], decoding: Decoding) -> object:
        self._used.append(self._mode.name)
        assert decoding.mask_slots == self._mode.decoding.mask_slots
        return self._runtime.generate(prompt, decoding)
