"""Modes: the modes of a bundle and their drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.tools.bench.decode.modes import MODES, modes_for, parse_modes


def names_of(manifest: Manifest, names: tuple[str, ...] | None = None, fixed: tuple[int, ...] = ()) -> list[str]:
    return [mode.name for mode in modes_for(manifest, 8, names, fixed)]


def test_a_bundle_that_drafts_and_forks_has_all_modes(demo_bundle: Path) -> None:
    manifest = read_manifest(demo_bundle)
    assert names_of(manifest) == list(MODES)
    assert names_of(manifest, fixed=(3, 1, 3)) == [*MODES, "fixed 3", "fixed 1"]


def test_unsupported_modes_are_left_out_or_refused(tiny_bundle: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    assert names_of(manifest) == ["plain", "lookup", "masks", "default"]
    untuned = replace(manifest, max_mask_slots=0)
    assert names_of(untuned) == ["plain", "default"]
    with pytest.raises(OptionFault, match="expected a bundle with a fork token"):
        names_of(manifest, ("forked+drafted",))
    with pytest.raises(OptionFault, match="expected a bundle with mask slots"):
        names_of(untuned, ("masks",))
    with pytest.raises(OptionFault, match=r"--fixed names 6: .* this one has 5"):
        names_of(manifest, fixed=(6,))
    with pytest.raises(OptionFault, match="--modes names 'fast': expected comma-separated names"):
        parse_modes("plain,fast")


def test_reference_modes_are_always_included(demo_bundle: Path) -> None:
    manifest = read_manifest(demo_bundle)
    assert names_of(manifest, ("default",)) == ["plain", "default"]
    assert names_of(manifest, ("forked+drafted",)) == ["plain", "forked", "forked+drafted"]
    assert [mode.reference for mode in modes_for(manifest, 8)] == ["plain"] * 4 + ["forked"] * 2


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
