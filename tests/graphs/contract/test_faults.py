"""Messages of errors have a maximum length, whatever they quote."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spaceport.graphs.contract.faults import OptionFault, SpaceportError
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling


def test_the_middle_of_a_long_message_is_left_out() -> None:
    message = str(OptionFault("stop is " + "a" * 10**6 + ": expected fewer characters"))
    assert len(message) < 3600
    assert message.startswith("stop is aaa")
    assert "characters left out" in message
    assert message.endswith("aaa: expected fewer characters")
    for length in (0, 100, 3500):
        assert str(SpaceportError("b" * length)) == "b" * length


@pytest.mark.parametrize(
    "make",
    [
        lambda: Decoding(stop=[1] * 10**6),  # type: ignore[arg-type]
        lambda: Decoding(draft="z" * 10**6),  # type: ignore[arg-type]
        lambda: Decoding(grammar="[" * 10**6),  # type: ignore[arg-type]
        lambda: Sampling(temperature="9" * 10**6),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_option_of_a_megabyte_has_a_short_message(make: Callable[[], object]) -> None:
    with pytest.raises(OptionFault) as caught:
        make()
    assert len(str(caught.value)) < 3600
