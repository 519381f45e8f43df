"""Measuring: the modes of a bundle, their order, and differences between completions with threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode.measuring import difference, measure
from spaceport.tools.bench.decode.modes import MODES, DecodeMode, modes_for, parse_modes
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


def names_of(manifest: Manifest, names: tuple[str, ...] | None = None, fixed: tuple[int, ...] = ()) -> list[str]:
    return [mode.name for mode in modes_for(manifest, 8, names, fixed)]


def test_a_bundle_that_drafts_and_forks_has_all_modes_and_references_are_always_included(demo_bundle: Path) -> None:
    manifest = read_manifest(demo_bundle)
    assert names_of(manifest) == list(MODES)
    assert names_of(manifest, fixed=(3, 1, 3)) == [*MODES, "fixed 3", "fixed 1"]
    assert names_of(manifest, ("default",)) == ["plain", "default"]
    assert names_of(manifest, ("forked+drafted",)) == ["plain", "forked", "forked+drafted"]
    assert [mode.reference for mode in modes_for(manifest, 8)] == ["plain"] * 4 + ["forked"] * 2


def test_unsupported_modes_are_left_out_or_refused(tiny_bundle: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    assert names_of(manifest) == ["plain", "lookup", "masks", "default"]
    untuned = replace(manifest, max_mask_slots=0)
    assert names_of(untuned) == ["plain", "default"]
    for refused, message in (
        (lambda: names_of(manifest, ("forked+drafted",)), "expected a bundle with a fork token"),
        (lambda: names_of(untuned, ("masks",)), "expected a bundle with mask slots"),
        (lambda: names_of(manifest, fixed=(6,)), r"--fixed names 6: .* this one has 5"),
        (lambda: parse_modes("plain,fast"), "--modes names 'fast': expected comma-separated names"),
    ):
        with pytest.raises(OptionFault, match=message):
            refused()


def test_each_mode_drafts_what_its_name_says(demo_bundle: Path) -> None:
    decodings: dict[str, Decoding] = {
        mode.name: mode.decoding for mode in modes_for(read_manifest(demo_bundle), 8, fixed=(2,))
    }
    drafts = {name: decoding.draft_config(5) for name, decoding in decodings.items()}
    assert {name: (draft.mask_slots, draft.lookup > 0) for name, draft in drafts.items()} == {
        "plain": (0, False),
        "lookup": (0, True),
        "masks": (5, False),
        "default": (5, True),
        "forked": (0, False),
        "forked+drafted": (5, True),
        "fixed 2": (2, False),
    }
    assert drafts["default"] == Decoding().draft_config(5)
    assert drafts["fixed 2"].shape == "chain"
    assert [name for name, decoding in decodings.items() if decoding.fork] == ["forked", "forked+drafted"]
    assert {decoding.max_tokens for decoding in decodings.values()} == {8}
