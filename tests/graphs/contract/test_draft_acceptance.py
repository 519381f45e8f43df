"""Draft acceptance: measured rates are read as they were written, and a new measurement replaces the old one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.graphs.contract.draft_acceptance import DraftAcceptance, draft_acceptances, with_acceptance
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField, Rules

RATES = st.floats(0, 1)
MEASURED = st.builds(
    DraftAcceptance,
    rates=st.lists(RATES, max_size=64).map(lambda rates: tuple(sorted(rates, reverse=True))),
    lookup=st.just(()) | st.lists(RATES, min_size=5, max_size=5).map(tuple),
    temperature=st.floats(0, 2),
    tokens=st.integers(0, 10**9),
    data=st.sampled_from(["", "heldout.jsonl", "validation split of größe.jsonl"]),
    date=st.just("") | st.dates().map(str),
)


def read(text: str) -> tuple[DraftAcceptance, ...]:
    return draft_acceptances(JsonField(json.loads(text), "acceptance", Rules(InputFault, "; measure again")))


@given(st.lists(MEASURED, max_size=4, unique_by=lambda entry: entry.temperature))
def test_rates_are_read_as_they_were_written(measured: list[DraftAcceptance]) -> None:
    assert read(json.dumps([asdict(entry) for entry in measured])) == tuple(measured)


@given(st.lists(MEASURED, max_size=4), MEASURED)
def test_a_new_measurement_replaces_the_one_at_its_temperature(
    measured: list[DraftAcceptance], newest: DraftAcceptance
) -> None:
    known: tuple[DraftAcceptance, ...] = ()
    for entry in measured:
        known = with_acceptance(known, entry)
    found = with_acceptance(known, newest)
    temperatures = [entry.temperature for entry in found]
    assert temperatures == sorted({*(entry.temperature for entry in measured), newest.temperature})
    assert newest in found
    assert set(found) - {newest} == {entry for entry in known if entry.temperature != newest.temperature}


def test_a_wrong_rate_is_refused_with_its_path_and_what_to_do() -> None:
    wrong = json.dumps([asdict(DraftAcceptance((0.5, 0.25))) | {"rates": [0.25, 0.5]}])
    message = r"acceptance\[0\].rates is \[0.25, 0.5\]: expected rates that do not increase with depth; measure again"
    with pytest.raises(InputFault, match=message):
        read(wrong)
    for rate in (float("nan"), float("inf"), -0.01, 1.01):
        for rates, lookup in (((rate,), ()), ((), (rate,) * 5)):
            with pytest.raises(ValueError, match="expected rates from 0 to 1"):
                DraftAcceptance(rates, lookup)


def test_one_line_shows_what_was_measured() -> None:
    measured = DraftAcceptance((0.714, 0.5), (0.3, 0.45, 0.6, 0.85, 1.0), 0.0, 1234, "heldout.jsonl", "2026-01-31")
    source = "1,234 tokens of heldout.jsonl, 2026-01-31"
    assert str(measured) == f"71 50 % by depth; lookup 30 45 60 85 100 %; {source}"
    assert str(replace(measured, rates=())) == f"lookup 30 45 60 85 100 %; {source}"
    assert str(DraftAcceptance((0.5,))) == "50 % by depth; 0 tokens of unnamed text"
