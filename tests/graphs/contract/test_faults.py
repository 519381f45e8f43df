"""Messages of errors have a maximum length, whatever they quote."""

from __future__ import annotations

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


@pytest.mark.parametrize("length", [0, 100, 3500])
def test_a_message_of_the_usual_length_is_unchanged(length: int) -> None:
    assert str(SpaceportError("b" * length)) == "b" * length


@pytest.mark.parametrize(
    "option", [{"stop": [1] * 10**6}, {"draft": "z" * 10**6}, {"max_tokens": "9" * 10**6}, {"grammar": "[" * 10**6}]
)
def test_an_invalid_option_of_a_megabyte_has_a_short_message(option: dict[str, object]) -> None:
    with pytest.raises(OptionFault) as caught:
        Decoding(**option)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 3600
    with pytest.raises(OptionFault) as caught:
        Sampling(temperature="9" * 10**6)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 3600
