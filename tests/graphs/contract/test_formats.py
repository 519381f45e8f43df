"""Formats: each is consistent in itself, known to the backends, and in the table of the docs."""

from __future__ import annotations

import re

import pytest

from spaceport.graphs.contract.formats import FORMATS, Format
from spaceport.runtime.backends import BACKENDS
from support.paths import ROOT


@pytest.mark.parametrize("each", FORMATS.values(), ids=FORMATS.keys())
def test_a_format_is_consistent(each: Format) -> None:
    assert FORMATS[each.name] is each
    assert set(each.backends) <= BACKENDS.keys()
    assert each.lowerings
    assert each.native == (each.kv_cache == "int8")
    if each.native:
        assert (each.dtype, each.lowerings, each.backends) == ("float32", ("scatter",), ("onnxruntime",))
    elif each.weights == "same":
        assert each.name == each.dtype
    else:
        assert (each.name, each.lowerings) == (f"{each.dtype}-{each.weights}", ("append",))
        assert "onnxruntime-cuda" not in each.backends  # it runs scatter-lowered graphs only


def test_the_docs_have_each_format_with_its_purpose() -> None:
    page = (ROOT / "docs" / "quantization.md").read_text("utf-8")
    rows = re.findall(
        r"^\| (`.*`) \| (.*) \|$", page.partition("| format | for |")[2].partition("\n\n")[0], re.MULTILINE
    )
    documented = {name: purpose for names, purpose in rows for name in re.findall(r"`([^`]+)`", names)}
    assert documented == {name: each.purpose for name, each in FORMATS.items()}
