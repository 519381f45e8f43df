"""Workload: the same requests for each service, with the shares that were asked for."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.serve.workload import Workload, planned


def test_each_service_gets_the_same_requests() -> None:
    workload = Workload(requests=200, cancelled=0.3, dropped=0.1, slow=0.2, unstreamed=0.25, seed=3)
    found = list(planned(workload, 7, first=5))
    assert found == list(planned(workload, 7, first=5))
    assert [one.prompt for one in found[:4]] == [5, 6, 0, 1]
    assert [one.number for one in found] == list(range(200))


def test_clients_behave_as_the_shares_say() -> None:
    workload = Workload(requests=4000, cancelled=0.3, dropped=0.1, slow=0.2, unstreamed=0.25)
    found = list(planned(workload, 7))
    counts = Counter(one.behaviour for one in found)
    expected = {"cancel": 0.3, "drop": 0.1, "slow": 0.2, "read": 0.4}
    assert {name: counts[name] / 4000 for name in expected} == pytest.approx(expected, abs=0.03)
    assert sum(not one.streamed for one in found) / 4000 == pytest.approx(0.25, abs=0.03)
    assert {one.behaviour for one in found if one.leaves} == {"cancel", "drop"}


def test_random_arrivals_have_the_mean_rate() -> None:
    found = list(islice(planned(Workload(seconds=60, rate=20.0), 3), 4000))
    assert sum(one.gap for one in found) / 4000 == pytest.approx(1 / 20, rel=0.1)
    assert len({one.gap for one in found}) > 3000
    assert {one.gap for one in planned(Workload(requests=5), 3)} == {0.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected one of --requests and --seconds"),
        ({"requests": 1, "seconds": 1.0}, "expected one of --requests and --seconds"),
        ({"requests": 0}, "requests is 0"),
        ({"requests": 1, "clients": 0}, "clients is 0"),
        ({"seconds": 0.0}, "seconds is 0"),
        ({"seconds": 1.0, "ramp": -1.0}, "ramp is -1"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"requests": 1, "cancelled": 1.5}, "cancelled is 1.5: expected a share"),
        ({"requests": 1, "cancelled": 0.6, "slow": 0.6}, "add up to 1.2"),
    ],
)
def test_invalid_workloads_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionFault, match=message):
        Workload(**given)
