"""The default data types depend on the class of the CPU and on the model: int8 only where it pays and is accurate."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.export import default_format
from spaceport.tools.cli import USAGE, run
from spaceport.tools.cli.export import _options, command
from support.paths import TINY

VNNI = "VNNI without AMX"
LLAMA = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
LARGE: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_key_value_heads": 4, "vocab_size": 32000},
    "gpt2": {"n_embd": 768, "n_layer": 6},  # its layers are no linear modules
    "mixtral": {**LLAMA, "num_key_value_heads": 4, "num_local_experts": 8, "vocab_size": 1000},  # experts in one tensor
}


def configuration(folder: Path, family: str) -> Path:
    """A folder with the configuration of a large model, and without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": family, **LARGE[family]}))
    return folder


@pytest.mark.parametrize(
    ("cpu_class", "weights", "reason"),
    [
        ("AMX", "int8", "weights int8 for AMX: steps of one row take half as long"),
        (
            VNNI,
            "int8",
            "weights int8 for VNNI without AMX: .*97 % of SmolLM2-135M's tokens.*--weights same keeps float32",
        ),
        ("AVX2 without VNNI", "int8", "take half as long as in float32"),
        ("AVX512 without VNNI", "int8", "speed not measured"),
        ("ARM64 with 8-bit dot products", "int8", "speed not measured"),
        ("ARM64 without 8-bit dot products", "same", "weights float32: int8 is not measured on this class of CPU"),
        ("x86 without AVX2", "same", "not measured"),
        ("arm64, instruction sets unknown", "same", r"\(arm64, instruction sets unknown\)"),
    ],
)
def test_a_large_model_is_int8_on_the_cpus_where_int8_is_exact(
    cpu_class: str, weights: str, reason: str, tmp_path: Path
) -> None:
    chosen = default_format(configuration(tmp_path / "llama", "llama"), cpu_class)
    assert (chosen.dtype, chosen.weights) == ("float32", weights)
    assert re.search(reason, chosen.reason)
    assert "\n" not in chosen.reason


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "int8 would hold only 4[0-9]% of the weights of GPT2LMHeadModel"),
        ("mixtral", "int8 would hold only [0-9]% of the weights of MixtralForCausalLM"),
    ],
)
def test_a_model_whose_weights_int8_would_not_hold_stays_float32(family: str, reason: str, tmp_path: Path) -> None:
    chosen = default_format(configuration(tmp_path / family, family), VNNI)
    assert chosen.weights == "same"
    assert re.search(reason, chosen.reason)


def test_a_small_model_stays_float32() -> None:
    chosen = default_format(TINY, VNNI)
    assert (chosen.dtype, chosen.weights) == ("float32", "same")
    assert "int8 gains nothing in a model of 0." in chosen.reason


@pytest.mark.parametrize(
    ("options", "formats", "reason"),
    [
        ("--for vnni", ("float32", "int8", "scatter"), "weights int8 for VNNI without AMX"),
        ("--for avx2 --lowering append", ("float32", "int8", "append"), "weights int8 for AVX2 without VNNI"),
        ("--for gpu", ("float16", "same", "scatter"), "float16, for a GPU"),
        ("--for gpu --lowering append", ("float16", "same", "append"), "float16, for a GPU"),
        ("--lowering append", ("float32", "same", "append"), ""),
        ("--attention operator", ("float32", "same", "scatter"), ""),
        ("--activations float", ("float32", "same", "scatter"), ""),
        ("--dtype float32", ("float32", "same", "scatter"), ""),
        ("--weights same", ("float32", "same", "scatter"), ""),
        ("--weights int4", ("float32", "int4", "scatter"), ""),
        ("--for amx --weights int4", None, "--for has no effect with --weights: leave --weights out"),
        ("--for amx --dtype float16", None, "--for has no effect with --dtype: leave --dtype out"),
    ],
)
def test_named_data_types_win_and_the_reason_for_others_is_one_line(
    options: str, formats: tuple[str, ...] | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = configuration(tmp_path / "llama", "llama")
    arguments = [str(folder), str(tmp_path / "bundle"), *options.split()]
    if formats is None:
        assert run(["export", *arguments]) == USAGE
        assert reason in capsys.readouterr().err
        return
    chosen, why = _options(folder, command.make_context("export", arguments).params)
    assert (chosen.dtype, chosen.weights, chosen.lowering) == formats
    assert reason in (why or "")
    assert bool(why) == bool(reason)
