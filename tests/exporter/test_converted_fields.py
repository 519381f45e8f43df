"""Fields: typed access to published configurations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.converted_fields import Fields, Fixed
from spaceport.exporter.sar_config import CheckpointError
from support.published_checkpoints import WITHOUT, configuration

FILE = Path("config.json")


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [
        ("chatglm", {}, "float16"),
        ("internlm", {"torch_dtype": WITHOUT}, None),
        ("qwen", {}, "bfloat16"),
        ("qwen", {"bf16": False}, None),
        ("qwen", {"bf16": False, "params_dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
def test_the_type_of_the_published_weights_is_known(family: str, changes: dict[str, Any], dtype: str | None) -> None:
    content = configuration(family, changes)
    assert Fields(Path("config.json"), content, "").dtype() == dtype


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "7", None])
def test_a_size_is_a_whole_number(value: Any) -> None:
    assert Fields(FILE, {"size": 7}, "X").whole("size") == 7
    with pytest.raises(CheckpointError, match=r"size (is|is missing).*: expected a whole number of at least 1 in a X"):
        Fields(FILE, {"size": value}, "X").whole("size")


@pytest.mark.parametrize("value", [0, -1.0, True, "7", float("inf"), float("nan"), None])
def test_a_number_is_above_0(value: Any) -> None:
    assert Fields(FILE, {"base": 1e-5}, "X").number("base") == 1e-5
    with pytest.raises(CheckpointError, match=r"base (is|is missing).*: expected a number above 0 in a X"):
        Fields(FILE, {"base": value}, "X").number("base")


@pytest.mark.parametrize(("value", "wanted"), [(1, True), (0, False), (None, True), (True, 1.0)])
def test_a_flag_that_is_nearly_right_is_refused(value: Any, wanted: Any) -> None:
    rules = {"flag": Fixed(wanted, wanted, "something else")}
    Fields(FILE, {}, "X").check(rules, (), ())
    Fields(FILE, {"flag": wanted}, "X").check(rules, (), ())
    with pytest.raises(CheckpointError, match=re.escape(f"flag is {value}, so the model has something else")):
        Fields(FILE, {"flag": value}, "X").check(rules, (), ())
